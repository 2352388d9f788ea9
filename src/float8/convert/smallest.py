"""Limits below which a linear layer is slower in float8 than in bf16: data, by GPU and recipe."""

from typing import NamedTuple

from float8.config import CastSite, Float8LinearConfig


class Smallest(NamedTuple):
    """Below any of these a layer, forward and backward, takes longer in float8 than in bf16."""

    tokens: int
    features: int
    """K and N alike."""
    product: float
    """tokens * K * N"""


NARROW = 256
"""Features, K and N alike, below which layers stay on a GPU whose limits are not known."""

WAITS_BELOW = 34e9
"""tokens * K * N of a layer below which the CPU takes longer to start its kernels in float8 than
the GPU to run them in bf16. Compiled under `tensorwise`, one took the CPU 0.36 ms with what is
around it (h200-150m-kernels.json). A CUDA graph starts all at once."""

# GPU time, without what the CPU needs to issue it.
# Those of an H200 are fitted to 145 sizes in eager mode (h200-smallest-layers.json). Of each recipe
# 93% or more are judged rightly; the others cost 0.2% of the time of all, or less. An H100 was not
# measured: its limits are those of an earlier fit, which had 10 compiled sizes, too, with the times
# of a slower memory, and no lower than what was measured there before (h100-linear-eager.json).
# begin: written by float8 bench limits
SMALLEST = {
    "H100": {
        "tensorwise": Smallest(1024, 1024, 34e9),
        "delayed": Smallest(1024, 1024, 34e9),
        "rowwise": Smallest(1024, 1024, 38e9),
        "rowwise_with_gw_hp": Smallest(2048, 1024, 34e9),
        "blockwise": Smallest(2048, 2048, 34e9),
    },
    "H200": {
        "tensorwise": Smallest(1024, 768, 19e9),
        "delayed": Smallest(1024, 768, 25e9),
        "rowwise": Smallest(1024, 1024, 34e9),
        "rowwise_with_gw_hp": Smallest(2048, 768, 25e9),
        "blockwise": Smallest(2048, 2048, 34e9),
    },
}
# end


def judged_as(config: Float8LinearConfig) -> str:
    """Return the recipe whose limits hold for a configuration: one with scales of the same kind."""
    if config.scales_by_blocks:
        return "blockwise"
    if any(cast.scaling_granularity.by_rows for cast in config.own_casts.values()):
        return "rowwise" if "grad_weight" in config.float8_gemms else "rowwise_with_gw_hp"
    activations = {CastSite.INPUT, CastSite.GRAD_OUTPUT}
    return "delayed" if activations.issubset(config.delayed_sites) else "tensorwise"


def too_small(
    gpu: str,
    recipe: str,
    tokens: int,
    in_features: int,
    out_features: int,
    cuda_graphs: bool = False,
) -> str | None:
    """Say which limit of a GPU a layer misses, or that it waits, or return None.

    Where limits are not known, `NARROW` is the only one: below what each GPU of `SMALLEST` needs.
    """
    known = gpu in SMALLEST
    least = SMALLEST[gpu][recipe] if known else Smallest(0, NARROW, 0.0)
    product = tokens * in_features * out_features
    for name, value, minimum in (
        ("tokens", tokens, least.tokens),
        ("K", in_features, least.features),
        ("N", out_features, least.features),
        ("tokens*K*N", product, least.product),
    ):
        if value < minimum:
            why = f"{recipe} is slower there on {gpu}"
            if not known:
                why = f"slower on all GPUs with known limits, and {gpu} has none"
            return f"{name}={value:.4g} is less than {minimum:.4g}: {why}"
    if known and product < WAITS_BELOW and not cuda_graphs:
        why = f"tokens*K*N={product:.4g} is less than {WAITS_BELOW:.4g}"
        return f"waits for the CPU: {why}; cuda_graphs=True converts it"
    return None
