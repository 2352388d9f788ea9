"""`Float8Experts`: convert the MoE experts of other libraries to float8 grouped GEMMs.

A converted module stays the same object, with its hooks and methods; its class becomes a subclass
of the old one. `RegisteredExperts` converts experts of transformers 5, and `SeamExperts` those of
torchtitan. Your own modules call `grouped_linear` instead.
"""

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from float8.config import CastSite, Float8LinearConfig, Float8Weights
from float8.experts.functional import apply_grouped
from float8.experts.plan import EXPECTED, no_grouped_gemm, plan_experts
from float8.formats import E5M2, FLOAT8_MAX, GEMM_ALIGNMENT, HOPPER, lacks_float8_gemm
from float8.linear.base import Float8Module
from float8.linear.functional import autocast_dtype
from float8.linear.plan import LinearPlan
from float8.linear.source import ABOUT_FORWARD, new_class, not_in_high_precision, replaced_forward
from float8.tensor import is_dtensor, is_fsdp_module, local_tensor


class ExpertsWeight(NamedTuple):
    """The name of a Parameter with a weight for each expert, and its sizes E, N and K."""

    name: str
    experts: int
    out_features: int
    in_features: int


class Float8Experts(Float8Module):
    """Base class of MoE experts in float8, which also derive from their class before conversion."""

    _float8_noun = "weights"

    def _float8_make_plan(self, config: Float8LinearConfig) -> LinearPlan:
        return plan_experts(config)

    def _float8_matrices(self) -> list[str]:
        return stored_by_rows(self)

    def _float8_product(self, x: Tensor, weight: Any, offs: Tensor, name: str = "") -> Tensor:
        """Return `x[offs[e - 1]:offs[e]] @ weight[e].T` for all e; `name`: "" if it is unknown."""
        weight = _on_this_rank(weight)
        x = x.to(autocast_dtype(x.device) or weight.dtype)
        plan, parameter = self._float8_plan, self._parameters.get(name)
        held = self._float8_held_of(parameter, weight) if self._float8_held else None
        y = apply_grouped(x, weight, offs, plan, self._float8_config.emulate, held)
        for observer in self._float8_observers:
            y = observer(self, plan.casts, x, weight, y, offs, name)
        return y

    def _float8_names(self) -> list[str]:
        return [weight.name for weight in weights_of(self)]

    def _float8_weight(self, name: str) -> Any:
        """Return the weights [E, N, K] in attribute `name`, transposed if stored as [E, K, N]."""
        weight = getattr(self, name)  # FSDP1 and PEFT put a computed tensor there
        return weight.transpose(1, 2) if lies_transposed(self) else weight

    def extra_repr(self) -> str:
        """Return the original class's text, the recipe or casts, and the settings in effect."""
        config = self._float8_config
        words = [super().extra_repr(), config.short_str()]
        sites = CastSite.GRAD_OUTPUT, CastSite.GRAD_OUTPUT_FOR_GRAD_WEIGHT
        if any(config.cast_config(site).dtype == E5M2 for site in sites):  # see `plan_experts`
            words.append("grad_output in e4m3")
        granularity = config.cast_config(CastSite.INPUT_FOR_GRAD_WEIGHT).scaling_granularity
        if granularity.by_blocks and granularity.square:  # squares could mix experts' tokens
            words.append(f"input by 1x{granularity.width} for grad_weight")
        if not config.only_on:  # no blocks, whose GEMMs ignore the flag
            words.append(f"use_fast_accum={config.gemm_config_output.use_fast_accum}")
        words += self._float8_words()
        if config.enable_fsdp_float8_all_gather and not stored_by_rows(self):
            words.append("weights gathered in high precision")
        return ", ".join(filter(None, words))

    def _get_name(self) -> str:
        return f"Float8Experts[{type(self).__name__}]"


class RegisteredExperts(Float8Experts):
    """Experts of transformers 5 in float8; weights: `gate_up_proj` or `up_proj`, and `down_proj`.

    The forward replaces the one that transformers would take from its registry. It sorts tokens by
    expert, runs both grouped GEMMs in float8, and calls the module's `act_fn` or `_apply_gate`.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [tokens, hidden].

        `top_k_index`, each token's experts, and `top_k_weights` are [tokens, top_k]. An index >=
        `num_experts` is an expert on another rank, and adds nothing. Keeps the input's dtype.
        """
        mod: Any = self
        tokens, top_k = top_k_index.shape
        experts, order = torch.sort(top_k_index.flatten(), stable=True)
        expert_ids = torch.arange(mod.num_experts, device=experts.device, dtype=experts.dtype)
        offs = torch.searchsorted(experts, expert_ids, right=True, out_int32=True)
        bias_index = experts.clamp(max=mod.num_experts - 1)  # other ranks' rows get any bias

        def product(x: Tensor, name: str) -> Tensor:
            y = self._float8_product(x, self._float8_weight(name), offs, name)
            if mod.has_bias:
                y = y + _on_this_rank(getattr(self, f"{name}_bias"))[bias_index].to(y.dtype)
            return y

        x = hidden_states[order // top_k]
        name, act = ("gate_up_proj", mod._apply_gate) if mod.has_gate else ("up_proj", mod.act_fn)
        # Backward recomputes the activation, whose intermediates would take most of the memory.
        x = checkpoint(act, product(x, name), use_reentrant=False, preserve_rng_state=False)
        y = product(x, "down_proj")
        if getattr(mod, "has_post_expert_norm", False):
            y = mod.post_expert_norm(y)
        # With a bias, other ranks' rows are not zero: drop them, and their router gradients.
        routing_weight = top_k_weights.flatten()[order].masked_fill(experts >= mod.num_experts, 0)
        y = y * routing_weight[:, None]
        rows = torch.arange(len(order), device=order.device)
        inverse_order = torch.empty_like(order).scatter_(0, order, rows)
        # Add in a fixed order, so that results are deterministic.
        return y[inverse_order].view(tokens, top_k, y.shape[1]).sum(1).to(hidden_states.dtype)


def _on_this_rank(x: Any) -> Any:
    """Return `x`, or a DTensor's local part; raise unless placed by `Shard(0)` or `Replicate()`."""
    if not is_dtensor(x):
        return x
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in x.placements):
        raise ValueError(
            f"Float8Experts: got a DTensor placed {tuple(x.placements)}, expected Shard(0) or "
            f"Replicate(): each rank multiplies by whole experts"
        )
    return x.to_local()


class SeamExperts(Float8Experts):
    """Experts of torchtitan in float8: overrides the method `_grouped_mm`, which forward calls."""

    _float8_why_never_held = "given to a method, perhaps a copy"

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return self._float8_product(A, B_t.transpose(-2, -1), offs)


_ARGUMENTS = ["A", "B_t", "offs"]  # of the method `_grouped_mm` of torchtitan's experts


def kind_of(module: nn.Module) -> type[Float8Experts] | None:
    """Return `RegisteredExperts` for transformers, `SeamExperts` for torchtitan, or else None."""
    cls: Any = module._float8_source_class if isinstance(module, Float8Experts) else type(module)
    forward, method = cls.forward, inspect.getattr_static(cls, "_grouped_mm", None)
    if getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe":
        return RegisteredExperts  # the decorator of that module replaced their forward
    if inspect.isfunction(method) and [*inspect.signature(method).parameters][1:] == _ARGUMENTS:
        return SeamExperts
    return None


def lies_transposed(module: Any) -> bool:
    """Return whether the Parameters of `module` store the weights as [E, K, N], not [E, N, K]."""
    return bool(getattr(module, "is_transposed", False))


def weights_of(module: nn.Module) -> list[ExpertsWeight]:
    """Return name and sizes (global if a DTensor) of each Parameter with a weight per expert."""
    weights = []
    for name, parameter in module._parameters.items():
        is_scale = name.endswith("_scale_inv")  # of experts in transformers' own float8
        if parameter is not None and parameter.dim() >= 3 and not is_scale:  # biases have 2 dims
            experts, *outputs, K = parameter.shape
            N = math.prod(outputs)  # an extra dim may tell two projections apart
            if lies_transposed(module):
                N, K = K, N
            weights.append(ExpertsWeight(name, experts, N, K))
    return weights


def stored_by_rows(module: nn.Module) -> list[str]:
    """Return the names of Parameters stored as [E, N, K], which FSDP2 can all-gather in float8."""
    if lies_transposed(module):
        return []
    parameters: Any = module._parameters
    return [name for name, *_ in weights_of(module) if parameters[name].dim() == 3]


def unsupported_experts(module: nn.Module, config: Float8LinearConfig) -> str | None:
    """Return why `module`, experts in float8 or not, cannot get `config`, or None if it can."""
    if reason := no_grouped_gemm(config):
        return f"got a config with {reason}; expected {EXPECTED}"
    if replaced_forward(module):
        got = "got a `forward` of its own as attribute, expected that of the class"
        return f"{got}; {ABOUT_FORWARD}"
    if kind_of(module) is SeamExperts and (reason := _overridden_grouped_mm(module)):
        return reason
    if is_parametrized(module):
        return "got weights that are computed, expected Parameters"
    if is_fsdp_module(module):
        return "got a module that is sharded, expected one that is not: convert, then fully_shard"
    if not (weights := weights_of(module)):
        return "got no weights [experts, N, K]"
    is_only = config.float8_weights is Float8Weights.ONLY
    for name, _, N, K in weights:
        parameter: Any = module._parameters[name]
        can_be_only = kind_of(module) is RegisteredExperts and name in stored_by_rows(module)
        if is_only and (parameter.requires_grad or is_dtensor(parameter) or not can_be_only):
            expected = "a whole frozen weight [E, N, K] in experts of transformers"
            return f"got {name} with float8_weights=ONLY, expected {expected}"
        if parameter.dtype in FLOAT8_MAX:
            fix = "load the model with dequantize=True, or its files with load_float8_checkpoint"
            return f"got {name} in float8 as transformers loads it, expected high precision: {fix}"
        if reason := not_in_high_precision(local_tensor(parameter)):
            return f"got {name}, a {reason}"
        if not config.emulate and (N % GEMM_ALIGNMENT or K % GEMM_ALIGNMENT):
            return f"got {name} with N={N} and K={K}, expected multiples of {GEMM_ALIGNMENT}"
        majors = config.only_on[:1] or HOPPER  # not Blackwell 12.x, which has no grouped GEMM
        reason = lacks_float8_gemm(local_tensor(parameter).device, only=majors)
        if not config.emulate and reason is not None:
            return f"{reason}; set emulate=True to compute in high precision instead"
    return None


def _overridden_grouped_mm(module: Any) -> str | None:
    """Return an error if a subclass or attribute replaced torchtitan's `_grouped_mm`, or None."""
    cls = module._float8_source_class if isinstance(module, Float8Experts) else type(module)
    owners = [x.__name__ for x in cls.__mro__ if "_grouped_mm" in vars(x)]  # subclasses first
    if len(owners) == 1 and "_grouped_mm" not in vars(module):  # not as in torchtitan's MXFP8
        return None
    got, expected = owners[0] if len(owners) > 1 else "an attribute", owners[-1]
    fix = "do without what replaced it, or leave these experts to it"
    return f"got a `_grouped_mm` of {got}, expected that of {expected}: {fix}"


def convert_experts(module: Any, config: Float8LinearConfig) -> None:
    """Convert `module`, supported experts in high precision, to `config` by a change of class."""
    kind: Any = kind_of(module)
    module.__dict__.pop("forward", None)  # accelerate leaves the forward of the class there
    module.__class__ = class_of_experts(kind, module.__class__)
    module._float8_set_up(config)


@functools.cache
def class_of_experts(kind: Any, source: Any) -> Any:
    """Return a subclass of `kind`, a `Float8Experts`, and `source`, the class before conversion."""
    members = {name: getattr(source, name) for name in ("__module__", "__qualname__", "__doc__")}
    members["_float8_source_class"] = source
    bases = kind, source
    return new_class(source.__name__, bases, class_of_experts, bases, **members)
