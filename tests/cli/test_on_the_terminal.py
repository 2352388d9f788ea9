"""What runs and comparisons show fits the terminal; signals stop them."""

import io
import re
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console

from float8_lab.cli.progress import ConsoleProgress, stop_on_signals
from float8_lab.cli.table import print_table
from float8_lab.trainer.compare import Row, cells
from float8_lab.trainer.config import TrainConfig
from float8_lab.trainer.metrics import StepRecord


def row(recipe: str, status: str = "finished") -> Row:
    return {
        "recipe": recipe,
        "status": status,
        "train_loss": 1.2345,
        "val_loss": 1.2346,
        "val_gap_nats": -0.0123,
        "val_gap_percent": -10.12,
        "tokens_per_s": 1_234_567.0,
        "speedup": 1.08,
        "step_ms": 1234.5,
        "peak_memory_bytes": 123_456 * 2**20,
    }


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_comparison_fits_with_all_its_numbers(width: int) -> None:
    rows = [row("high_precision", "interrupted"), row("tensorwise"), row("rowwise_with_gw_hp")]
    file = io.StringIO()
    shown = [cells(each) for each in rows]
    print_table(Console(file=file, width=width), "losses", shown, [*shown[0]][1:])
    printed = file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    for one in rows:
        for text in list(cells(one).values())[1:]:
            assert text is not None
            assert printed.split().count(text) == len(rows)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_bar_fits_and_shows_step_and_loss(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    progress = ConsoleProgress(console)
    record = StepRecord(50_000, 1.25, 1.0, 1e-3, 0.1, 65_536, True, 12 * 2**30, 612.3, 0.619)
    progress.on_start(TrainConfig.create(steps=100_000), 0, "about it")
    progress.on_step(50_000)
    progress.on_records([record])
    assert progress._bar is not None
    progress._bar.refresh()
    progress.on_end("finished", 50_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", file.getvalue()).replace("\r", "\n")
    bars = [line for line in shown.split("\n") if "loss 1.2500" in line]
    assert bars
    for line in bars:
        assert len(line) <= width
        assert " 50000/100000 " in line
        assert ("12.00 GiB  612 TFLOP/s  MFU 62% (bf16)" in line) == (width == 120)


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Python's own handler: a process started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts_as_usual(number: signal.Signals) -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    with stop_on_signals() as stop:
        assert not {*handlers()} & {*before}
        signal.raise_signal(number)
        assert stop.is_set()
        assert handlers() == before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers() == before
