"""The picture beside results of `float8 bench train`: speed and memory of whole models."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from float8_lab.bench.results import size_of

_COLORS = {"bf16": "#777777", "tensorwise": "#0072b2", "rowwise": "#d55e00", "blockwise": "#cc79a7"}


def plot_results(results: dict[str, Any], path: Path) -> None:
    """Draw the rows of `float8 bench train` on GPUs: tokens/s of a GPU, and its memory."""
    rows = [row for row in results["rows"] if row.get("peak_gib")]
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    about = results["settings"]
    where = f"{about['ranks']} x {results['environment']['device']}"
    axes.set_title(f"{size_of(about)} per GPU{', LoRA' * about['lora']}, {where}")
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
