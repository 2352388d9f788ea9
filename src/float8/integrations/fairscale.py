"""Convert fairscale's tensor-parallel layers, whose shards of weights are plain Parameters."""

from collections.abc import Callable
from typing import Any

import torch
from fairscale.nn.model_parallel import initialize
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from float8.config import ConfigOrRecipe, Float8LinearConfig, as_config, require_module
from float8.linear import Float8Linear, unsupported
from float8.linear.source import become, shallow_copy
from float8.parallel.ddp import tell_ddp_what_to_ignore
from float8.parallel.sharded import Shards


class Float8ParallelLinear(Float8Linear):
    """Base class of layers that replace fairscale's parallel linear layers, with float8 GEMMs."""

    _float8_mesh: Any = None  # a DeviceMesh of one dim: the model-parallel group
    _float8_placements: Any = None  # of input, weight, bias and output, as DTensors
    _float8_why_never_held = "a part of one, of model parallel"

    @classmethod
    def from_parallel(
        cls, mod: Any, config: Float8LinearConfig, sequence_dim: int | None
    ) -> "Float8ParallelLinear":
        """Return a float8 layer by `config` with Parameters and hooks of fairscale's layer `mod`.

        Inputs of column-parallel layers and outputs of row-parallel ones have this rank's tokens
        only, sharded along `sequence_dim`; None: all tokens. `mod` and `config` are not checked.
        """
        new: Float8ParallelLinear = shallow_copy(mod, cls)
        device = mod.weight.device.type
        if device == "meta":  # a DeviceMesh cannot have it: take the likely device of training
            device = "cuda" if torch.cuda.is_available() else "cpu"
        new._float8_mesh = DeviceMesh.from_group(initialize.get_model_parallel_group(), device)
        new._float8_set_up(config)
        tokens = Replicate() if sequence_dim is None else Shard(sequence_dim)
        if isinstance(mod, ColumnParallelLinear):
            new._float8_shards = Shards(gathers_input=sequence_dim is not None)
            features = Replicate() if mod.gather_output else Shard(-1)
            new._float8_placements = tokens, Shard(0), Shard(0), features
        else:
            new._float8_shards = Shards(tokens_dim=sequence_dim)
            features = Shard(-1) if mod.input_is_parallel else Replicate()
            new._float8_placements = features, Shard(1), Replicate(), tokens
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's output for its `input`: plain tensors, whole or this rank's shard."""
        *placements, output_placement = self._float8_placements
        x, weight, bias = (
            t if t is None else DTensor.from_local(t, self._float8_mesh, [place], run_check=False)
            for t, place in zip((input, self.weight, self.bias), placements, strict=True)
        )
        if weight.placements[0].is_shard(1) and x.placements[0].is_replicate():
            x = x.redistribute(placements=[Shard(x.dim() - 1)])  # take this rank's features
        casts = self._float8_shards.casts(self, self._float8_mesh)
        y = self._float8_shards.linear(x, weight, bias, self._float8_plan, casts)
        return y.redistribute(placements=[output_placement]).to_local()  # type: ignore[no-any-return]

    def _float8_shard_groups(self) -> tuple[Any, ...]:
        return (self._float8_mesh.get_group(),)


class Float8ColumnParallelLinear(Float8ParallelLinear):
    """fairscale's `ColumnParallelLinear` in float8; sequence parallel all-gathers its input."""

    _float8_source_class = ColumnParallelLinear


class Float8RowParallelLinear(Float8ParallelLinear):
    """fairscale's `RowParallelLinear` in float8; sequence parallel reduce-scatters its output."""

    _float8_source_class = RowParallelLinear


_CLASSES: dict[type[nn.Module], type[Float8ParallelLinear]] = {
    cls._float8_source_class: cls for cls in (Float8ColumnParallelLinear, Float8RowParallelLinear)
}


def swap_tp_linear_with_float8_linear(
    model: nn.Module,
    *,
    config: ConfigOrRecipe | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] = lambda mod, fqn: True,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
) -> nn.Module:
    """Convert fairscale's `ColumnParallelLinear` and `RowParallelLinear` to float8, in place.

    Returns `model`; `convert_to_high_precision(model)` undoes the conversion. Layers of
    subclasses stay as they are. Scales per tensor are as without sharding, by all-reduced amaxes.

    Args:
        model: the model, or a single layer of these classes.
        config: a `Float8LinearConfig`, or the name of a recipe; None means `"tensorwise"`. With
            `Float8Weights.HELD` (casts kept until the weight is written), these layers cast their
            weights at each use nevertheless, and `update_float8_weights` warns of it.
        module_filter_fn: called as `module_filter_fn(layer, fqn)`; return True to convert `layer`.
        sequence_parallel: whether inputs of column-parallel layers (set `gather_output=False`), and
            outputs of row-parallel ones, have this rank's tokens only. fairscale lacks this.
        sequence_dim: the dim of activations that holds tokens: 0 for [seq, batch, dim].

    Raises `TypeError` if `model` or `config` has the wrong type; `RuntimeError` if fairscale's
    model parallel is not initialized; `ValueError` for an unknown recipe, or a layer that cannot
    take `config`: none takes `enable_fsdp_float8_all_gather` or `Float8Weights.ONLY` (weights that
    exist in float8 only). `model` is unchanged then.
    """
    require_module(model, "model")
    config = as_config(config)
    if not initialize.model_parallel_is_initialized():
        got = "swap_tp_linear_with_float8_linear: got no model-parallel group, expected one"
        raise RuntimeError(f"{got}; call fairscale's initialize_model_parallel first")
    converted: dict[nn.Module, Float8ParallelLinear] = {}
    for fqn, mod in model.named_modules():
        cls = _CLASSES.get(type(mod))
        if cls is None or not module_filter_fn(mod, fqn):
            continue
        problem = unsupported(mod, config, linear_classes=[type(mod)])
        if problem is None:
            new = cls.from_parallel(mod, config, sequence_dim if sequence_parallel else None)
            converted[mod] = new
            problem = unsupported(new, config)  # check what only `new` has: shards
        if problem is not None:
            raise ValueError(f"layer {fqn or '(root)'!r}: {problem}")
    for mod, new in converted.items():
        become(mod, new)
    tell_ddp_what_to_ignore(model)
    return model
