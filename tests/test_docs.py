"""The code samples of README.md and docs/ run, word for word, and their links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forks import run_program

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Every fence says what it holds. Samples in a fence of `py` need several ranks: tests/distributed
# runs them. The other languages are not run.
LANGUAGES = {"python", "py", "bash", "text"}


# What samples may import and users need not have.
EXTRAS = {"accelerate", "lightning", "peft", "torchao", "torchtitan", "transformers"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the content of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def prose(page: Path) -> str:
    """The page without its fenced blocks and code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The headings as GitHub names them in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SAMPLES = [
    pytest.param(sample, id=f"{name(page)}-{index}")
    for page in PAGES
    for index, sample in enumerate(s for language, s in fences(page) if language == "python")
]


def test_there_are_pages_and_samples() -> None:
    assert len(PAGES) > 5
    assert len(SAMPLES) > 5
    assert any(name(page) == "README.md" for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_names_a_language(page: Path) -> None:
    assert {language for language, _ in fences(page)} <= LANGUAGES
    assert page.read_text().count("```") == 2 * len(list(fences(page)))


@pytest.mark.parametrize("sample", SAMPLES)
def test_sample_runs(sample: str) -> None:
    extras = EXTRAS.intersection(re.findall(r"^(?:from|import) (\w+)", sample, re.MULTILINE))
    for library in extras | ({"accelerate"} if "transformers" in extras else set()):
        pytest.importorskip(library)
    done = run_program(sample)
    assert done.returncode == 0, done.stderr
    ours = r"(program\.py|/float8/).*Warning"  # others warn of what they like
    assert not re.search(ours if extras else "Warning", done.stderr), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_no_longer_than_an_editor_is_wide(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 120, f"{name(page)}:{number}"
