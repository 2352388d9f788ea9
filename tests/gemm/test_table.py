"""The shipped table is what the script makes of the committed results."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from float8.cost import KNOWN
from float8.gemm import MeasuredGemm, kernel_table
from support.scripts import ROOT, load_script

FOLDER = ROOT / "benchmarks" / "results"
RESULTS = FOLDER / "h100-gemm-kernels.json"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("fit_gemm_choice")


@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_the_table_is_up_to_date(script: ModuleType, chip: str) -> None:
    source = FOLDER / f"{chip}-gemm-kernels.json"
    results = json.loads(source.read_text())
    path = script.table_path(results)
    assert path.name == f"{chip}.json"
    assert path.read_text() == script.table_text(results), (
        f"run python benchmarks/fit_gemm_choice.py benchmarks/results/{source.name}"
    )
    assert kernel_table(KNOWN[chip]) == tuple(script.gemms(results))


def test_it_says_where_it_was_measured(script: ModuleType) -> None:
    table = json.loads(script.table_path(json.loads(RESULTS.read_text())).read_text())
    assert {"device", "torch", "cuda", "command"} <= table.keys()
    assert table["columns"] == list(MeasuredGemm._fields)


def test_a_table_is_read_once_and_unknown_devices_have_none() -> None:
    assert kernel_table(KNOWN["h200"]) is kernel_table(KNOWN["h200"])
    assert kernel_table(None) is None


def test_only_gemms_measured_with_both_kernels_count_and_repeats_are_averaged(
    script: ModuleType,
) -> None:
    def row(M: int, variant: str, ms: float) -> dict[str, object]:
        shape = {"M": M, "K": 64, "N": 32, "format_a": "e4m3"}
        return {**shape, "variant": variant, "ms": ms}

    fast, rowwise = script.TENSORWISE, script.ROWWISE
    rows = [row(16, "bf16", 9.0), row(16, fast, 1.0), row(16, rowwise, 0.5)]
    rows += [row(32, fast, 1.0), row(16, fast, 2.0)]
    assert script.gemms({"rows": rows}) == [MeasuredGemm(16, 64, 32, "e4m3", 1500.0, 500.0)]


def test_a_device_without_ceilings_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="no ceilings for 'abacus'"):
        script.table_path({"environment": {"device": "abacus"}})


def test_the_script_from_the_command_line(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def run(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["fit_gemm_choice.py", str(RESULTS), *words])
        script.main()

    monkeypatch.setattr(script, "TABLES", tmp_path)
    with pytest.raises(SystemExit, match=r"h100\.json is not up to date"):
        run("--check")
    run()
    run("--check")
    assert (tmp_path / "h100.json").read_text() == script.table_text(
        json.loads(RESULTS.read_text())
    )
    assert len(capsys.readouterr().out.splitlines()) == len(kernel_table(KNOWN["h100"]))
