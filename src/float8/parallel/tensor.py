"""Tensor parallel: styles of `parallelize_module` that communicate in float8.

One scale per tensor comes from the amax over all ranks. Sums over ranks are in high precision.
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
from float8.parallel.sharded import dtensor_in_float8, require_parts, sums_over_ranks
from float8.tensor import is_dtensor


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a `Float8Linear`; quantizes a sharded input, then all-gathers it.

    Takes the arguments of `ColwiseParallel`. Under recipes other than `tensorwise`, `delayed` and
    `rowwise`, gathers in high precision, since the GEMM of grad_weight cannot use float8 rows; also
    under `rowwise` if features are sharded. Does not quantize an input in float8 again.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        if not isinstance(mod, Float8Linear):  # converted back to high precision since
            return ColwiseParallel._prepare_input_fn(  # type: ignore[no-untyped-call]
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        x = inputs[0]  # the layer itself quantizes and gathers it
        return x if is_dtensor(x) else DTensor.from_local(x, device_mesh, input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require_layer(self, module, 0, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            layer._float8_shards = layer._float8_shards._replace(gathers_input=True)
        return super()._apply(layer, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a `Float8Linear`; backward quantizes grad_output, then all-gathers it.

    Takes the arguments of `RowwiseParallel`. grad_output is gathered only if `output_layouts` is a
    `Shard` of tokens: in float8 if ranks divide these, under `tensorwise`, `delayed`, `rowwise`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, (layout,) = _require_layer(self, module, 1, device_mesh), self.output_layouts
        if isinstance(layout, Shard) and layout.dim != -1:  # shards tokens, not features
            layer._float8_shards = layer._float8_shards._replace(tokens_dim=layout.dim)
        return super()._apply(layer, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts inputs to float8, once for all layers, and redistributes.

    Does not cast what `Float8ColwiseParallel` gathers in high precision, or no layer reads whole.

    Args:
        **layouts: the arguments of `PrepareModuleInput`, such as `input_layouts`.
        float8_dtype: raise `ValueError` if layers cast inputs to another dtype; None: do not check.
        fwd_config_submodule_fqn: name, within the module, of the `Float8Linear` whose cast of the
            input is used. None: all in the module must cast their input in the same way.
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
            for name in names:  # for their `repr`; to `Replicate()` this style gathers itself
                layer: Any = module.get_submodule(name)
                layer._float8_shards = layer._float8_shards._replace(gathers_input=True)
        own_forward = vars(module).get("forward")  # an attribute of the instance, or None
        own_forward = getattr(own_forward, "__func__", own_forward)  # unbound; copies pass self

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.input_layouts is not None:
                if len(args) != len(self.input_layouts):
                    got = f"got {len(args)} inputs and layouts of {len(self.input_layouts)}"
                    expected = "expected as many; None leaves an input alone"
                    raise ValueError(f"PrepareFloat8ModuleInput: {got}, {expected}")
                args_and_layouts = zip(args, self.input_layouts, strict=True)
                args = tuple(_quantize(module, names, device_mesh, *x) for x in args_and_layouts)
            for name, placement in self.input_kwarg_layouts.items():
                if name in kwargs:
                    kwargs[name] = _quantize(module, names, device_mesh, kwargs[name], placement)
            args, kwargs = self._prepare_input_kwarg_fn(args, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            return (own_forward or type(module).forward)(module, *args, **kwargs)

        # Not a hook, compiled apart: graphs cannot return a `Float8Tensor` that requires grad.
        module.forward = types.MethodType(forward, module)
        return module

    def _find_layers(self, module: nn.Module) -> list[str]:
        """Return names of `Float8Linear`s in `module`; raise if none, or casts or dtypes differ."""
        fqn = self.fwd_config_submodule_fqn
        modules = dict(module.named_modules()) if fqn is None else {fqn: module.get_submodule(fqn)}
        layers = {name: x for name, x in modules.items() if isinstance(x, Float8Linear)}
        style = type(self).__name__
        if not layers:
            got = type(next(iter(modules.values()))).__name__
            expected = "a Float8Linear or a module that holds some; convert the model first"
            raise TypeError(f"{style}: got a {got}, expected {expected}")
        config, *others = {layer._float8_plan.casts.input.config for layer in layers.values()}
        if others:
            got = f"got layers that cast their input in {1 + len(others)} ways, expected one"
            do = "name the layer to follow with `fwd_config_submodule_fqn`"
            raise ValueError(f"{style}: {got}; {do}")
        if self.float8_dtype not in (None, config.dtype):
            expected = f"{config.dtype}, to which the layers cast their input; leave it out"
            raise ValueError(f"{style}: got float8_dtype={self.float8_dtype}, expected {expected}")
        return list(layers)


def _quantize(
    module: nn.Module, names: list[str], mesh: DeviceMesh, input: Any, placement: Placement | None
) -> Any:
    """Return `input`, with `placement` on `mesh`, as a DTensor, in float8 if its GEMMs can use it.

    Returns it unchanged if `placement` is None, or if no float8 layer in `names`, of `module`,
    reads whole rows of it: each has other `in_features`, or a weight sharded along these.
    """
    shape = getattr(input, "shape", ())
    if placement is None or not shape:  # not to be placed, or no tensor with dims
        return input
    for name in names:
        layer: Any = module.get_submodule(name)  # maybe converted back to high precision since
        fits = isinstance(layer, Float8Linear) and layer.in_features == shape[-1]
        if fits and not sums_over_ranks(layer.weight):  # rowwise layers read part of it
            if not is_dtensor(input):
                input = DTensor.from_local(input, mesh, (placement,))
            cast = layer._float8_shards.casts(layer, input.device_mesh).input
            return dtensor_in_float8(input, layer.weight, layer._float8_plan, cast)
    return input


def _require_layer(style: Any, module: nn.Module, dim: int, mesh: DeviceMesh) -> Float8Linear:
    """Return `module`; raise if `style` cannot shard its weight [N, K] along `dim` over `mesh`."""
    name = type(style).__name__
    if not isinstance(module, Float8Linear):
        got = type(module).__name__
        raise TypeError(f"{name}: got a {got}, expected a Float8Linear; convert the model first")
    if is_dtensor(module.weight):
        got = "got a layer whose weight is a DTensor already, expected a plain one"
        raise ValueError(f"{name}: {got}; parallelize each layer once, and before fully_shard")
    granularity = module._float8_plan.casts.weight.config.scaling_granularity
    parts_have_scales = granularity.one_scale or (granularity.by_rows and dim == 0)
    if module._float8_never_trains and not parts_have_scales:
        got = f"got a layer with float8_weights=ONLY whose weight has {granularity} scales"
        expected = "one scale, or those of rows for Float8ColwiseParallel, so that no scale is cut"
        do = "convert the layer with another config"
        raise ValueError(f"{name}: {got}, expected {expected}; {do}")
    _require_one_dim(style, mesh)
    require_parts(module.weight.shape, dim, mesh.size())
    return module


def _require_one_dim(style: Any, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        got = f"got a mesh of {mesh.ndim} dims {mesh.mesh_dim_names or ''}, expected one"
        do = "give parallelize_module that of tensor parallel, mesh['name']"
        raise ValueError(f"{type(style).__name__}: {got}; {do}")
