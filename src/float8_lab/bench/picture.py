"""The picture of `float8 bench train --plot`: speed and memory of whole models."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from float8_lab.bench.results import size_of

_COLORS = {"bf16": "#777777", "tensorwise": "#0072b2", "rowwise": "#d55e00", "blockwise": "#cc79a7"}


def plot_results(results: dict[str, Any], path: Path) -> None:
    """Draw the rows of `float8 bench train`: tokens/s of a GPU, and its memory.

    Raises:
        ValueError: they are of another benchmark, or have no memory, as those of a CPU.
    """
    rows = [row for row in results["rows"] if row.get("peak_gib")]
    if (name := results["benchmark"]) != "train" or not rows:
        got = f"results of bench {name} with {len(rows)} rows that have memory"
        raise ValueError(f"plot: got {got}, expected those of bench train on a GPU")
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    about = results["settings"]
    title = [f"{size_of(about)} per GPU", *(x for x in ("lora", "transformers") if about[x])]
    axes.set_title(", ".join([*title, f"{about['ranks']} x {results['environment']['device']}"]))
    axes.set_xlabel("peak memory, GiB (left is better)")
    axes.set_ylabel("thousand tokens/s of a GPU (up is better)")
    for row in sorted(rows, key=lambda row: row["ms"]):
        peer, _, recipe = row["recipe"].rpartition(" ")
        dot: Any = {"color": _COLORS.get(recipe, "#009e73"), "linestyle": "none", "markersize": 10}
        dot["label"] = f"{row['recipe']}  {row['speedup']:.2f}x"
        marker = "s" if peer == "torchao" else "D" if peer else "o"
        axes.plot(row["peak_gib"], row["tokens_per_s_per_gpu"] / 1e3, marker, **dot)
    axes.margins(0.12)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    # So that differences of a few percent do not look large.
    axes.set_xlim(min(left, 0.9 * right), right)
    axes.set_ylim(min(bottom, 0.7 * top), top)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
