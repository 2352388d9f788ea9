"""What one linear layer costs, forward and backward, in bf16 and in float8.

GPU time alone. In eager mode the CPU needs about 0.4 ms to issue forward and backward of one
float8 layer (`benchmarks/results/h100-linear-eager.json`): layers whose
kernels take less than that gain only compiled, or among larger layers that keep the GPU busy
meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from float8.config import BASE_SITE, CastSite, Float8LinearConfig, ScalingType
from float8.cost.ceilings import Ceilings

_BF16_BYTES = 2
_FLOAT8_BYTES = 1
# The kernel that casts joins the amaxes that the one before took of parts, and computes the scale.
_KERNELS_PER_AMAX = 1


@dataclass(frozen=True)
class LinearCost:
    """Milliseconds of forward and backward of one layer.

    Attributes:
        bf16_ms: Its three GEMMs in bf16.
        gemm_ms: Its three GEMMs in float8, as far as the configuration has them in float8.
        cast_ms: Amaxes, scales and casts.
    """

    bf16_ms: float
    gemm_ms: float
    cast_ms: float

    @property
    def float8_ms(self) -> float:
        """The layer in float8."""
        return self.gemm_ms + self.cast_ms

    @property
    def speedup(self) -> float:
        """bf16 over float8: above 1 float8 is the faster."""
        return self.bf16_ms / self.float8_ms


def gemm_ms(M: int, K: int, N: int, ceilings: Ceilings, *, float8: bool) -> float:
    """Milliseconds of `[M, K] @ [K, N]` with a bf16 result.

    The operations at the device's rate, the share of the memory traffic that they do not hide, and
    a fixed time. Of a GEMM bound by memory this is too little: `exposed` is fitted to GEMMs that
    are bound by the tensor cores.
    """
    rate = ceilings.float8_tflops if float8 else ceilings.bf16_tflops
    item = _FLOAT8_BYTES if float8 else _BF16_BYTES
    moved = item * (M * K + K * N) + _BF16_BYTES * M * N
    exposed = ceilings.exposed * _memory_ms(moved, ceilings)
    return 2 * M * K * N / (rate * 1e9) + exposed + ceilings.kernel_us / 1e3


def linear_cost(
    tokens: int,
    in_features: int,
    out_features: int,
    ceilings: Ceilings,
    config: Float8LinearConfig | None = None,
) -> LinearCost:
    """Estimate forward and backward of one layer with a bf16 weight.

    Args:
        tokens: Rows of the input, all leading dims together.
        in_features: K.
        out_features: N.
        ceilings: What the device can do.
        config: Which GEMMs run in float8; None: all.
    """
    config = Float8LinearConfig() if config is None else config
    M, K, N = tokens, in_features, out_features
    gemms = {"output": (M, K, N), "grad_input": (M, N, K), "grad_weight": (N, M, K)}
    bf16 = {name: gemm_ms(*dims, ceilings, float8=False) for name, dims in gemms.items()}
    chosen = sum(
        gemm_ms(*dims, ceilings, float8=True) if config.runs_in_float8(name) else bf16[name]
        for name, dims in gemms.items()
    )
    kernels = sum(casts.kernels for casts in _roles(M, K, N, config))
    cast_ms = _memory_ms(cast_bytes(M, K, N, config), ceilings) + kernels * ceilings.kernel_us / 1e3
    return LinearCost(bf16_ms=sum(bf16.values()), gemm_ms=chosen, cast_ms=cast_ms)


def cast_bytes(
    tokens: int, in_features: int, out_features: int, config: Float8LinearConfig | None = None
) -> int:
    """Bytes that amaxes and casts of one layer read and write in forward and backward.

    With dynamic scaling the amax reads 2 bytes per element of input, weight and grad_output; with
    delayed scaling it is part of the cast. The cast of input and grad_output reads 2 and writes 1 for each layout; the
    weight is cast once per layout, in forward and in backward.
    """
    config = Float8LinearConfig() if config is None else config
    return sum(casts.bytes for casts in _roles(tokens, in_features, out_features, config))


class _Casts(NamedTuple):
    """What is done to one tensor."""

    elements: int
    amaxes: int  # reads for an amax alone
    reads: int  # casts, each of which writes one layout or both
    layouts: int

    @property
    def bytes(self) -> int:
        reads, writes = _BF16_BYTES * (self.amaxes + self.reads), _FLOAT8_BYTES * self.layouts
        return self.elements * (reads + writes)

    @property
    def kernels(self) -> int:
        return _KERNELS_PER_AMAX * self.amaxes + self.reads


def _roles(M: int, K: int, N: int, config: Float8LinearConfig) -> list[_Casts]:
    """Input, weight and grad_output."""
    output, grad_input, grad_weight = (
        config.runs_in_float8(gemm) for gemm in ("output", "grad_input", "grad_weight")
    )

    def casts(elements: int, layouts: int, base: CastSite, *, one_read: bool) -> _Casts:
        sites = [site for site in CastSite if BASE_SITE.get(site, site) is base]
        types = [config.cast_config(site).scaling_type for site in sites]
        reads = min(layouts, 1) if one_read else layouts
        # Backward casts a weight again with the scale that forward found.
        return _Casts(elements, int(ScalingType.DYNAMIC in types), reads, layouts)

    return [
        casts(M * K, output + grad_weight, CastSite.INPUT, one_read=True),
        casts(N * K, output + grad_input, CastSite.WEIGHT, one_read=False),
        casts(M * N, grad_input + grad_weight, CastSite.GRAD_OUTPUT, one_read=True),
    ]


def _memory_ms(moved: int, ceilings: Ceilings) -> float:
    return moved / (ceilings.copy_tb_per_s * 1e9)
