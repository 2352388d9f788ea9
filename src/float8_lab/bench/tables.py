"""`float8 bench tables`: the tables of README.md and docs/performance.md, from results files alone.

And the estimates of `float8 plan`, which the wheel has.

The files are what `float8 bench ... -o benchmarks/results/NAME.json` wrote. Those of plain models
are older: scripts wrote them, which are `float8 bench model` today.
"""

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from float8_lab.bench.estimate import STORED, packed
from float8_lab.bench.variants import COMPILED, EAGER, GRAPHED, HIGH_PRECISION

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

PLAIN = RESULTS / "plain-rebuild.json"
WIDTH = 96  # of a command, which goes on in the next line
REMOVED = ("speculative",)  # recipes that results files of former versions have

Row = dict[str, Any]
Results = dict[str, Any]
Columns = Mapping[str, tuple[str, int]]  # key and digits of each heading

_STEP: Columns = {"ms": ("ms", 1), "speedup": ("speedup", 2), "peak GiB": ("peak_gib", 2)}
_SMALL = {**_STEP, "ms": ("ms", 2)}
_SPEEDUP: Columns = {"speedup": ("speedup", 2)}
_LINEAR = {"ms": ("ms", 2), "speedup": ("speedup", 2), "GEMMs alone, ms": ("floor_ms", 2)}
_RANKS = {"ms": ("ms", 1), "tokens/s": ("tokens_per_s", 0), "speedup": ("speedup", 2)}
_RANKS |= {"sent GB": ("sent_gb", 2), "exposed ms": ("exposed_ms", 1), "GiB": ("peak_gib", 2)}


def write_tables(only_check: bool) -> list[Path]:
    """Write both pages and the estimates, unless that is only to be checked.

    Returns those that change.
    """
    changed = []
    for page in (README, PERFORMANCE, STORED):
        old = page.read_text()
        new = packed(RESULTS) if page == STORED else old
        for (where, name), write in SECTIONS.items():
            if where == page:
                begin = f"<!-- {name}: written by float8 bench tables -->"
                new = updated(new, begin, f"<!-- end of {name} -->", f"\n{write(page)}\n")
        if new != old:
            changed.append(page)
            page.write_text(old if only_check else new)
    return changed


def updated(text: str, begin: str, end: str, content: str) -> str:
    """Return the text with `content`, which ends a line, between two of its lines."""
    before, found, rest = text.partition(begin + "\n")
    _, found_end, after = rest.partition(end + "\n")
    if not found or not found_end:
        raise ValueError(f"page: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{content}{end}\n{after}"


def plain(
    page: Path, commit: str, how: str, what: Sequence[str] = ("8B stack",), but: str | None = None
) -> str:
    """Plain models in the run of exactly this commit, `but` for one recipe.

    `how`: options that measure them today.
    """
    runs: list[Results] = json.loads(PLAIN.read_text())["runs"]
    (run,) = (
        run
        for run in runs
        if run["environment"]["commit"] == commit
        and {*what} <= {row["what"] for row in run["rows"]}
    )
    # "tensorwise@torchao" -> "torchao tensorwise"
    rows = [
        {**row, "recipe": " ".join(reversed(row["recipe"].split("@"))), "layers": name}
        for name in what
        for row in run["rows"]
        if row["what"] == name and row["recipe"] != but
    ]
    one = len(what) == 1
    lines = pivot(rows, run, _STEP if one else _SMALL, ("layers", "recipe")[one:])
    return "\n".join([*lines, "", *source(run, PLAIN, page, f"float8 bench model {how}")])


def tables(page: Path) -> str:
    """Return all tables, sorted by the names of their files."""
    parts = []
    shown = {"model": model_table, "block": model_table, "fsdp": ranks_table, "tp": ranks_table}
    shown |= {"linear": linear_table, "cast": cast_line}
    for name, show in shown.items():
        for path in sorted(RESULTS.glob("*.json")):
            results = json.loads(path.read_text())
            if results.get("benchmark") == name:
                parts += [*show(results), "", *source(results, path, page)]
                if "note" in results:
                    parts += [*textwrap.wrap(results["note"], 116), ""]
    return "\n".join(parts)


def _title(results: Results, before: str, after: str) -> str:
    size = results["settings"]
    blocks = f"{size['blocks']} block{'' if size['blocks'] == 1 else 's'} of {size['model']}"
    return f"**{blocks}, {before}{size['batch']} x {size['seq_len']} tokens{after}**"


def model_table(results: Results) -> list[str]:
    """Return a row per recipe, columns per mode."""
    after = ", forward + backward"
    microbatches = results["settings"].get("microbatches", 1)  # older files lack it
    after += f" of {microbatches} microbatches" if microbatches > 1 else ""
    after += " + AdamW" if results["settings"].get("optimizer") else ""
    table = pivot(results["rows"], results, _STEP, ("recipe", "keep"))
    return [_title(results, "", after), "", *table]


def ranks_table(results: Results) -> list[str]:
    """Return a row per recipe, mode and gather."""
    sharded, ranks = results["benchmark"] == "fsdp", results["settings"]["ranks"]
    before = f"{'FSDP2' if sharded else 'tensor and sequence parallel'} on {ranks} ranks, "
    after = " each, forward + backward + AdamW" if sharded else ", forward + backward"
    rows = []
    for row in results["rows"]:
        if "ms" in row:
            name = row["recipe"] + (", eager" if row["mode"] == "eager" else "")
            sent = (row["gathered_mb"] + row["reduce_scattered_mb"]) / 1e3
            rows.append({**row, "recipe": name, "mode": "", "sent_gb": sent})
    lines = pivot(rows, results, _RANKS, ("recipe", "gather", "keep"), ("",))
    return [_title(results, before, after), "", *lines]


def linear_table(results: Results) -> list[str]:
    """Return a row per shape set and recipe: the set's sums, or its only shape; or per width."""
    rows = results["rows"]
    widths = [
        {**row, "width": str(row["K"])}
        for row in rows
        if row["set"] == "widths" and row["K"] and row["recipe"] != HIGH_PRECISION
    ]
    if widths:
        title = "**Square linear layers with 8192 tokens, over bf16 of the same mode**"
        return [title, "", *pivot(widths, results, _SPEEDUP, ("recipe", "width"))]
    several = {row["set"] for row in rows if row["M"] == "sum"}
    sums = [
        {**row, "layers": row["set"] if row["M"] == "sum" else "{M} x {K} x {N}".format(**row)}
        for row in rows
        if row["M"] == "sum" or row["set"] not in several
    ]
    title = "**Linear layers one by one, forward + backward, summed over each set of shapes**"
    return [title, "", *pivot(sums, results, _LINEAR, ("layers", "recipe"))]


def cast_line(results: Results) -> list[str]:
    """Return how near to copy bandwidth the casts to both GEMM layouts come."""
    ranges = []
    for case, what in (("cast", "one scale"), ("rowwise", "row scales"), ("1x128", "1x128 blocks")):
        shares = [row["of_copy"] for row in results["rows"] if row["case"] == f"{case} row+col"]
        if shares:
            ranges.append(f"{min(shares):.2f} to {max(shares):.2f} with {what}")
    return ["Of copy bandwidth, casts to both GEMM layouts reach", f"{', '.join(ranges)}."]


def pivot(
    rows: Iterable[Row],
    results: Results,
    columns: Columns,
    names: Sequence[str] = ("recipe",),
    modes: Sequence[str] = (COMPILED, GRAPHED, EAGER),
) -> list[str]:
    """Return a table: a line for each of the `names`, columns of each mode; peers with versions."""
    first, *others = columns
    heads = ["kept" if name == "keep" else name for name in names]
    for mode in modes:
        heads += [f"{mode} {first}".strip(), *others]
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row["recipe"] not in REMOVED and "ms" in row:
            peer, _, recipe = row["recipe"].partition(" ")
            version = results["environment"].get(peer)
            named = {**row, "recipe": f"{peer} {version} {recipe}"} if version else row
            key = tuple(named.get(name) or "" for name in names)
            found.setdefault(key, {})[row["mode"]] = row
    lines = [
        [*key, *(number(of.get(mode, {}), *each) for mode in modes for each in columns.values())]
        for key, of in found.items()
    ]
    return table(heads, lines)


def number(row: Row, key: str, digits: int) -> str:
    """Return a number with so many digits behind the point; "" if there is none."""
    return "" if row.get(key) is None else f"{row[key]:,.{digits}f}"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return lines of a table, without columns that no row fills; readable as plain text, too."""
    padded = []
    for i, column in enumerate(zip(heads, *rows, strict=True)):
        if any(column[1:]):
            width = max(map(len, column))
            texts = all(not cell or not cell[0].isdigit() for cell in column[1:]) or i == 0
            aligned = [cell.ljust(width) if texts else cell.rjust(width) for cell in column]
            rule = "-" * width if texts else "-" * (width - 1) + ":"
            padded.append([aligned[0], rule, *aligned[1:]])
    return [f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)]


def source(results: Results, path: Path, page: Path, command: str = "") -> list[str]:
    """Return where it was measured, and the commands: today's if they are given."""
    environment = results["environment"]
    commands = (command or environment["command"]).split("; ")
    for recipe in REMOVED:
        commands = [each.replace(f",{recipe}", "") for each in commands]
    commit = environment.get("commit", environment.get("git_commit"))
    where = f"{environment['device']}, torch {environment['torch']}"
    where += f", commit {commit[:7]}" if commit else ""
    lines = [f"{where}. Results in", f"[{path.name}]({os.path.relpath(path, page.parent)}), by", ""]
    return [*lines, "```bash", *map(wrapped, commands), "```", ""]


def wrapped(command: str) -> str:
    """Return a shell command in lines of at most `WIDTH` characters, broken before options."""
    whole = re.sub(r" (?!-)", "\0", command)
    how = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.wrap(whole, WIDTH - 2, subsequent_indent="    ", **how)  # type: ignore[arg-type]
    return " \\\n".join(lines).replace("\0", " ")


_BESIDE = "--mode compiled --peers torchao --rounds 7"
_FUSED = "tensorwise+fuse,tensorwise+held+fuse,delayed+held+fuse"

SECTIONS: dict[tuple[Path, str], Callable[[Path], str]] = {
    (README, "plain models"): partial(
        plain,
        commit="ca2477b",
        how="--recipe tensorwise --peers torchao --rounds 7",
        but="delayed",  # which was another one then
    ),
    (PERFORMANCE, "finer scales"): partial(
        plain,
        commit="301e755",
        how="--recipe tensorwise,rowwise,rowwise_with_gw_hp,blockwise --rounds 7",
    ),
    (PERFORMANCE, "held and fused"): partial(
        plain, commit="6b3c701", how=f"--recipe tensorwise,delayed,delayed+fuse,{_FUSED} --rounds 9"
    ),
    (PERFORMANCE, "microbatches"): partial(
        plain,
        commit="bb167fc",
        how=f"--mode compiled --microbatches 8 --recipe {_FUSED} --rounds 4",
        what=("8B stack, 8 microbatches",),
    ),
    (PERFORMANCE, "narrow"): partial(
        plain,
        commit="9763af4",
        how=f"--model 1b --blocks 8 {_BESIDE} --recipe tensorwise,delayed,tensorwise+held,"
        "tensorwise+fuse,delayed+fuse,tensorwise+held+fuse",
        what=("1b stack",),
    ),
    (PERFORMANCE, "small layers"): partial(
        plain,
        commit="ca2477b",
        how=f"--model 150m --blocks 12 --seq-len 2048 --batch 4 --all-layers {_BESIDE}; "
        f"float8 bench linear --mkn 8192,4096,4096 {_BESIDE}",
        what=("linear 8192,4096,4096", "150m, every layer"),
    ),
    (PERFORMANCE, "performance"): tables,
}
