"""Convert modules of experts of transformers and torchtitan to `Float8Experts`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from float8.convert.choice import Chooser
from float8.convert.conversion import Conversion, LayerReport
from float8.convert.speed import EXPERTS_ERROR, MODELLED, compared_ms, no_gain
from float8.experts import convert_experts, kind_of, stored_by_rows, unsupported_experts, weights_of
from float8.tensor import local_tensor


@dataclass(frozen=True)
class ExpertsReport(LayerReport):
    """One row of a conversion report: a Parameter that has one weight for each expert."""

    kind = "weights of experts"
    experts: int  # their number: global if the Parameter is a DTensor, else on this rank

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes (E, N, K): E experts, N outputs and K inputs, also if stored as [E, K, N]."""
        return self.experts, self.out_features, self.in_features


class Experts(Conversion):
    """Converts the MoE experts of transformers and torchtitan to float8 grouped GEMMs."""

    def matches(self, mod: nn.Module) -> bool:
        """Return whether `mod` is experts of transformers 5 or torchtitan, converted or not."""
        return kind_of(mod) is not None

    def parameters(self, mod: nn.Module) -> list[str]:
        """Return names of all weights; `keep_high_precision(names=...)` with one excludes `mod`."""
        return [weight.name for weight in weights_of(mod)]

    def stored_by_rows(self, mod: nn.Module) -> list[str]:
        """Return names of weights stored as [E, N, K], which FSDP2 can gather in float8."""
        return stored_by_rows(mod)

    def report(
        self, fqn: str, mod: nn.Module, scaling: str | None, reason: str | None
    ) -> list[LayerReport]:
        """Return a row per weight of `mod` at `fqn`, with `scaling` (casts) or skip `reason`."""
        return [
            ExpertsReport(f"{fqn}.{name}" if fqn else name, K, N, scaling, reason, experts)
            for name, experts, N, K in weights_of(mod)
        ]

    def problem(self, mod: nn.Module, chooser: Chooser) -> str | None:
        """Return why `mod` cannot be converted with `chooser.config`, or None if it can."""
        return unsupported_experts(mod, chooser.config)

    def why_slower(self, mod: nn.Module, fqn: str, chooser: Chooser) -> str | None:
        """Return why `mod`, at `fqn` in `chooser.model`, would be less than 1 % faster, or None.

        Experts get equal parts of `chooser.tokens`. Without a GPU to model the speed, returns None.
        """
        if (gpu := chooser.gpu_of(mod)) is None:
            return None
        gpu = gpu if gpu in MODELLED else "H100"  # another GPU: as an H100
        config, tokens, weights = chooser.config, chooser.tokens, weights_of(mod)
        top_k = experts_per_token(mod, chooser.model.get_submodule(fqn.rpartition(".")[0]))
        experts = local_tensor(mod._parameters[weights[0].name]).shape[0]  # on this rank
        rows, bf16_ms, float8_ms = tokens * top_k, 0.0, 0.0
        for name, _total_experts, N, K in weights:
            ranks = ranks_that_cast(mod, name, experts, chooser.expert_ranks)
            layer: Any = {"experts": experts, "trains": mod.get_parameter(name).requires_grad}
            bf16, saved_ms, float8 = compared_ms(gpu, config, rows, K, N, ranks, **layer)
            bf16_ms, float8_ms = bf16_ms + bf16 + saved_ms, float8_ms + float8
        where = f"{gpu}, {rows / experts:.0f} tokens for each of {experts} experts"
        where += f" ({tokens} tokens go to {top_k} each)"
        return no_gain(config, bf16_ms / float8_ms, error=EXPERTS_ERROR, where=where)

    def prepare(self, mod: nn.Module, chooser: Chooser) -> Callable[[], None]:
        """Return a function that changes the class of `mod` to run it with `chooser.config`."""
        return functools.partial(convert_experts, mod, chooser.config)

    def modules_to_keep(self, chooser: Chooser) -> dict[nn.Module, str]:
        """Return {linear: why to skip it} if named router or gate, with an output per expert."""
        modules = [*chooser.model.named_modules()]
        counts = {x.experts for _, mod in modules if kind_of(mod) for x in weights_of(mod)[:1]}
        return {
            mod: "a router: converted only if a module_filter_fn takes it"
            for fqn, mod in modules
            if isinstance(mod, nn.Linear) and mod.out_features in counts
            if any("router" in word or "gate" in word for word in fqn.split(".")[-2:])
        }


def ranks_that_cast(module: Any, name: str, experts: int, ranks: int) -> int:
    """Return how many of the `ranks` ranks of FSDP2 share the casts of the Parameter `name`.

    If it is stored as [E, N, K], with E = `experts`, ranks cast whole matrices and send float8; at
    most E ranks have some. Else returns 1: each gathers it in high precision, and casts it all.
    """
    return min(ranks, experts) if name in stored_by_rows(module) else 1


_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # of most models, Gemma's, Aria's


def experts_per_token(module: Any, parent: Any) -> int:
    """Return the experts per token, by `module.config` or `parent.token_dispatcher`, or else 1."""
    config, dispatcher = getattr(module, "config", None), getattr(parent, "token_dispatcher", None)
    counts = [getattr(config, name, None) for name in _TOP_K]
    return next(filter(None, [*counts, getattr(dispatcher, "top_k", None)]), 1)
