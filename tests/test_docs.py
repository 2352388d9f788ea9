"""Code samples of README.md and docs/, examples and notebooks run; links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import float8
from support.forks import COMPILER, EAGER, TORCH, run_program
from support.lazily import needs_installed
from support.rings import short
from support.samples import PAGES, ROOT, Sample, fences, page_name, samples

# Every fence says what it holds. Samples in a fence of `py` need several ranks: tests/distributed
# runs them. The other languages are not run.
LANGUAGES = {"python", "py", "bash", "text"}

# What samples may import and users need not have.
EXTRAS = {"accelerate", "lightning", "peft", "torchao", "torchtitan", "transformers"}
# Examples that compile run without Inductor's code, which takes most of their time to make; a
# sample of docs/memory.md has it made.
NO_CODE = "__import__('graphs').make_no_code()\n"
NO_DATASETS = "__import__('titan_datasets').take_its_place()\n"  # to import torchtitan without
TO_A_FILE = """
import matplotlib.pyplot as plt
plt.switch_backend("agg")
plt.show = lambda: plt.savefig("shown.png")
"""
SAMPLES = samples("python")
# What imports another library, or has Inductor make its code, takes seconds.
HEAVY = {"README.md-2", "docs/memory.md-0"}
QUICK = {"delayed_scaling", "float8_in_250_lines"}
LIGHT = {n for n, x in enumerate(SAMPLES) if not (x.needs & EXTRAS or x.name in HEAVY)}
EXAMPLES, NOTEBOOKS = (sorted((ROOT / "examples").glob(x)) for x in ("*.py", "*.ipynb"))
EXAMPLES.remove(ROOT / "examples" / "pretrain_fsdp2.py")  # of ranks: see tests/test_examples.py


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def warnings_of_ours(shown: str) -> list[str]:
    """Those of what was written to stderr that are of a sample or of the library."""
    library = re.escape(str(Path(float8.__file__).parent))
    return re.findall(rf"^(?:.*\bprogram\.py|{library}/).*Warning.*$", shown, re.MULTILINE)


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: float8\.(?:linear\.)?(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(float8.__all__)


def test_the_newest_changes_are_those_of_this_version() -> None:
    """Which is a release if they are dated."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, _, day = headings[0].partition(", ")
    assert version == float8.__version__
    assert re.fullmatch("unreleased" if ".dev" in version else r"\d{4}-\d\d-\d\d", day)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d\d-\d\d", each) for each in headings[1:])


def test_there_are_pages_and_samples() -> None:
    assert len(PAGES) > 5
    assert len(SAMPLES) > 5
    assert len(samples("py")) > 1
    assert any(page_name(page) == "README.md" for page in PAGES)


def test_programs_end_with_the_process_that_ran_them() -> None:
    """Else Python warns of a process that is still running, and of its pipes."""
    code = "from support.forks import run_program; print(run_program('', ()).returncode)"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize(
    "sample", short(LIGHT, [(each,) for each in SAMPLES]), ids=lambda x: x.name
)
def test_sample_runs(sample: Sample) -> None:
    extras = EXTRAS & sample.needs
    for library in extras | ({"accelerate"} if "transformers" in extras else set()):
        needs_installed(library)
    begin = NO_DATASETS if "torchtitan" in extras else ""
    imported = COMPILER if extras else TORCH if sample.name in HEAVY else EAGER
    done = run_program(begin + sample.code, imported)
    assert done.returncode == 0, done.stderr
    # Others warn of what they like.
    found = warnings_of_ours(done.stderr) if extras else "Warning" in done.stderr
    assert not found, done.stderr


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize(
    "example",
    short({n for n, x in enumerate(EXAMPLES) if x.stem in QUICK}, EXAMPLES),
    ids=lambda path: path.stem,
)
def test_example_runs(example: Path) -> None:
    text = example.read_text()
    extras = {name for name in EXTRAS if f"from {name} " in text}
    for library in extras:
        needs_installed(library)
    imported = COMPILER if extras else EAGER if example.stem in QUICK else TORCH
    done = run_program(text if imported is EAGER else NO_CODE + text, imported)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_pages_read_well_and_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert {language for language, _ in fences(page)} <= LANGUAGES
    assert text.count("```") == 2 * len(list(fences(page)))
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 120, f"{page_name(page)}:{number}"
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_pages_name_files_that_exist() -> None:
    named = re.compile(r"`((?:benchmarks|docs|examples|src|tests)/[\w./]*)`")
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    paths = {path for page in pages for path in named.findall(page.read_text())}
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.exhaustive
def test_notebook_runs(notebook: Path) -> None:
    text = notebook.read_text()
    assert len(text) < 60_000, "its outputs are large: leave only those that matter"
    assert "steps: int = 200" in text
    cells = json.loads(text.replace("steps: int = 200", "steps: int = 12"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = run_program("\n".join([TO_A_FILE, *code, "assert Path('shown.png').exists()"]), COMPILER)
    assert (done.returncode, done.stderr) == (0, "")
