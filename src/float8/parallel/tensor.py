"""Tensor parallel with communication in float8: styles for `parallelize_module`.

Tokens that are spread over ranks (sequence parallel) are cast under the scale of the whole tensor,
then gathered as bytes, in backward as in forward. What is summed over ranks is in high precision.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement

from float8.linear import Float8Linear
from float8.linear.across import reduction
from float8.linear.plan import casts_input_once
from float8.linear.sharded import require_divisible
from float8.parallel.amax import sharding_groups
from float8.tensor import Float8Tensor
from float8.tensor.float8_tensor import to_float8

Placements = tuple[Placement, ...]


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a `Float8Linear`: the input is gathered in float8.

    Args:
        input_layouts: as for `ColwiseParallel`; an input that `PrepareFloat8ModuleInput` has cast
            is taken as it is.
        output_layouts: likewise.
        use_local_output: likewise.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: Any,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> DTensor:
        x = _on_mesh(inputs[0], device_mesh, input_layouts)
        if x.placements == desired_input_layouts:
            return x  # the layer casts it
        return _cast(x, mod).redistribute(placements=desired_input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require_layer(self, module, 0, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            layer.gathered = "input"
        return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a `Float8Linear`: in backward grad_output is gathered in float8.

    Args:
        input_layouts: as for `RowwiseParallel`.
        output_layouts: likewise.
        use_local_output: likewise.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, (to,) = _require_layer(self, module, 1, device_mesh), self.output_layouts
        if isinstance(to, Shard):
            layer.tokens_dim, layer.gathered = to.dim, "grad_output"
        return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts inputs once for all layers of a module, then gathers bytes.

    Args:
        input_layouts: as for `PrepareModuleInput`, as are all but the last two.
        desired_input_layouts: see there.
        input_kwarg_layouts: see there.
        desired_input_kwarg_layouts: see there.
        use_local_output: see there.
        float8_dtype: None, or the format that the layers cast their input to.
        fwd_config_submodule_fqn: the name, within the module, of the `Float8Linear` that says how
            to cast; None: all of them must say the same.
    """

    layer: Float8Linear

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype | None = None,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        # Not positions, masks and the like.
        shape = getattr(input, "shape", ())
        if input_layout is None or list(shape[-1:]) != [self.layer.in_features]:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        x = _cast(_on_mesh(input, mesh, (input_layout,)), self.layer)
        if desired_layout is not None and x.placements != (desired_layout,):
            x = x.redistribute(placements=(desired_layout,))
        return x.to_local() if self.use_local_output else x

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = copy.copy(self)  # one style may prepare many modules
        own.layer = self._find_layer(module)
        if self.input_layouts != self.desired_input_layouts:
            own.layer.gathered = "input"
        return super(PrepareFloat8ModuleInput, own)._apply(module, device_mesh)

    def _find_layer(self, module: nn.Module) -> Float8Linear:
        fqn = self.fwd_config_submodule_fqn
        found = [module.get_submodule(fqn)] if fqn is not None else list(module.modules())
        layers = [layer for layer in found if isinstance(layer, Float8Linear)]
        if not layers:
            raise TypeError(
                f"{type(self).__name__}: got {_named(found[0])}, expected a Float8Linear or a "
                f"module that holds some; convert the model first"
            )
        specs = {layer.plan.input for layer in layers}
        if len(specs) > 1:
            raise ValueError(
                f"{type(self).__name__}: got layers that cast their input in {len(specs)} ways, "
                f"expected one; name the one to follow with `fwd_config_submodule_fqn`"
            )
        dtype = layers[0].plan.input.dtype
        if self.float8_dtype not in (None, dtype):
            raise ValueError(
                f"{type(self).__name__}: got float8_dtype={self.float8_dtype}, expected {dtype}, "
                f"to which the layers cast their input; leave it out"
            )
        return layers[0]


def _named(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


def _require_layer(style: Any, module: nn.Module, dim: int, mesh: DeviceMesh) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise TypeError(
            f"{type(style).__name__}: got {_named(module)}, expected a Float8Linear; convert the "
            f"model first"
        )
    if module.keeps_no_master:
        raise ValueError(
            f"{type(style).__name__}: got a layer with float8_weights=ONLY, expected one with a "
            f"high-precision weight, which can be sharded; convert it with another config"
        )
    require_divisible(module.weight.shape, dim, mesh.size())
    return module


def _on_mesh(x: Any, mesh: DeviceMesh, placements: Placements) -> DTensor:
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, placements, run_check=False)


def _like(local: Tensor, x: DTensor) -> DTensor:
    """`local` in the place of the local tensor of `x`."""
    more = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(local, x.device_mesh, x.placements, **more)  # type: ignore[arg-type]


def _cast(x: DTensor, layer: Float8Linear) -> DTensor:
    """`x` in float8 as `layer` casts it, if bytes and one scale are all that it takes."""
    if x.placements[0].is_partial() or not casts_input_once(layer.plan):
        return x
    local = x.to_local()
    if isinstance(local, Float8Tensor):
        return x
    if torch.is_autocast_enabled(local.device.type):
        local = local.to(torch.get_autocast_dtype(local.device.type))
    spec = layer.plan.input
    state = layer.delayed_scales().input
    groups = () if layer.knows_scales else sharding_groups(x)
    reduce = reduction([group.group_name for group in groups]) if groups else None
    return _like(to_float8(local, spec, state=state, reduce=reduce), x)
