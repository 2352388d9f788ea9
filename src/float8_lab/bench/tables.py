"""`float8 bench tables`: tables of pages in docs, from results files alone.

The files are what `float8 bench ... -o benchmarks/results/NAME.json` wrote. `SECTIONS` says which
of their rows and columns go where; a page has the markers between which they are written.
"""

import json
import os
import textwrap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from float8_lab.bench.results import size_of
from float8_lab.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

_MODES = "compiled", "graphed", "eager"

Row = dict[str, Any]
Results = dict[str, Any]
Columns = Mapping[str, tuple[str, int]]  # key and digits of each heading


class Section(NamedTuple):
    """One place of a page, between two markers: a picture, a table, and where they come from."""

    name: str  # of the markers
    file: str  # in `RESULTS`, without .json; a picture of that name, if there is one, comes first
    title: str  # with settings in braces; `size` is model and tokens
    columns: Columns  # of each mode; rows without the first one are left out


_STEP: Columns = {"ms": ("ms", 1), "speedup": ("speedup", 2), "peak GiB": ("peak_gib", 2)}
_TRAIN = {**_STEP, "tokens/s of a GPU": ("tokens_per_s_per_gpu", 0)}
_WHOLE = "{size} per GPU: training with AdamW; GPUs: {ranks}"
_ADAPTED = "{size}: training with AdamW, LoRA with PEFT; GPUs: {ranks}"
_BLOCKS = "{size}: forward + backward"
_SHARED = "{size}, tensor and sequence parallel on {ranks} GPUs: forward + backward"

SECTIONS = (
    Section("8B model", "h200-train-8b", _WHOLE, _TRAIN),
    Section("1B model", "h200-train-1b", _WHOLE, _TRAIN),
    Section("LoRA", "h200-train-lora", _ADAPTED, _TRAIN),
    Section("8B blocks", "h200-kernels-8b", _BLOCKS, _STEP),
    Section("70B block", "h200-block-70b", _BLOCKS, _STEP),
    Section("TP", "h200-tp-llama3-70b", _SHARED, _STEP),
)


def write_tables(only_check: bool) -> bool:
    """Write tables of `PAGE` and pictures, unless only to be checked; return if `PAGE` changes."""
    if not RESULTS.is_dir():
        got = f"bench tables: got no folder {RESULTS}, expected that of a checkout"
        raise ConfigError(f"{got}: run it in one, installed there by pip install -e .")
    old = new = PAGE.read_text()
    for section in SECTIONS:
        begin = f"<!-- {section.name}: written by float8 bench tables -->"
        new = updated(new, begin, f"<!-- end of {section.name} -->", written(section))
        if not only_check and (picture := RESULTS / f"{section.file}.png").exists():
            draw = import_module("float8_lab.bench.picture").plot_results
            draw(json.loads(picture.with_suffix(".json").read_text()), picture)
    if new != old and not only_check:
        PAGE.write_text(new)
    return new != old


def updated(text: str, begin: str, end: str, content: str) -> str:
    """Return the text with `content`, which ends a line, between two of its lines."""
    before, found, rest = text.partition(begin + "\n")
    _, found_end, after = rest.partition(end + "\n")
    if not found or not found_end:
        raise ValueError(f"page: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{content}{end}\n{after}"


def written(section: Section) -> str:
    """Return the content of a section."""
    path = RESULTS / f"{section.file}.json"
    results = json.loads(path.read_text())
    about, rows, beside = results["settings"], results["rows"], PAGE.parent
    size = {"size": size_of(about)} if "blocks" in about else {}
    title = section.title.format(**about, **size)
    title = title[0].upper() + title[1:]
    parts = [[f"**{title}**"], pivot(section, results), source(results, path, beside)]
    if (picture := path.with_suffix(".png")).exists():
        parts.insert(0, [f"![Speed and peak memory]({os.path.relpath(picture, beside)})"])
    drifts = [row.get("drift_percent") for row in rows if "ms" in row]
    if measured := [abs(each) for each in drifts if each is not None]:
        once = len(drifts) - len(measured)
        text = "Timed twice" + f", but for {once} that a time limit cut off" * (once > 0)
        parts.append([f"{text}: up to {max(measured):.1f} % apart."])
    if failed := [row for row in rows if row.get("left_out")]:
        names = (", ".join(filter(None, (row["recipe"], row.get("mode")))) for row in failed)
        parts.append(textwrap.wrap(f"Failed, and so not measured: {'; '.join(names)}.", 116))
    return "\n" + "\n\n".join("\n".join(part) for part in parts) + "\n\n"


def pivot(section: Section, results: Results) -> list[str]:
    """Return a table: a line for each recipe, columns for each mode; peers with versions."""
    (first, (needed, _)), *_ = section.columns.items()
    rows = [row for row in results["rows"] if row.get(needed) is not None]
    if not rows:
        has = ", ".join(results["rows"][0])
        raise ValueError(f"{section.file}.json: expected rows with {needed!r}, got {has}")
    modes = [mode for mode in _MODES if any(row["mode"] == mode for row in rows)]
    heads = ["recipe"]
    for mode in modes:
        heads += [f"{mode} {head}" if head == first else head for head in section.columns]
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        peer, _, recipe = row["recipe"].partition(" ")
        version = results["environment"].get(peer)
        name = f"{peer} {version} {recipe}" if version else row["recipe"]
        found.setdefault(name, {})[row["mode"]] = row
    lines = []
    for name, of in found.items():
        cells = [_number(of.get(x, {}), *c) for x in modes for c in section.columns.values()]
        lines.append([name, *cells])
    return table(heads, lines)


def _number(row: Row, key: str, digits: int) -> str:
    """Return a number with so many digits behind the point; "" if there is none."""
    return "" if row.get(key) is None else f"{row[key]:,.{digits}f}"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return lines of a table, without columns that no row fills; readable as plain text, too.

    The first column has names, all others numbers.
    """
    padded = []
    for i, column in enumerate(zip(heads, *rows, strict=True)):
        if any(column[1:]):
            width = max(map(len, column))
            rule = "-" * width if not i else "-" * (width - 1) + ":"
            head, *cells = (x.rjust(width) if i else x.ljust(width) for x in column)
            padded.append([head, rule, *cells])
    return [f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)]


def source(results: Results, path: Path, beside: Path) -> list[str]:
    """Return where it was measured, and a link to the file, which has the command."""
    environment = results["environment"]
    commit = environment.get("commit") or environment.get("git_commit") or "unknown"
    where = f"{environment['device']}, torch {environment['torch']}"
    # Where sources were changed, the commit ends in -dirty.
    where += f", commit {commit[:7]}{'-dirty' * commit.endswith('-dirty')}. Results and command:"
    return [where, f"[{path.name}]({os.path.relpath(path, beside)})."]
