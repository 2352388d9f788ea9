"""Writes the tables of README.md and docs/performance.md, from the results files and nothing else.

    python benchmarks/performance_tables.py          # rewrite both pages
    python benchmarks/performance_tables.py --check  # exit 1 if that would change one

The README shows a run of `benchmarks/plain.py`. docs/performance.md shows the small layers of
such a run, and what `float8 bench ... -o benchmarks/results/NAME.json` wrote: files of `block`,
`fsdp`, `tp`, `linear` and `cast`. To change a number, measure again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

PLAIN = "plain-rebuild.json"
HUGGING_FACE = "hugging-face.json"
PLAIN_COMMIT = "ca2477b"  # the newest run of the whole stack beside torchao
FINER_COMMIT = "301e755"  # the newest run with scales per row and block
HELD_COMMIT = "6b3c701"  # the newest run with held weights and fuse=True
SMALL_COMMIT = "ca2477b"  # the newest run with small layers
MICROBATCHES_COMMIT = "bb167fc"  # the newest run with several microbatches
NARROW_COMMIT = "9763af4"  # the newest run of narrower blocks

WIDTH = 96  # of a command, which goes on in the next line
REMOVED = ("speculative",)  # recipes that results files of former versions have

Row = dict[str, Any]
Results = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether all is up to date")
    args = parser.parse_args()
    for (page, name), write in SECTIONS.items():
        text = page.read_text()
        new = updated(text, name, write(RESULTS))
        if args.check and new != text:
            sys.exit(f"{page.name} is not up to date: run python benchmarks/performance_tables.py")
        page.write_text(new)


def updated(page: str, name: str, content: str) -> str:
    """The page with `content` between the two markers of that name."""
    begin = f"<!-- {name}: written by benchmarks/performance_tables.py -->"
    end = f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"page: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


# ---------------------------------------------------------------- plain models


def plain_stack(
    folder: Path, commit: str = PLAIN_COMMIT, page: Path = README, what: str = "8B stack"
) -> str:
    """The stack of blocks of a plain model: a row per recipe, compiled and eager."""
    run = plain_run(folder, commit, what)
    heads = ["recipe", "compiled ms", "speedup", "peak GiB", "eager ms", "speedup", "peak GiB"]
    rows = []
    for recipe, modes in by_recipe(plain_rows(run, what)).items():
        cells = [label(recipe, run)]
        for mode in ("compiled", "eager"):
            row = modes.get(mode, {})
            cells += [number(row, "ms", 1), number(row, "speedup", 2), number(row, "peak_gib", 2)]
        rows.append(cells)
    return "\n".join([*table(heads, rows), "", *source(run, folder / PLAIN, page)])


def plain_finer(folder: Path) -> str:
    """The same with scales per row and block."""
    return plain_stack(folder, FINER_COMMIT, PERFORMANCE)


def plain_held(folder: Path) -> str:
    """The same with weights held in float8, and with fuse=True."""
    return plain_stack(folder, HELD_COMMIT, PERFORMANCE)


def plain_microbatches(folder: Path) -> str:
    """Steps of several forwards and backwards."""
    return plain_stack(folder, MICROBATCHES_COMMIT, PERFORMANCE, "8B stack, 8 microbatches")


def plain_narrow(folder: Path) -> str:
    """Blocks of half the width."""
    return plain_stack(folder, NARROW_COMMIT, PERFORMANCE, "1b stack")


def plain_small(folder: Path) -> str:
    """What is slower in float8: one layer alone, and a model of small layers."""
    both = "linear 8192,4096,4096", "150m, every layer"
    run = plain_run(folder, SMALL_COMMIT, both[0])
    rows = []
    for what in both:
        for row in plain_rows(run, what):
            times = [number(row, "ms", 2), number(row, "speedup", 2), number(row, "peak_gib", 2)]
            rows.append([what, label(row["recipe"], run), *times])
    heads = ["compiled, forward + backward", "recipe", "ms", "speedup", "peak GiB"]
    return "\n".join([*table(heads, rows), "", *source(run, folder / PLAIN, PERFORMANCE)])


def hugging_face(folder: Path) -> str:
    """Steps of the `Trainer` of transformers: a row per recipe, compiled and eager."""
    results: Results = json.loads((folder / HUGGING_FACE).read_text())
    heads = ["recipe"]
    for mode in ("compiled", "eager"):
        heads += [f"{mode} tokens/s", "speedup", "GiB"]
    rows = []
    for recipe, modes in by_recipe(results["rows"]).items():
        cells = [recipe.replace("@fused", ", fused")]
        for mode in ("compiled", "eager"):
            row = modes.get(mode, {})
            tokens = f"{row['tokens_per_s']:,.0f}" if row else ""
            cells += [tokens, number(row, "speedup", 2), number(row, "peak_gib", 2)]
        rows.append(cells)
    shown = source(results, folder / HUGGING_FACE, PERFORMANCE)
    version = results["environment"]["transformers"]
    shown[0] = shown[0].replace(", commit", f", transformers {version}, commit")
    return "\n".join([*table(heads, rows), "", *shown])


def plain_run(folder: Path, commit: str, what: str) -> Results:
    """The run of exactly this commit with rows of `what`."""
    runs: list[Results] = json.loads((folder / PLAIN).read_text())["runs"]
    found = [
        run for run in runs if run["environment"]["commit"] == commit and plain_rows(run, what)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{PLAIN}: got {len(found)} runs of commit {commit} with {what}, expected one"
        )
    return found[0]


def plain_rows(run: Results, what: str) -> list[Row]:
    rows = [dict(row) for row in run["rows"] if row["what"] == what]
    for row in rows:  # "tensorwise@torchao" -> "torchao tensorwise"
        row["recipe"] = " ".join(reversed(row["recipe"].split("@")))
    return rows


# ---------------------------------------------------------------- float8 bench


def tables(folder: Path) -> str:
    """All tables, of the files in `folder` by name."""
    parts = []
    shown = {
        "block": block_table,
        "fsdp": ranks_table,
        "tp": ranks_table,
        "linear": linear_table,
        "cast": cast_line,
    }
    for name, show in shown.items():
        for path in sorted(folder.glob("*.json")):
            results = json.loads(path.read_text())
            if results.get("benchmark") == name:
                parts.append(show(results, path))
                if "note" in results:
                    parts.append("\n".join([*textwrap.wrap(results["note"], 116), ""]))
    return "\n".join(parts)


def block_table(results: Results, path: Path) -> str:
    """A row per recipe, compiled and eager."""
    size = results["settings"]
    title = (
        f"**{size['blocks']} block{'' if size['blocks'] == 1 else 's'} of {size['model']}, "
        f"{size['batch']} x {size['seq_len']} tokens, forward + backward"
    )
    microbatches = size.get("microbatches", 1)  # files written before there were several lack it
    if microbatches > 1:
        title += f" of {microbatches} microbatches"
    heads = ["recipe", "compiled ms", "speedup", "peak GiB", "eager ms", "speedup"]
    rows = []
    for recipe, modes in by_recipe(results["rows"]).items():
        compiled, eager = modes.get("compiled", {}), modes.get("eager", {})
        cells = [number(compiled, "ms", 1), number(compiled, "speedup", 2)]
        cells += [number(compiled, "peak_gib", 2)]
        cells += [number(eager, "ms", 1), number(eager, "speedup", 2)]
        rows.append([label(recipe, results), *cells])
    return "\n".join([f"{title}**", "", *table(heads, rows), "", *source(results, path)])


def ranks_table(results: Results, path: Path) -> str:
    """A row per recipe, mode and gather."""
    size, sharded = results["settings"], results["benchmark"] == "fsdp"
    title = f"**{size['blocks']} block{'' if size['blocks'] == 1 else 's'} of {size['model']}, "
    title += "FSDP2" if sharded else "tensor and sequence parallel"
    title += f" on {size['ranks']} ranks, {size['batch']} x {size['seq_len']} tokens"
    title += " each, forward + backward + AdamW**" if sharded else ", forward + backward**"
    heads = ["recipe", "gather", "ms", "tokens/s", "speedup", "sent GB"]
    rows = []
    for row in results["rows"]:
        name = label(row["recipe"], results)
        cells = [name if row["mode"] == "compiled" else f"{name}, {row['mode']}"]
        cells += [row["gather"] or "", number(row, "ms", 1), f"{row['tokens_per_s']:,.0f}"]
        sent = row["gathered_mb"] + row["reduce_scattered_mb"]
        cells += [number(row, "speedup", 2), f"{sent / 1e3:.2f}"]
        cells += [number(row, "exposed_ms", 1), number(row, "peak_gib", 2)]
        rows.append(cells)
    lines = table([*heads, "exposed ms", "GiB"], rows)
    return "\n".join([title, "", *lines, "", *source(results, path)])


def linear_table(results: Results, path: Path) -> str:
    """A row per shape set and recipe: the set's sums, or its only shape."""
    sets: dict[str, list[Row]] = {}
    for row in results["rows"]:
        sets.setdefault(row["set"], []).append(row)
    heads = ["layers", "recipe", "compiled ms", "speedup", "eager ms", "speedup", "GEMMs alone, ms"]
    lines = []
    for name, rows in sets.items():
        sums = [row for row in rows if row["M"] == "sum"] or rows
        what = name if sums[0]["M"] == "sum" else "{M} x {K} x {N}".format(**sums[0])
        for recipe, modes in by_recipe(sums).items():
            compiled, eager = modes.get("compiled", {}), modes.get("eager", {})
            cells = [number(compiled, "ms", 2), number(compiled, "speedup", 2)]
            cells += [number(eager, "ms", 2), number(eager, "speedup", 2)]
            cells += [number(compiled or eager, "floor_ms", 2)]
            lines.append([what, label(recipe, results), *cells])
    title = "**Linear layers one by one, forward + backward, summed over each set of shapes**"
    return "\n".join([title, "", *table(heads, lines), "", *source(results, path)])


def cast_line(results: Results, path: Path) -> str:
    """How near to copy bandwidth the casts to both GEMM layouts come."""
    ranges = []
    for case, what in (("cast", "one scale"), ("rowwise", "row scales"), ("1x128", "1x128 blocks")):
        shares = [row["of_copy"] for row in results["rows"] if row["case"] == f"{case} row+col"]
        if shares:
            ranges.append(f"{min(shares):.2f} to {max(shares):.2f} with {what}")
    lines = ["Of copy bandwidth, casts to both GEMM layouts reach", f"{', '.join(ranges)}."]
    return "\n".join([*lines, "", *source(results, path)])


def by_recipe(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by recipe and mode."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["recipe"] not in REMOVED:
            found.setdefault(row["recipe"], {})[row["mode"]] = row
    return found


def label(recipe: str, results: Results) -> str:
    """The recipe; a peer's with its version."""
    peer, _, name = recipe.partition(" ")
    version = results["environment"].get(peer)
    return f"{peer} {version} {name}" if version else recipe


# ---------------------------------------------------------------- Markdown


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table, without columns that no row fills; readable as plain text, too."""
    columns = zip(heads, *rows, strict=True)
    filled = [column for column in columns if any(column[1:])]
    padded = []
    for i, column in enumerate(filled):
        width = max(map(len, column))
        texts = all(not cell or not cell[0].isdigit() for cell in column[1:]) or i == 0
        cells = [cell.ljust(width) if texts else cell.rjust(width) for cell in column]
        rule = "-" * width if texts else "-" * (width - 1) + ":"
        padded.append([cells[0], rule, *cells[1:]])
    return [f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)]


def number(row: Row, key: str, digits: int) -> str:
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"


def source(results: Results, path: Path, page: Path = PERFORMANCE) -> list[str]:
    """Where it was measured, and the command that measures what is left of it today."""
    environment = results["environment"]
    command = environment["command"].split("; ")[-1]  # what came before were tests
    for recipe in REMOVED:
        command = command.replace(f",{recipe}", "")
    link = Path(os.path.relpath(path, page.parent)) if path.is_relative_to(ROOT) else path.name
    commit = environment.get("commit", environment.get("git_commit"))
    where = f"{environment['device']}, torch {environment['torch']}"
    if commit:
        where += f", commit {commit[:7]}"
    lines = [f"{where}. Results in", f"[{path.name}]({link}), by", ""]
    return [*lines, "```bash", *wrapped(command), "```", ""]


def wrapped(command: str) -> list[str]:
    """A shell command in lines of at most `WIDTH` characters, broken before options."""
    lines = [""]
    for part in command.replace(" -", "\n-").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return lines


SECTIONS: dict[tuple[Path, str], Callable[[Path], str]] = {
    (README, "plain models"): plain_stack,
    (PERFORMANCE, "finer scales"): plain_finer,
    (PERFORMANCE, "held and fused"): plain_held,
    (PERFORMANCE, "microbatches"): plain_microbatches,
    (PERFORMANCE, "Hugging Face"): hugging_face,
    (PERFORMANCE, "narrow"): plain_narrow,
    (PERFORMANCE, "small layers"): plain_small,
    (PERFORMANCE, "performance"): tables,
}
"""What is written where: the page and the name of its markers."""


if __name__ == "__main__":
    main()
