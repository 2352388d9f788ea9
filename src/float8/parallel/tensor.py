"""Tensor parallel with communication in float8: styles for `parallelize_module`.

Tokens that are spread over ranks (sequence parallel) are cast under the scale of the whole tensor,
then gathered as bytes, in backward as in forward. What is summed over ranks is in high precision.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from float8.config import ScalingGranularity
from float8.linear import Float8Layer, Float8Linear
from float8.linear.sharded import ParallelStyle, forward_hooks, require_parts, weight_scales
from float8.tensor import Float8Tensor, is_dtensor, local_tensor

Placements = tuple[Placement, ...]
BY_ROWS = ScalingGranularity.AXISWISE


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a `Float8Linear`: the input is gathered in float8.

    Args:
        input_layouts, output_layouts, use_local_output: as for `ColwiseParallel`; an input that
            `PrepareFloat8ModuleInput` has cast is taken as it is.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: Any,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        if isinstance(mod, Float8Linear):  # it casts, gathers and multiplies
            return _on_mesh(inputs[0], device_mesh, input_layouts)
        # It was turned back into high precision.
        return ColwiseParallel._prepare_input_fn(  # type: ignore[no-untyped-call]
            input_layouts, desired_input_layouts, mod, inputs, device_mesh
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _require_layer(self, module, 0, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            layer.gathered = "input"
        before = forward_hooks(layer)
        super()._apply(layer, device_mesh)
        (input,), (output,) = self.input_layouts, self.output_layouts
        layer.parallel_style = ParallelStyle(input, output, _added(layer, before))
        return layer


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a `Float8Linear`: in backward grad_output is gathered in float8.

    Args:
        input_layouts, output_layouts, use_local_output: as for `RowwiseParallel`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, (to,) = _require_layer(self, module, 1, device_mesh), self.output_layouts
        if isinstance(to, Shard) and to.dim != -1:
            layer.tokens_dim, layer.gathered = to.dim, "grad_output"
        before = forward_hooks(layer)
        super()._apply(layer, device_mesh)
        layer.parallel_style = ParallelStyle(*self.input_layouts, to, _added(layer, before))
        return layer


class Float8SequenceParallel(SequenceParallel):
    """`SequenceParallel` for a norm that `rms_norm_linear` or `swiglu_feed_forward` is given.

    They then fuse it, which they cannot do with hooks that they do not know; elsewhere it is the
    same as torch's. The gradients of the norm's parameters are those of all tokens.

    Args:
        sequence_dim: as for `SequenceParallel`.
        use_local_output: likewise; without effect where the norm is fused.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_one_dim(self, device_mesh)
        before, noted = forward_hooks(module), vars(module)
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        super()._apply(module, device_mesh)
        for name in frozen:  # torch's class makes new Parameters
            module.get_parameter(name).requires_grad_(False)
        (tokens,) = self.sequence_sharding
        noted["parallel_style"] = ParallelStyle(tokens, tokens, _added(module, before))
        return module


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts inputs once for all layers of a module, then gathers bytes.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts,
            use_local_output: as for `PrepareModuleInput`.
        float8_dtype: None, or the format that the layers cast their input to.
        fwd_config_submodule_fqn: the name, within the module, of the `Float8Linear` that says how
            to cast; None: all of them must say the same.
    """

    layer_names: list[str]

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

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = copy.copy(self)  # one style may prepare many modules
        own.layer_names = self._find_layers(module)
        _require_one_dim(self, device_mesh)
        if self.input_layouts != self.desired_input_layouts:
            for name in own.layer_names:
                layer: Any = module.get_submodule(name)
                layer.gathered = layer.gathered or "input"
        # No hook: torch compiles hooks apart from the module that is compiled, and compiled code
        # cannot return a `Float8Tensor` that requires grad.
        prepared = own._prepared(vars(module).get("forward"), device_mesh)
        module.forward = types.MethodType(prepared, module)
        return module

    def _prepared(self, inner: Any, mesh: DeviceMesh) -> Callable[..., Any]:
        """A forward that prepares its inputs for that of the class, or for `inner`."""
        inner = getattr(inner, "__func__", inner)  # a copy of the module is handed itself

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.input_layouts is not None:
                layouts, desired = self.input_layouts, self.desired_input_layouts or ()
                if len(args) != len(layouts):
                    raise ValueError(
                        f"PrepareFloat8ModuleInput: got {len(args)} inputs and layouts of "
                        f"{len(layouts)}, expected as many; None leaves an input alone"
                    )
                args = tuple(
                    self._prepare(module, mesh, *each)
                    for each in zip(args, layouts, desired, strict=True)
                )
            for name, layout in self.input_kwarg_layouts.items():
                if name in kwargs:
                    to = self.desired_input_kwarg_layouts.get(name)
                    kwargs[name] = self._prepare(module, mesh, kwargs[name], layout, to)
            layers = self._find_weight_scales(module)
            try:
                return (type(module).forward if inner is None else inner)(module, *args, **kwargs)
            finally:
                for layer in layers:
                    layer.weight_scale = None

        prepared: Any = forward
        prepared.runs_class_forward = inner is None or getattr(inner, "runs_class_forward", False)
        return forward

    def _find_weight_scales(self, module: nn.Module) -> list[Float8Linear]:
        """Ask all ranks at once for the scales of weights that are cast now, and tell the layers.

        In compiled code each layer asks for its own: Dynamo lets nothing that is checkpointed write
        to a module.
        """
        alike: list[Any] = []
        if torch.compiler.is_compiling():
            return alike
        for name in self.layer_names:
            layer: Any = module.get_submodule(name)
            weight: Any = getattr(layer, "weight", None)
            if not isinstance(layer, Float8Linear) or not layer.plan.casts_weight_dynamically():
                continue
            if not is_dtensor(weight) or isinstance(local_tensor(weight), Float8Tensor):
                continue
            if layer.held_of(weight) is not None:
                continue
            mine = layer.plan.weight, weight.device_mesh
            if not alike or mine == (alike[0].plan.weight, alike[0].weight.device_mesh):
                alike.append(layer)
        if len(alike) > 1:
            scales = weight_scales([layer.weight for layer in alike], alike[0].plan.weight)
            for layer, scale in zip(alike, scales, strict=True):
                layer.weight_scale = scale
        return alike

    def _prepare(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        input: Any,
        layout: Placement | None,
        desired: Placement | None,
    ) -> Any:
        shape = list(getattr(input, "shape", ()))
        layer = self._reader(module, shape[-1]) if shape and layout is not None else None
        if layer is None or layout is None:  # positions, masks and the like
            return self._prepare_input_arg(input, mesh, layout, desired)
        x = layer.in_float8(_on_mesh(input, mesh, (layout,)))
        if desired is not None and x.placements != (desired,):
            x = x.redistribute(placements=(desired,))
        return x.to_local() if self.use_local_output else x

    def _reader(self, module: nn.Module, features: int) -> Float8Linear | None:
        """The first layer that may read an input of so many features, which are all here."""
        for name in self.layer_names:
            layer = module.get_submodule(name)
            reads = isinstance(layer, Float8Linear) and layer.in_features == features
            if reads and not layer.sums_over_ranks:
                return layer  # type: ignore[return-value]
        return None

    def _find_layers(self, module: nn.Module) -> list[str]:
        fqn = self.fwd_config_submodule_fqn
        if fqn is None:
            found = dict(module.named_modules())
        else:
            found = {fqn: module.get_submodule(fqn)}
        layers = {name: x for name, x in found.items() if isinstance(x, Float8Linear)}
        if not layers:
            raise TypeError(
                f"{type(self).__name__}: got {_named(next(iter(found.values())))}, expected a "
                f"Float8Linear or a module that holds some; convert the model first"
            )
        specs = {layer.plan.input for layer in layers.values()}
        if len(specs) > 1:
            raise ValueError(
                f"{type(self).__name__}: got layers that cast their input in {len(specs)} ways, "
                f"expected one; name the one to follow with `fwd_config_submodule_fqn`"
            )
        (spec,) = specs
        if self.float8_dtype not in (None, spec.dtype):
            raise ValueError(
                f"{type(self).__name__}: got float8_dtype={self.float8_dtype}, expected "
                f"{spec.dtype}, to which the layers cast their input; leave it out"
            )
        return list(layers)


def _added(module: nn.Module, before: tuple[int, int]) -> tuple[int, int]:
    pre, post = forward_hooks(module)
    return pre - before[0], post - before[1]


def _named(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


def _require_layer(style: Any, module: nn.Module, dim: int, mesh: DeviceMesh) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        do = "convert the model first"
        if isinstance(module, Float8Layer):  # made of a Conv1D
            do = "torch's styles know no weights [K, N]"
        raise TypeError(
            f"{type(style).__name__}: got {_named(module)}, expected a Float8Linear; {do}"
        )
    if is_dtensor(module.weight):
        raise ValueError(
            f"{type(style).__name__}: got a layer whose weight is a DTensor already, expected one "
            f"that nobody has shared; parallelize each layer once, and before fully_shard"
        )
    granularity = module.plan.weight.granularity
    whole = granularity is ScalingGranularity.TENSORWISE
    if module.keeps_no_master and not whole and (granularity, dim) != (BY_ROWS, 0):
        raise ValueError(
            f"{type(style).__name__}: got a layer with float8_weights=ONLY whose weight has "
            f"{granularity} scales, expected one scale, or those of rows for a colwise style: "
            f"parts of a weight that is in float8 only do not have all of the scales; convert the "
            f"layer with another config"
        )
    _require_one_dim(style, mesh)
    require_parts(module.weight.shape, dim, mesh.size(), module.plan)
    return module


def _require_one_dim(style: Any, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"{type(style).__name__}: got a mesh of {mesh.ndim} dims {mesh.mesh_dim_names or ''}, "
            f"expected one; give parallelize_module that of tensor parallel, mesh['name']"
        )


def _on_mesh(x: Any, mesh: DeviceMesh, placements: Placements) -> DTensor:
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, placements, run_check=False)
