"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

import functools
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8.config import (
    ConfigOrRecipe,
    Float8LinearConfig,
    Float8Weights,
    ScalingGranularity,
    as_config,
)
from float8.kernels.runtime.ops import NO_ONNX
from float8.linear.classes import class_of, is_conv1d
from float8.linear.delayed import WEIGHT_SCALE, StatefulLayer
from float8.linear.functional import (
    NO_SCALES,
    DelayedScales,
    apply_linear,
    require_input,
    weight_in_float8,
)
from float8.linear.held import HeldWeight, ToHold, current
from float8.linear.inputs import of_another_kind
from float8.linear.plan import plan_linear
from float8.linear.sharded import ParallelStyle, dtensor_in_float8, linear_of_shards
from float8.linear.source import copied_from, own_names, problem
from float8.linear.weight import in_float8_only
from float8.quantize.history import UNKNOWN_SCALE, DelayedScale
from float8.quantize.spec import Quantized
from float8.tensor import Float8Tensor, dequantise, is_dtensor, local_tensor

_NO_TRACE = (
    "Float8Linear: got torch.jit.trace with delayed scaling, expected evaluation without "
    "gradients, which records no amaxes: TorchScript cannot express that; call model.eval() and "
    "trace under torch.no_grad(), or use torch.compile or torch.export"
)


class Float8Layer(StatefulLayer):
    """What all linear layers in float8 are, whatever they were made of."""

    in_features: int
    out_features: int
    bias: Any
    base_class: ClassVar[Any] = None
    """`Float8Linear` or `Float8Conv1D`, in classes that `class_of` made of it."""
    source_class: ClassVar[type[nn.Module]] = nn.Linear
    """What it was made of, and becomes again in `convert_to_high_precision`."""
    tokens_dim: int | None = None
    """Under tensor parallel: the dim along which ranks share the tokens of an output that is a sum
    over ranks. None: the sum is left to others."""
    gathered: str | None = None
    """`input` or `grad_output`: of which ranks gather the tokens, as `repr` says."""
    parallel_style: ParallelStyle | None = None
    """What a style of this library has hooks do, for those who call them elsewhere."""
    weight_scale: Tensor | None = None
    """That of the whole weight, while a module runs that found it for all of its layers."""

    @classmethod
    def from_float(
        cls,
        mod: nn.Module,
        config: ConfigOrRecipe | None = None,
        *,
        linear_classes: Collection[type[nn.Linear]] = (),
    ) -> "Float8Layer":
        """Make a `Float8Linear` with the Parameters, hooks and training mode of `mod`.

        Parameters are the same objects (`enable_fsdp_float8_all_gather` takes effect in
        `convert_to_float8_training`). What is registered or removed later, in `mod` or in the
        new layer, does not show in the other; so the handle of a hook of `mod` removes it there.

        Args:
            mod: the layer; its Parameters are shared, not copied. Of a subclass of `nn.Linear`
                the new layer is an instance, too. Of a `Float8Linear` the state is made anew.
                Of a `Conv1D` of transformers a `Float8Conv1D` is made.
            config: a `Float8LinearConfig`, or the name of a recipe. None means dynamic tensorwise
                scaling.
            linear_classes: subclasses of `nn.Linear` whose own forward may be replaced.

        Raises:
            TypeError: `mod` is no linear layer, or of a subclass that may compute something else,
                or its dtype cannot be cast to float8.
            ValueError: `config` cannot be honoured for this layer.
        """
        config = as_config(config)
        require_supported(mod, config, linear_classes)
        source = mod.source_class if isinstance(mod, Float8Layer) else type(mod)
        new_class = class_of(_base(mod, cls), source)
        new: Float8Layer = copied_from(mod, new_class)
        new.set_up(config)
        return new

    def begin(self, config: ConfigOrRecipe | None) -> None:
        """What constructors do once Parameters are there; raises as `from_float`."""
        config = as_config(config)
        require_supported(self, config)
        self.set_up(config)

    def set_up(self, config: Float8LinearConfig) -> None:
        """Take this configuration, with state made anew."""
        self._take_back_master()
        self._drop_state()
        self.plan = plan_linear(config)
        self.register_state(config)
        if self.keeps_no_master:
            weight = in_float8_only(self.weight.detach(), self.plan.weight)
            self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def _take_back_master(self) -> None:
        """Dequantise a weight that is in float8 only."""
        weight: Any = self._parameters.get("weight")
        if "config" in vars(self) and self.keeps_no_master and isinstance(weight, Float8Tensor):
            self._parameters["weight"] = nn.Parameter(dequantise(weight), requires_grad=False)

    def _drop_state(self) -> None:
        for name in self._state():
            del self._buffers[name]

    def become_high_precision(self) -> None:
        """Turn this very object back into what it was made of."""
        self._take_back_master()
        self._drop_state()
        self.__dict__.pop("forward", None)  # as in `copied_from`
        source = self.source_class  # may be the layer's own
        cls: Any = self.base_class or type(self)  # without what is of the source's
        for name in own_names(cls) & vars(self).keys():
            del self.__dict__[name]
        self.__class__ = source  # type: ignore[assignment]

    # ---------------------------------------------------------------- forward

    def forward(self, input: Tensor, *, keep_input: bool = False) -> Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.
                Or a nested tensor of layout jagged, all of whose values have one scale together.
            keep_input: save `input` for backward, and cast it again there, instead of a float8
                copy. Less memory where somebody else saves it anyway, as attention does its
                output; else more. Without effect on an input that must be copied first.

        Returns:
            [..., N], dtype of the (autocast) input.

        Raises:
            TypeError: the dtype of `input` is not that of the weight, or no supported one; or
                its layout is none.
            ValueError: the last dim of `input` is not `in_features`, or needs padding that
                `pad_inner_dim=False` forbids.
            RuntimeError: a sync of delayed scaling is missing; or the call is to be exported to
                ONNX, or within torch.func, or delayed scaling within torch.jit.trace.
        """
        if input.layout is not torch.strided or input.is_nested:
            run = functools.partial(Float8Layer.forward, self, keep_input=keep_input)
            other: Tensor = of_another_kind(self, input, run, keep_input=keep_input)
            return other
        scales, weight = NO_SCALES, self.weight  # once: it may be computed
        if self.delayed:
            self.check_synced()
            scales = self.delayed_scales()
        if self.transposed:
            weight = weight.t()
        if hasattr(weight, "device_mesh"):
            sharded: Tensor = linear_of_shards(self, input, weight, self.bias, scales, keep_input)
            return sharded
        if weight.requires_grad and self.config.float8_weights is Float8Weights.ONLY:
            raise RuntimeError(
                "Float8Linear: got requires_grad=True for a weight that is in float8 only, "
                "expected False: it cannot be trained; call convert_to_high_precision(model) first"
            )
        ready = None if self.held is None else self.ready_weight(weight, weight)
        return apply_linear(input, weight, self.bias, self.plan, scales, ready, keep_input)

    def in_float8(self, input: Any) -> Any:
        """A DTensor on a mesh of one dim, in float8 as this layer casts it; see `sharded`.

        Raises:
            TypeError, ValueError: as `forward`, of its dtype and shape.
        """
        require_input(input, self.weight.t() if self.transposed else self.weight)
        return dtensor_in_float8(self, input, self.delayed_scales())

    @property
    def sums_over_ranks(self) -> bool:
        """Whether, under tensor parallel, each rank multiplies some of the features."""
        placements: Any = getattr(self.weight, "placements", None)
        return placements is not None and placements[-1].is_shard(1)

    def held_of(self, weight: Any) -> HeldWeight | None:
        """What forward reads instead of casting `weight`, this layer's.

        Another weight is somebody else's: of FSDP, or of `functional_call`. Evaluation casts the
        weight as it is: scales come from no history there, and averages are written into
        `weight.data`, past version counters.
        """
        held = self.held
        return held if held is not None and held.weight is weight and self.training else None

    def to_hold(self, weight: Any) -> ToHold:
        """How `weight` is held; of a DTensor this rank's part, under the scale of the whole."""
        spec, group = self.plan.weight, None
        one_scale = spec.granularity is ScalingGranularity.TENSORWISE
        if is_dtensor(weight) and one_scale and not self.knows_scales("weight"):
            group = weight.device_mesh.get_group(0).group_name
        return ToHold(weight, spec, self._buffers.get(WEIGHT_SCALE), group)

    def ready_weight(self, weight: Any, local: Tensor) -> Quantized | None:
        """The operand of `weight`, this layer's, if it is in float8 already.

        `local`: `weight` itself, or this rank's part of a DTensor.
        """
        if (held := self.held_of(weight)) is not None:
            operand = current(held.operand, self.to_hold(weight), local)
            if not torch.compiler.is_compiling() and operand is not None:
                self.held = HeldWeight(weight, operand)
            return operand
        return weight_in_float8(local, self.plan) if isinstance(local, Float8Tensor) else None

    def delayed_scales(self) -> DelayedScales:
        """The state of the casts: they take scales from it in training mode, and record amaxes.

        With gradients or without: the first forward of reentrant activation checkpointing has none.
        Amaxes are recorded wherever gradients are taken.
        """
        record = torch.is_grad_enabled()
        if not self.delayed or not (record or self.training):
            return NO_SCALES
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(NO_ONNX if torch.onnx.is_in_onnx_export() else _NO_TRACE)
        # A compiled graph counts as written what its ops may write: so where nothing is recorded,
        # they are given another tensor, since version counters of amaxes tell of training.
        record = record or not torch.compiler.is_compiling()
        scales = {}
        for site in self.delayed:
            amax, scale = getattr(self, site.amax), getattr(self, site.scale)
            scales[site.name] = DelayedScale(
                scale if self.training else torch.full_like(scale, UNKNOWN_SCALE),
                amax if record else torch.empty_like(amax),
            )
        return DelayedScales(**scales)

    def __prepare_scriptable__(self) -> None:
        """Called by `torch.jit.script`."""
        raise RuntimeError(
            "Float8Linear: got torch.jit.script, expected a model in high precision: TorchScript "
            "cannot express casts to float8; use torch.compile or torch.export, or call "
            "convert_to_high_precision(model) first"
        )

    def extra_repr(self) -> str:
        """What its class says, and how it runs: a recipe, or the scaling of each tensor."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        parts = [super().extra_repr() or sizes, self.config.short_str()]
        weight = local_tensor(self._parameters.get("weight"))
        if self.keeps_no_master and not isinstance(weight, Float8Tensor):
            parts.append("weight in high precision")  # which somebody has set
        elif self.held is not None or self.keeps_no_master:
            parts.append(f"weight {self.config.float8_weights.value} in float8")
        of_input = self.gathered == "input"
        if self.gathered is not None and not (of_input and self.sums_over_ranks):
            plan = self.plan
            once = plan.casts_input_once() if of_input else plan.casts_grad_output_once()
            parts.append(f"{self.gathered} gathered in {'float8' if once else 'high precision'}")
        return ", ".join(parts)


class Float8Linear(Float8Layer, nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: ConfigOrRecipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.begin(config)


class Float8Conv1D(Float8Layer):
    """A linear layer in float8 that was the `Conv1D` of transformers, and is one: weight [K, N].

    So optimizers, checkpoints and adapters see what they saw before. It is no `nn.Linear`, which
    would promise a weight [N, K]. FSDP2 gathers the weight in high precision, and it is cast on the
    fly also with `Float8Weights.HELD`.
    """

    transposed = True
    in_features = out_features = 0
    __repr__ = nn.Module.__repr__

    def set_up(self, config: Float8LinearConfig) -> None:
        """As `Float8Linear`."""
        super().set_up(config)
        if not self.in_features:
            self.in_features, self.out_features = self.weight.shape


def _base(mod: Any, cls: Any = Float8Linear) -> Any:
    """Which of our classes a layer becomes; `cls` is `Float8Linear` or a subclass."""
    transposed = mod.transposed if isinstance(mod, Float8Layer) else is_conv1d(mod)
    return Float8Conv1D if transposed else Float8Linear if cls is Float8Conv1D else cls


def unsupported(
    mod: nn.Module,
    config: Float8LinearConfig,
    linear_classes: Collection[type] = (),
    cls: type[Float8Linear] = Float8Linear,
) -> str | None:
    """Say why `mod` cannot become a `Float8Linear` of this configuration, or return None.

    Args:
        mod: an `nn.Linear` of any subclass, a `Conv1D`, or either converted.
        config: the configuration.
        linear_classes: subclasses of `nn.Linear` whose forward may be replaced.
        cls: what it is to become: `Float8Linear`, or a subclass.
    """
    found = problem(mod, _base(mod, cls), config, linear_classes)
    return None if found is None else str(found)


def require_supported(
    mod: nn.Module, config: Float8LinearConfig, linear_classes: Collection[type] = ()
) -> None:
    """Raise what `unsupported` says."""
    linear = isinstance(mod, nn.Linear | Float8Layer)
    if not linear and not (isinstance(mod, nn.Module) and is_conv1d(mod)):
        raise TypeError(f"Float8Linear: got a {type(mod).__name__}, expected an nn.Linear")
    found = problem(mod, _base(mod), config, linear_classes)
    if found is not None:
        raise type(found)(f"Float8Linear: {found}")
