"""Served as trained: what servers make of exported bytes, by their arithmetic as formulas.

`python tests/support/served.py` prints the table of docs/float8_checkpoints.md.
"""

from typing import Any

import pytest
import torch

from float8.config import CastConfig, ScalingGranularity
from float8.quantize import Cast, quantize
from support.lazily import Lazily, needs_installed
from support.rings import short

needs_installed("transformers")
served = Lazily("support.served")

TENTH = 0.1
# The configurations that docs/float8_checkpoints.md names: activations have the server's bytes.
AS_SERVERS = {
    ("rowwise, for tokens", "SGLang"),
    ("rowwise, for tokens", "vLLM compiled"),
    ("blockwise", "vLLM without DeepGEMM"),
    ("blockwise, rounded", "DeepGEMM with exponents"),
}
# The same scales, but these divide, or multiply by 448 / amax.
OTHER_QUOTIENT = {("rowwise, for tokens", "vLLM eager"), ("blockwise", "SGLang on Hopper")}


CASES = [
    *(("Llama", x) for x in ("tensorwise", "rowwise", "rowwise, for tokens", "blockwise, rounded")),
    *(("Mixtral", x) for x in ("rowwise, for tokens", "blockwise")),
    ("Llama", "blockwise"),
    *(("Mixtral", x) for x in ("tensorwise", "rowwise", "blockwise, rounded")),
]


@pytest.mark.parametrize(("name", "config"), short(range(6), CASES))
def test_a_server_computes_as_the_trainer_did(name: str, config: str) -> None:
    """KL of logits, trainer against server, as a part of that against one in 16 bits."""
    for server, row in served.rows(name, config).items():
        part, which = row.served / row.in_16_bits, (config, server)
        assert row.alike
        assert row.in_16_bits > 1e-3  # else there is nothing to gain
        if which in AS_SERVERS:
            assert row.bytes_off == 0
            assert part < TENTH, which
        elif which in OTHER_QUOTIENT:
            assert 0 < row.bytes_off < 1.5e-3
            assert 0.02 < part < 0.4, which
        else:  # other scales; under one per tensor, those of weights
            assert (row.bytes_off == 0) if config == "tensorwise" else (row.bytes_off > 0.9)
            assert part > 0.5, which


def test_one_scale_is_as_trained_until_servers_join_weights() -> None:
    (server,) = (x for (strategy, _), x in served.SERVERS.items() if strategy == "tensor")
    apart = {("tensor", "joins nothing"): server._replace(prepare=served.unchanged)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.served.SERVERS", apart)
        (row,) = served.rows("Llama", "tensorwise").values()
        assert row.served < TENTH * row.in_16_bits


def cast_of(granularity: str, **more: Any) -> CastConfig:
    return CastConfig(scaling_granularity=ScalingGranularity[granularity], **more)


@pytest.mark.parametrize(
    ("cast_config", "server", "steps"),
    [
        (cast_of("TENSORWISE"), "tensor", 0),
        (cast_of("AXISWISE"), "tokens_of_sglang", 0),
        (cast_of("AXISWISE"), "tokens_compiled", 0),
        (cast_of("AXISWISE"), "tokens_of_vllm", 1),
        (cast_of("BLOCK_1x128"), "groups_of_vllm", 0),
        (cast_of("BLOCK_1x128"), "groups_of_sglang", 1),
        (cast_of("BLOCK_1x128", power_of_2=True), "groups_rounded", 0),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_casts_of_activations(cast_config: CastConfig, server: str, steps: int) -> None:
    """Bytes as the server's, or off by one step; of rows of zeros and blocks that overhang, too."""
    x = torch.randn(256, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0], x[1] = 0, x[1] * 1e3
    ours = quantize(x, Cast(cast_config), row=True).row
    data, scale = getattr(served, server)(x)
    off = (ours.data[:, :300].view(torch.int8).int() - data.view(torch.int8).int()).abs()
    assert off.max() == steps
    assert (off > 0).float().mean() < 2e-3
    width = scale.shape[1] if scale.dim() else None
    mine = ours.scale if width is None else ours.scale[1:, :width]
    wanted = scale if width is None else scale[1:]
    assert torch.equal(mine, wanted) or (server == "groups_of_sglang" and mine.allclose(wanted))


def test_a_static_scale_of_activations() -> None:
    """As delayed scaling casts: values beyond it saturate."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for scale in (torch.tensor(0.0123), x.float().abs().max() / 1000):
        ours = quantize(x, Cast(CastConfig(), scale=scale), row=True).row.data
        data, _ = served.static_tensor(x, scale)
        assert torch.equal(ours.view(torch.uint8), data.view(torch.uint8))
    assert (data.float().abs() == 448).sum() > 10
