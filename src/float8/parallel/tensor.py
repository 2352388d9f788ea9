"""Tensor parallel with communication in float8: styles for `parallelize_module`.

Tokens spread over ranks (sequence parallel) are cast, then gathered as bytes, in backward as in
forward; if the plan of the layer does not allow that, in high precision. One scale per tensor is
that of the whole. What is summed over ranks is in high precision.
"""

import types
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from float8.linear import Float8Linear
from float8.linear.sharded import dtensor_in_float8, require_parts
from float8.tensor import is_dtensor


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a `Float8Linear`: an input sharded by tokens is gathered in float8.

    Args:
        input_layouts, output_layouts, use_local_output: as for `ColwiseParallel`. An
            input that `PrepareFloat8ModuleInput` has cast is not cast again.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        if not isinstance(mod, Float8Linear):  # it was turned back into high precision
            return ColwiseParallel._prepare_input_fn(  # type: ignore[no-untyped-call]
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        x = inputs[0]  # the layer casts, gathers and multiplies
        return x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require_layer(self, module, 0, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            layer._float8_shards = layer._float8_shards._replace(gathers_input=True)
        return super()._apply(layer, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a `Float8Linear`: gathers token-sharded grad_outputs in float8.

    Args:
        input_layouts, output_layouts, use_local_output: as for `RowwiseParallel`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, (to,) = _require_layer(self, module, 1, device_mesh), self.output_layouts
        if isinstance(to, Shard) and to.dim != -1:
            layer._float8_shards = layer._float8_shards._replace(tokens_dim=to.dim)
        return super()._apply(layer, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts inputs once for all layers of a module, then gathers bytes.

    Args:
        **layouts: the arguments of `PrepareModuleInput`: `input_layouts`, `desired_input_layouts`,
            `input_kwarg_layouts`, `desired_input_kwarg_layouts`, `use_local_output`.
        float8_dtype: None, or the format that the layers cast their input to.
        fwd_config_submodule_fqn: the name, within the module, of the `Float8Linear` that says how
            to cast; None: all of them must say the same.
    """

    def __init__(
        self,
        *,
        float8_dtype: torch.dtype | None = None,
        fwd_config_submodule_fqn: str | None = None,
        **layouts: Any,
    ) -> None:
        super().__init__(**layouts)
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = self._find_layers(module)
        _require_one_dim(self, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            for name in names:
                layer: Any = module.get_submodule(name)
                layer._float8_shards = layer._float8_shards._replace(gathers_input=True)
        inner = vars(module).get("forward")
        inner = getattr(inner, "__func__", inner)  # a copy of the module is handed itself

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.input_layouts is not None:
                if len(args) != len(self.input_layouts):
                    raise ValueError(
                        f"PrepareFloat8ModuleInput: got {len(args)} inputs and layouts of "
                        f"{len(self.input_layouts)}, expected as many; None leaves an input alone"
                    )
                pairs = zip(args, self.input_layouts, strict=True)
                args = tuple(_cast(module, names, device_mesh, *each) for each in pairs)
            for name, placement in self.input_kwarg_layouts.items():
                if name in kwargs:
                    kwargs[name] = _cast(module, names, device_mesh, kwargs[name], placement)
            args, kwargs = self._prepare_input_kwarg_fn(args, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            return (type(module).forward if inner is None else inner)(module, *args, **kwargs)

        # No hook: torch compiles hooks apart from the module that is compiled, and compiled code
        # cannot return a `Float8Tensor` that requires grad.
        module.forward = types.MethodType(forward, module)
        return module

    def _find_layers(self, module: nn.Module) -> list[str]:
        fqn = self.fwd_config_submodule_fqn
        found = dict(module.named_modules()) if fqn is None else {fqn: module.get_submodule(fqn)}
        layers = {name: x for name, x in found.items() if isinstance(x, Float8Linear)}
        this = type(self).__name__
        if not layers:
            got = type(next(iter(found.values()))).__name__
            expected = "a Float8Linear or a module that holds some; convert the model first"
            raise TypeError(f"{this}: got a {got}, expected {expected}")
        how, *others = {layer._float8_plan.casts.input.how for layer in layers.values()}
        if others:
            raise ValueError(
                f"{this}: got layers that cast their input in {1 + len(others)} ways, expected "
                f"one; name the one to follow with `fwd_config_submodule_fqn`"
            )
        if self.float8_dtype not in (None, how.dtype):
            expected = f"{how.dtype}, to which the layers cast their input; leave it out"
            raise ValueError(f"{this}: got float8_dtype={self.float8_dtype}, expected {expected}")
        return list(layers)


def _cast(
    module: nn.Module, names: list[str], mesh: DeviceMesh, input: Any, placement: Placement | None
) -> Any:
    """Cast as the first layer with so many `in_features`, not sharded over them; else return it."""
    shape = getattr(input, "shape", ())
    if placement is None or not shape:
        return input
    for name in names:
        layer: Any = module.get_submodule(name)  # it may be in high precision again
        reads = isinstance(layer, Float8Linear) and layer.in_features == shape[-1]
        if reads and not layer._float8_sums_over_ranks:
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, (placement,))
            cast = layer._float8_casts(input.device_mesh).input
            return dtensor_in_float8(input, layer.weight, layer._float8_plan, cast)
    return input  # positions, masks and the like


def _require_layer(style: Any, module: nn.Module, dim: int, mesh: DeviceMesh) -> Float8Linear:
    this = type(style).__name__
    if not isinstance(module, Float8Linear):
        got = type(module).__name__
        raise TypeError(f"{this}: got a {got}, expected a Float8Linear; convert the model first")
    if is_dtensor(module.weight):
        raise ValueError(
            f"{this}: got a layer whose weight is a DTensor already, expected a plain one; "
            f"parallelize each layer once, and before fully_shard"
        )
    granularity = module._float8_plan.casts.weight.how.scaling_granularity
    parts_have_scales = granularity.one_scale or (granularity.by_rows and dim == 0)
    if module._float8_keeps_no_master and not parts_have_scales:
        raise ValueError(
            f"{this}: got a layer with float8_weights=ONLY whose weight has {granularity} scales, "
            f"expected one scale, or those of rows for Float8ColwiseParallel: parts have all of "
            f"them then; convert the layer with another config"
        )
    _require_one_dim(style, mesh)
    require_parts(module.weight.shape, dim, mesh.size())
    return module


def _require_one_dim(style: Any, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"{type(style).__name__}: got a mesh of {mesh.ndim} dims {mesh.mesh_dim_names or ''}, "
            f"expected one; give parallelize_module that of tensor parallel, mesh['name']"
        )
