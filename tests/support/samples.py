"""The code samples of README.md and docs/; needs only torch."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Sample(NamedTuple):
    """A fenced block of code."""

    name: str
    """Its page, and which of those in its language it is there."""

    code: str

    @property
    def needs(self) -> set[str]:
        """The packages it imports, but for Python's own."""
        names: set[str] = set()
        for node in ast.walk(ast.parse(self.code)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the content of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def samples(language: str) -> list[Sample]:
    """Those in fences of `python`, which run alone, or of `py`, which run on two ranks."""
    return [
        Sample(f"{page_name(page)}-{index}", code)
        for page in PAGES
        for index, code in enumerate(code for each, code in fences(page) if each == language)
    ]


def run_on_ranks(code: str) -> None:
    """Run a sample on this rank, on the CPU, in the process group that is there already."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        exec(compile(code, "sample.py", "exec"), {})
