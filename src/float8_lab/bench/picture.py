"""The picture of `float8 bench train --plot`: speed and memory of whole models."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from float8_lab.bench.results import size_of

_MARKERS = {"": "o", "torchao": "s"}  # by the peer; others have a diamond
_COLORS = {"bf16": "#777777", "tensorwise": "#0072b2", "rowwise": "#d55e00", "blockwise": "#cc79a7"}


def plot_results(results: dict[str, Any], path: Path) -> None:
    """Draw the rows of `float8 bench train`: tokens/s of a GPU, and its memory.

    Raises:
        ValueError: they are of another benchmark, or have no memory, as those of a CPU.
    """
    if (name := results.get("benchmark")) != "train":
        raise ValueError(f"plot: got results of bench {name}, expected those of bench train")
    rows = [row for row in results["rows"] if row.get("peak_gib")]
    if not rows:
        raise ValueError("plot: got results without memory, expected those of a GPU")
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    about = results["settings"]
    where = f"{about['ranks']} x {results['environment']['device']}"
    how = [name for name in ("lora", "transformers") if about[name]]
    how += [f"{kept} kept" for kept in about["keep"]]
    axes.set(
        title=", ".join([f"{size_of(about)} per GPU", *how, where]),
        xlabel="peak memory, GiB (left is better)",
        ylabel="thousand tokens/s of a GPU (up is better)",
    )
    for row in sorted(rows, key=lambda row: row["ms"]):
        peer, _, recipe = row["recipe"].rpartition(" ")
        axes.plot(
            row["peak_gib"],
            row["tokens_per_s_per_gpu"] / 1e3,
            _MARKERS.get(peer, "D"),
            markersize=10,
            color=_COLORS.get(recipe, "#009e73"),
            label=f"{row['recipe']}  {row['speedup']:.2f}x",
            linestyle="none",
        )
    axes.margins(0.12)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    # So that differences of a few percent do not look large.
    axes.set_xlim(min(left, 0.9 * right), right)
    axes.set_ylim(min(bottom, 0.7 * top), top)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
