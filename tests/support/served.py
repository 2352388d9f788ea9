"""The arithmetic of servers, as formulas, and what it makes of a trainer's weights.

Read in the sources of vLLM 0.33 (`csrc/quantization/w8a8/fp8`, its CUTLASS epilogues, and
`w8a8_utils.py`) and of SGLang (`sgl-kernel/csrc/gemm`), on NVIDIA GPUs; no code is theirs. What is
not float8 is transformers' here: attention, norms, routers.
"""

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import convert_to_float8_training
from float8.checkpoints import float8_weights
from float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, as_config
from float8.linear import Float8Linear
from float8.quantize import quantize
from support import hugging_face as hf

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
Quantized = tuple[Tensor, Tensor]


def to_float8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def amax(x: Tensor, *dims: int) -> Tensor:
    return x.float().abs().amax(dims, keepdim=True) if dims else x.float().abs().max()


# ---------------------------------------------------------------- casts of activations [M, K]


def static_tensor(x: Tensor, scale: Tensor) -> Quantized:
    """Both: one scale that is given."""
    return to_float8(x.float() * (1 / scale)), scale


def tensor(x: Tensor) -> Quantized:
    """Both: one scale for all tokens of a batch."""
    return static_tensor(x, amax(x) / LARGEST)


def tokens_of_vllm(x: Tensor) -> Quantized:
    """Its kernel: in eager mode, and in experts."""
    scale = (amax(x, 1) / LARGEST).clamp(min=1 / (LARGEST * 512))
    return to_float8(x.float() / scale), scale


def tokens_compiled(x: Tensor) -> Quantized:
    """vLLM's linear layers compiled, its default; but Inductor's quotients may be rounded twice."""
    scale = (amax(x, 1) / LARGEST).clamp(min=1 / (LARGEST * 512))
    return to_float8(x.float() * (1 / scale)), scale


def tokens_of_sglang(x: Tensor) -> Quantized:
    scale = amax(x, 1) / LARGEST
    return to_float8(x.float() * torch.where(scale == 0, 0, 1 / scale)), scale


def _groups(x: Tensor) -> Tensor:
    return F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))  # [M, K / 128, 128]


def _power_of_2(scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def groups_of_vllm(x: Tensor) -> Quantized:
    scale = amax(_groups(x), 2).clamp(min=1e-10) / LARGEST
    return to_float8(_groups(x) * (1 / scale)).flatten(1)[:, : x.shape[1]], scale.squeeze(2)


def groups_of_sglang(x: Tensor) -> Quantized:
    largest = amax(_groups(x), 2).clamp(min=1e-10)
    scale = largest * torch.tensor(1 / LARGEST)
    return to_float8(_groups(x) * (LARGEST / largest)).flatten(1)[:, : x.shape[1]], scale.squeeze(2)


def groups_rounded(x: Tensor) -> Quantized:
    """Both, for DeepGEMM with exponents."""
    scale = _power_of_2(amax(_groups(x), 2).clamp(min=1e-10) / LARGEST)
    return to_float8(_groups(x) * (1 / scale)).flatten(1)[:, : x.shape[1]], scale.squeeze(2)


# ---------------------------------------------------------------- GEMMs: [M, K] by [N, K]


def scaled_sum(a: Quantized, b: Quantized) -> Tensor:
    """Scales of rows, or one, apply to whole sums: first that of the weight."""
    return (a[0].float() @ b[0].float().T * b[1].view(1, -1)) * a[1].view(-1, 1)


def sum_of_scaled(a: Quantized, b: Quantized) -> Tensor:
    """Scales of blocks apply to the sums over 128 elements."""
    (x, of_x), (w, of_w) = a, b
    of_w = of_w.float().repeat_interleave(128, 0)[: len(w)]
    total = torch.zeros(len(x), len(w))
    pairs = zip(x.float().split(128, 1), w.float().split(128, 1), strict=True)
    for k, (rows, columns) in enumerate(pairs):
        total += rows @ columns.T * of_x[:, k, None] * of_w[:, k]
    return total


# ---------------------------------------------------------------- weights, once they are loaded


def unchanged(weights: list[Quantized]) -> list[Quantized]:
    return weights


def joined(weights: list[Quantized]) -> list[Quantized]:
    """Both, under one scale per tensor: q, k, v are one weight with one scale; so are gate, up."""
    largest = torch.stack([scale.reshape(()) for _, scale in weights]).max()
    return [static_tensor(x.float() * scale, largest) for x, scale in weights]


def rounded(weights: list[Quantized]) -> list[Quantized]:
    """Where DeepGEMM multiplies blocks by exponents: scales become powers of two."""
    return [_rounded(*weight) for weight in weights]


def _rounded(data: Tensor, scale: Tensor) -> Quantized:
    shape, scale = data.shape, scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x = data.float() * scale[: shape[0], : shape[1]]
    x = F.pad(x, (0, -shape[1] % 128, 0, -shape[0] % 128)).unflatten(1, (-1, 128))
    x = x.unflatten(0, (-1, 128))  # [N / 128, 128, K / 128, 128]
    scale = _power_of_2(amax(x, 1, 3).clamp(min=1e-4) / LARGEST)
    data = to_float8(x * (1 / scale)).flatten(2).flatten(0, 1)
    return data[: shape[0], : shape[1]], scale.squeeze((1, 3))


class Server(NamedTuple):
    """How a server multiplies."""

    quantize: Callable[[Tensor], Quantized]
    multiply: Callable[[Quantized, Quantized], Tensor]
    prepare: Callable[[list[Quantized]], list[Quantized]] = unchanged
    """Takes the weights of one input together."""
    of_experts: Callable[[Tensor], Quantized] | None = None
    """Instead of `quantize`, for experts."""

    def linear(self, x: Tensor, weight: Quantized) -> Tensor:
        """Return [M, N] in the dtype of `x`."""
        return self.multiply(self.quantize(x), weight).to(x.dtype)


SERVERS = {
    ("tensor", "vLLM, SGLang"): Server(tensor, scaled_sum, joined),
    ("channel", "vLLM compiled"): Server(tokens_compiled, scaled_sum, of_experts=tokens_of_vllm),
    ("channel", "vLLM eager"): Server(tokens_of_vllm, scaled_sum),
    ("channel", "SGLang"): Server(tokens_of_sglang, scaled_sum),
    ("block", "DeepGEMM with exponents"): Server(groups_rounded, sum_of_scaled, rounded),
    ("block", "vLLM without DeepGEMM"): Server(groups_of_vllm, sum_of_scaled),
    ("block", "SGLang on Hopper"): Server(groups_of_sglang, sum_of_scaled),
}
"""By strategy and name. With exponents: DeepGEMM in vLLM, unless `VLLM_USE_DEEP_GEMM_E8M0=0`, and
in SGLang on Blackwell."""

# ---------------------------------------------------------------- a model that is served


class ServedLinear(nn.Module):
    """A linear layer without bias."""

    def __init__(self, server: Server, weight: Quantized) -> None:
        super().__init__()
        self.server, self.quantized = server, weight

    def forward(self, x: Tensor) -> Tensor:
        return self.server.linear(x.flatten(0, -2), self.quantized).unflatten(0, x.shape[:-1])


class ServedExperts(nn.Module):
    """Mixtral's experts: each token is cast once, and again before the last product."""

    def __init__(self, server: Server, experts: list[dict[str, Quantized]]) -> None:
        super().__init__()
        self.server, self.experts = server, experts

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        token, place = torch.where(chosen >= 0)
        order = chosen[token, place].argsort(stable=True)
        token, place = token[order], place[order]
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        quantize = self.server.of_experts or self.server.quantize
        rows = [y[token] if y.dim() and len(y) == len(x) else y for y in quantize(x)]
        gate, up = (self._product(rows, counts, name).to(x.dtype) for name in ("w1", "w3"))
        hidden = quantize(F.silu(gate) * up)
        y = self._product(hidden, counts, "w2").to(x.dtype) * shares[token, place, None]
        return torch.zeros(x.shape, dtype=y.dtype).index_add_(0, token, y).to(x.dtype)

    def _product(self, rows: Any, counts: list[int], name: str) -> Tensor:
        data, scale = rows
        scales = scale.split(counts) if scale.dim() else [scale] * len(counts)
        groups = zip(data.split(counts), scales, self.experts, strict=True)
        return torch.cat([self.server.multiply((x, s), of[name]) for x, s, of in groups])


TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")
"""What multiplies the same input."""


def served(plain: nn.Module, stream: dict[str, Tensor], server: Server) -> nn.Module:
    """Return a copy of a Llama or Mixtral as a server has it that gets `stream`."""
    model, weights = copy.deepcopy(plain).eval(), dict[str, Quantized]()
    rest = {name: x for name, x in stream.items() if "_scale" not in name and x.dtype != E4M3}
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(torch.nan)  # what is not in the stream
    rest = {name.replace("block_sparse_moe.gate", "mlp.gate"): x for name, x in rest.items()}
    assert not model.load_state_dict(rest, strict=False).unexpected_keys
    for name, x in stream.items():
        if x.dtype == E4M3:
            scale = stream[name + ("_scale" if f"{name}_scale" in stream else "_scale_inv")]
            weights[name.removesuffix(".weight")] = x, scale.float()
    inputs = [
        [name.removesuffix(ends[0]) + end for end in ends]
        for ends in TOGETHER
        for name in weights
        if name.endswith(ends[0])
    ]
    inputs += [[name] for name in weights if not name.endswith(sum(TOGETHER, ()))]
    for names in inputs:
        weights |= zip(names, server.prepare([weights[x] for x in names]), strict=True)
    experts: dict[str, Any] = {}
    for name, weight in weights.items():
        if found := re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w\d)", name):
            layer, expert, own = found.groups()
            experts.setdefault(f"{layer}.mlp.experts", {}).setdefault(int(expert), {})[own] = weight
        else:
            model.set_submodule(name, ServedLinear(server, weight))
    for name, each in experts.items():
        model.set_submodule(name, ServedExperts(server, [each[n] for n in range(len(each))]))
    return model


def kl(p: Tensor, q: Tensor) -> float:
    """Return KL(p || q) of logits, a mean over tokens."""
    p, q = (x.double().log_softmax(-1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1).mean().item()


# ---------------------------------------------------------------- a trainer beside its server

BY_ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
POWERS = replace(BY_ROWS, power_of_2=True)
FOR_TOKENS = Float8LinearConfig(
    cast_config_input=BY_ROWS, cast_config_weight=POWERS, cast_config_grad_output=POWERS
)
FOR_EXPONENTS = replace(as_config("blockwise"), round_scales_to_power_of_2=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "tensorwise": {"tensor": "tensorwise"},
    "rowwise": {"channel": "rowwise"},
    "rowwise, for tokens": {"channel": FOR_TOKENS},
    "blockwise": {"block": "blockwise"},
    "blockwise, rounded": {"block": FOR_EXPONENTS},
}
"""By name: the strategy of the export, and the configuration that trains."""
SIZES = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.08}
MODELS = {"Llama": {"head_dim": 64}, "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}


class Row(NamedTuple):
    """What differs between a trainer and a server."""

    in_16_bits: float
    """KL of the logits, trainer against a server with the masters in bfloat16."""
    served: float
    """The same, against a server that has the exported bytes."""
    bytes_off: float
    """The fraction of bytes of activations that the server casts otherwise, of the same values."""
    alike: bool
    """Whether evaluation gives the logits of the training forward, bit by bit."""


def rows(name: str, config: str, seed: int = 0) -> dict[str, Row]:
    """Compare a model under a configuration with all servers that read its strategy."""
    plain = hf.llama(seed, name, **SIZES | MODELS[name]).bfloat16().eval()
    ((strategy, how),) = CONFIGS[config].items()
    model = copy.deepcopy(plain).train()
    convert_to_float8_training(
        model, config=how, module_filter_fn=lambda mod, fqn: fqn != "lm_head"
    )
    format = "fine-grained-fp8" if strategy == "block" else "compressed-tensors"
    stream = dict(float8_weights(model, format, strategy=strategy))
    ids, inputs = torch.cat([hf.tokens(seed), hf.tokens(seed + 1)]), list[Any]()
    keep = lambda layer, args, out: inputs.append((layer, args[0].detach().flatten(0, -2)))  # noqa: E731
    linears = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    hooks = [layer.register_forward_hook(keep) for layer in linears]
    trained = model(ids).logits.detach()
    for hook in hooks:
        hook.remove()
    found = {}
    with torch.no_grad():
        alike = torch.equal(model.eval()(ids).logits, trained)
        in_16_bits = kl(trained, plain(ids).logits)
        for (read, server), how in SERVERS.items():
            if read == strategy:
                pairs = [(ours(layer, x), how.quantize(x)[0]) for layer, x in inputs]
                off = [(a.view(torch.uint8) != b.view(torch.uint8)).flatten() for a, b in pairs]
                there = kl(trained, served(plain, stream, how)(ids).logits)
                found[server] = Row(in_16_bits, there, torch.cat(off).float().mean().item(), alike)
    return found


def ours(layer: Any, x: Tensor) -> Tensor:
    """Return the bytes that a layer multiplies for `x`."""
    return quantize(x, layer._float8_plan.casts.input, row=True).row.data[: len(x), : x.shape[1]]


def main(seeds: int = 4) -> None:
    """Print the table of docs/float8_checkpoints.md: means over models of several seeds."""
    for config in CONFIGS:
        for name in MODELS:
            each = [rows(name, config, seed) for seed in range(seeds)]
            for server in each[0]:
                found = zip(*(row[server] for row in each), strict=True)
                in_16_bits, there, off, _ = (sum(column) / seeds for column in found)
                sys.stdout.write(
                    f"{config:20} {name:7} {server:23} bytes off {off:8.3%}  KL in bf16 "
                    f"{in_16_bits:.1e}, served {there:.1e}, ratio {there / in_16_bits:.3f}\n"
                )


if __name__ == "__main__":
    main()
