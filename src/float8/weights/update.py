"""Cast held weights once per optimizer step."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig, Float8Weights, ScalingType, require_module
from float8.convert.conversion import Feature
from float8.kernels.runtime.private import untraced, warn
from float8.linear import Float8Linear, Float8Module
from float8.quantize import scales_of
from float8.tensor import Float8Tensor, is_dtensor, is_fsdp_module, local_tensor
from float8.tensor.weights import require_one_cast
from float8.weights.held import can_be_held, hold


@untraced
@torch.no_grad()
def update_float8_weights(model: nn.Module) -> None:
    """Cast the weights of layers of `model` with `Float8Weights.HELD`, and keep the casts.

    Call this after `optimizer.step()`, or let `attach_to_optimizer` do so. Before the first call,
    and always in evaluation, uses cast. After a write that raises the version counter of a
    weight, the next use in eager code casts the weight and keeps the result; compiled code casts it
    at every use until a cast is kept. Fused optimizers and writes into `weight.data` or by a raw
    pointer do not raise the counter: call this after them. `.to()` and assigning a new Parameter
    free the casts. Weights that FSDP2 gathers in float8 are not cast here; kept casts of their
    shards are freed: call `precompute_float8_dynamic_scale_for_fsdp` next, which makes new ones.

    A warning names up to three layers whose casts cannot be kept, so that each use casts, and why:
    tensor parallel or delayed scaling of the weight; a weight that is computed or no plain
    Parameter; experts of torchtitan without FSDP2, or gathered by FSDP in high precision.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: FSDP gathers a linear layer with `Float8Weights.HELD` in high precision.
    """
    require_module(model, "model")
    mods: dict[Any, str] = {
        mod: name or "(root)"
        for name, mod in model.named_modules()
        if isinstance(mod, Float8Module) and mod._float8_config.float8_weights is Float8Weights.HELD
    }
    if not mods:
        return
    batches: dict[Any, dict[Tensor, list[Float8Linear]]] = {}  # key -> weight -> its layers
    on_the_fly: list[str] = []
    fsdp1 = "summon_full_params"  # the method by which modules of FSDP1 are recognized
    roots = (x for x in model.modules() if is_fsdp_module(x) or hasattr(type(x), fsdp1))
    under_fsdp = set(itertools.chain(*(root.modules() for root in roots)))
    for mod, name in mods.items():
        mod._float8_held = ()  # frees the old data before casting
        if mod in under_fsdp:  # not held: version counters miss FSDP's writes
            gathers = mod._float8_config.enable_fsdp_float8_all_gather
            if isinstance(mod, Float8Linear) and not gathers:
                raise ValueError(
                    f"layer {name!r}: got float8_weights=HELD for a weight that FSDP gathers in "
                    f"high precision, expected in float8; convert with "
                    f"enable_fsdp_float8_all_gather=True and fully_shard, or with "
                    f"Float8Weights.ON_THE_FLY"
                )
            for attr in mod._float8_names():
                weight: Any = mod._parameters.get(attr)
                shard = local_tensor(weight)
                if shard is not weight and hasattr(shard, "forget_cast"):  # gathered in float8
                    shard.forget_cast()
                elif not isinstance(shard, Float8Tensor):  # else gathered in float8 at the moment
                    on_the_fly.append(f"{name}.{attr} (gathered by FSDP in high precision)")
            continue
        if not isinstance(mod, Float8Linear):
            on_the_fly += [f"{name}.{attr} ({why})" for attr, why in mod._float8_hold().items()]
            continue
        weight = mod._parameters.get("weight")
        if reason := _why_on_the_fly(mod, weight):
            on_the_fly.append(f"{name} ({reason})")
        elif not weight.is_meta:
            batch_key = weight.device, weight.dtype, mod._float8_plan.casts.weight
            batches.setdefault(batch_key, {}).setdefault(weight, []).append(mod)
    for (_device, dtype, cast), layers_of in batches.items():  # layers_of: weight -> layers
        scales: list[Tensor] | list[None] = [None] * len(layers_of)
        if cast.config.scaling_granularity.one_scale:
            scales = scales_of(list(layers_of), cast.config, dtype)
        for (weight, layers), scale in zip(layers_of.items(), scales, strict=True):
            held = hold(weight, cast._replace(scale=scale))
            for layer in layers:
                layer._float8_held = (held,)
    if on_the_fly:
        count, first = len(on_the_fly), ", ".join(on_the_fly[:3])
        warn(
            f"float8: {count} layer(s) cast weights on the fly that are no plain "
            f"Parameters with dynamic scaling: {first}{', ...' * (count > 3)}"
        )


def _why_on_the_fly(layer: Float8Linear, weight: Any) -> str | None:
    """Return why casts of `weight` (None: not a Parameter) cannot be kept; None if they can."""
    if weight is None:
        return "computed at each use"
    if layer._float8_plan.casts.weight.config.scaling_type is ScalingType.DELAYED:
        return "with delayed scaling"
    if weight.is_meta or can_be_held(weight):
        return layer._float8_why_never_held
    return "under tensor parallel" if is_dtensor(weight) else f"a {type(weight).__name__}"


class HeldWeights(Feature):
    """Feature that checks `config.float8_weights`, and casts `HELD` weights once per step."""

    def check_config(self, config: Float8LinearConfig) -> None:
        """Raise a `ValueError` if `config.float8_weights` contradicts other fields of `config`.

        `ONLY` excludes delayed scaling of the weight, its all-gather in float8, and casts of which
        no column data can be made. It and `HELD` need one cast for output and grad_input.
        """
        only = config.float8_weights is Float8Weights.ONLY
        if only and config.enable_fsdp_float8_all_gather:
            raise ValueError(
                "float8_weights: got ONLY with enable_fsdp_float8_all_gather=True, expected False: "
                "weights in float8 only are not sharded; give them to fully_shard's ignored_params"
            )
        if only and config.cast_config_weight.scaling_type is ScalingType.DELAYED:
            raise ValueError(
                "float8_weights: got ONLY with a cast_config_weight that is DELAYED, expected "
                "DYNAMIC, as the weight is cast once; set cast_config_weight=CastConfig()"
            )
        require_one_cast(config, "float8_weights")

    def after_step(self, model: nn.Module) -> None:
        """Cast the weights of layers of `model` with `Float8Weights.HELD`, and keep the casts."""
        update_float8_weights(model)

    attach = after_step  # so that out-of-memory errors occur before training
