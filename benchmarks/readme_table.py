"""Writes the README's performance tables, from the results files and nothing else.

    python benchmarks/readme_table.py          # rewrite README.md
    python benchmarks/readme_table.py --check  # exit 1 if that would change it

A results file is what one `float8 bench ... -o benchmarks/results/NAME.json` wrote; those of
`block`, `fsdp`, `linear` and `cast` are shown. To change a number, measure again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- performance: written by benchmarks/readme_table.py -->"
END = "<!-- end of performance -->"

REMOVED = ("speculative",)  # recipes that results files of former versions have

Row = dict[str, Any]
Results = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    text = README.read_text()
    new = updated(text, tables(RESULTS))
    if args.check and new != text:
        sys.exit("README.md is not up to date: run python benchmarks/readme_table.py")
    README.write_text(new)


def updated(readme: str, performance: str) -> str:
    """The README with `performance` between the two markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: expected the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{performance}\n{END}{after}"


def tables(folder: Path) -> str:
    """All tables, of the files in `folder` by name."""
    parts = []
    shown = {"block": block_table, "fsdp": fsdp_table, "linear": linear_table, "cast": cast_line}
    for name, show in shown.items():
        for path in sorted(folder.glob("*.json")):
            results = json.loads(path.read_text())
            if results.get("benchmark") == name:
                parts.append(show(results, path))
    return "\n".join(parts)


def block_table(results: Results, path: Path) -> str:
    """A row per recipe, compiled and eager."""
    size = results["settings"]
    title = (
        f"{size['blocks']} block{'' if size['blocks'] == 1 else 's'} of {size['model']}, "
        f"{size['batch']} x {size['seq_len']} tokens, "
        "forward + backward"
    )
    microbatches = size.get("microbatches", 1)  # files written before there were several lack it
    if microbatches > 1:
        title += f" of {microbatches} microbatches"
    lines = header([title, "compiled ms", "speedup", "peak GiB", "eager ms", "speedup"])
    for recipe, modes in by_recipe(results["rows"]).items():
        compiled, eager = modes.get("compiled", {}), modes.get("eager", {})
        cells = [number(compiled, "ms", 1), number(compiled, "speedup", 2)]
        cells += [number(compiled, "peak_gib", 2)]
        cells += [number(eager, "ms", 1), number(eager, "speedup", 2)]
        lines.append(line([label(recipe, results), *cells]))
    return "\n".join([*lines, "", source(results, path), ""])


def fsdp_table(results: Results, path: Path) -> str:
    """A row per recipe, mode and gather."""
    size = results["settings"]
    title = (
        f"{size['blocks']} block{'' if size['blocks'] == 1 else 's'} of {size['model']}, FSDP2 on "
        f"{size['ranks']} ranks, {size['batch']} x {size['seq_len']} tokens each, "
        "forward + backward + AdamW"
    )
    heads = ["gather", "ms", "tokens/s", "speedup", "gathered GB", "exposed ms", "peak GiB"]
    lines = header([title, *heads])
    for row in results["rows"]:
        name = label(row["recipe"], results)
        cells = [name if row["mode"] == "compiled" else f"{name}, {row['mode']}", row["gather"]]
        cells += [number(row, "ms", 1), f"{row['tokens_per_s']:,.0f}", number(row, "speedup", 2)]
        cells += [f"{row['gathered_mb'] / 1e3:.2f}"]
        cells += [number(row, "exposed_ms", 1), number(row, "peak_gib", 2)]
        lines.append(line(cells))
    return "\n".join([*lines, "", source(results, path), ""])


def linear_table(results: Results, path: Path) -> str:
    """A row per shape set and recipe: the set's sums, or its only shape."""
    sets: dict[str, list[Row]] = {}
    for row in results["rows"]:
        sets.setdefault(row["set"], []).append(row)
    title = "linear layers, forward + backward"
    heads = ["recipe", "compiled ms", "speedup", "eager ms", "speedup", "float8 GEMMs alone, ms"]
    lines = header([title, *heads])
    for name, rows in sets.items():
        sums = [row for row in rows if row["M"] == "sum"] or rows
        what = name if sums[0]["M"] == "sum" else "{M} x {K} x {N}".format(**sums[0])
        for recipe, modes in by_recipe(sums).items():
            compiled, eager = modes.get("compiled", {}), modes.get("eager", {})
            cells = [number(compiled, "ms", 2), number(compiled, "speedup", 2)]
            cells += [number(eager, "ms", 2), number(eager, "speedup", 2)]
            cells += [number(compiled or eager, "floor_ms", 2)]
            lines.append(line([what, label(recipe, results), *cells]))
    return "\n".join([*lines, "", source(results, path), ""])


def cast_line(results: Results, path: Path) -> str:
    """How near to copy bandwidth the cast to both layouts comes."""
    shares = [row["of_copy"] for row in results["rows"] if row["case"] == "cast row+col"]
    return (
        f"The cast to both GEMM layouts runs at {min(shares):.2f} to {max(shares):.2f} of copy "
        f"bandwidth. {source(results, path)}\n"
    )


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


def header(cells: list[str]) -> list[str]:
    return [line(cells), "|---" * len(cells) + "|"]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(row: Row, key: str, digits: int) -> str:
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"


def source(results: Results, path: Path) -> str:
    """Where it was measured, and the command that measures what is left of it today."""
    environment = results["environment"]
    command = environment["command"]
    for recipe in REMOVED:
        command = command.replace(f",{recipe}", "")
    link = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return (
        f"{environment['device']}, torch {environment['torch']} ([results]({link}), `{command}`)."
    )


if __name__ == "__main__":
    main()
