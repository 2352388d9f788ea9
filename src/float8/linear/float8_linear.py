"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.cast import Operand
from float8.config import CastSite, Float8LinearConfig
from float8.formats import GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.linear import overdue, state
from float8.linear.cached import WeightCache, current_operand
from float8.linear.function import DelayedScales, Float8LinearFunction
from float8.linear.plan import LinearPlan, plan_linear
from float8.linear.source import own_containers, require_supported
from float8.linear.weight import float8_operand
from float8.scaling import UNKNOWN_SCALE, DelayedScale
from float8.tensor import high_precision, with_plan_of


class Float8Linear(nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    config: Float8LinearConfig
    plan: LinearPlan
    sync_overdue: bool
    cached_weight: Operand | None = None
    """The weight in float8 inside `float8.cached_weights`."""
    weight_cache: WeightCache | None = None
    _synced_versions: list[int] | None
    _weight_scale_known: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        config = Float8LinearConfig() if config is None else config
        require_supported(self, config, float8=True)
        self._set_up(config)

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> "Float8Linear":
        """Make a `Float8Linear` with the Parameters, hooks and training mode of `mod`.

        Parameters are the same objects (`enable_fsdp_float8_all_gather` takes effect in
        `convert_to_float8_training`). What is registered or removed later, in `mod` or in the
        new layer, does not show in the other; so the handle of a hook of `mod` removes it there.

        Args:
            mod: the layer; its Parameters are shared, not copied.
            config: None means `Float8LinearConfig()`, dynamic tensorwise scaling.

        Raises:
            TypeError: `mod` is not exactly an `nn.Linear` (or a `Float8Linear`, whose state is
                then made anew), or its dtype cannot be cast to float8.
            ValueError: `config` cannot be honoured for this layer.
        """
        config = Float8LinearConfig() if config is None else config
        require_supported(mod, config, float8=isinstance(mod, Float8Linear))
        new = cls.__new__(cls)
        new.__dict__.update(mod.__dict__)
        new.__dict__.update(own_containers(mod))
        if isinstance(mod, Float8Linear):
            for name in state.buffer_names(mod.config):  # those of its configuration, not ours
                del new._buffers[name]
        new._set_up(config)
        return new

    def _set_up(self, config: Float8LinearConfig) -> None:
        self.config = config
        self.plan = plan_linear(config)
        self.sync_overdue = False
        self.cached_weight = self.weight_cache = None
        state.register_buffers(self, config, self.weight.device)
        self._watch()

    # ---------------------------------------------------------------- forward

    def forward(self, input: Tensor, *, keep_input: bool = False) -> Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.
            keep_input: save `input` for backward, and cast it again there, instead of a float8
                copy. Less memory where somebody else saves it anyway, as attention does its
                output; else more.

        Returns:
            [..., N], dtype of the (autocast) input.

        Raises:
            TypeError: the dtype of `input` is not that of the weight, or no supported one.
            ValueError: the last dim of `input` is not `in_features`, or needs padding that
                `pad_inner_dim=False` forbids.
            RuntimeError: a sync of delayed scaling is missing.
        """
        source, weight, bias = input, self.weight, self.bias  # once: they may be computed
        input = self.check_input(input, weight.dtype)
        grad = torch.is_grad_enabled()
        rows = input.reshape(-1, self.in_features)
        if input.numel() == 0:  # no rows: nothing to measure, nothing to multiply
            output = rows @ weight.to(input.dtype).t()
        else:
            need_grad_weight = grad and weight.requires_grad
            if not self.plan.pad and need_grad_weight and self.plan.grad_weight.float8:
                _check_tokens(rows)
            output = Float8LinearFunction.apply(  # type: ignore[no-untyped-call]
                rows,
                weight,
                self.ready_weight(weight),
                (source,),
                self.plan,
                self.delayed_scales(),
                grad,
                grad and input.requires_grad,
                need_grad_weight,
                keep_input and self.plan.share_input,
            )
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if bias is None else output + bias.to(output.dtype)

    def check_input(self, input: Tensor, weight_dtype: torch.dtype) -> Tensor:
        """`input` in the compute dtype, which autocast may choose; raises as `forward` does."""
        self.check_synced()
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # meta knows no autocast
            if input.is_floating_point():
                input = input.to(torch.get_autocast_dtype(device))
        elif input.dtype != weight_dtype:
            raise TypeError(
                f"Float8Linear: got input of dtype {input.dtype} and weight of dtype "
                f"{weight_dtype}, expected the same; cast one of them or use torch.autocast"
            )
        if input.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"Float8Linear: got input of dtype {input.dtype}, expected one of "
                f"{', '.join(map(str, HIGH_PRECISION_DTYPES))}"
            )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"Float8Linear: got input of shape {tuple(input.shape)}, expected "
                f"[..., {self.in_features}]"
            )
        return input

    def ready_weight(self, weight: Tensor) -> Operand | None:
        """The operand of `weight`, this layer's, if it is in float8 already."""
        if torch.compiler.is_compiling():
            cached = self.cached_weight
        else:
            cached = None if self.weight_cache is None else current_operand(self, weight)
        return float8_operand(weight) if cached is None else cached

    def weight_state(self) -> DelayedScale | None:
        """The delayed-scaling state of the weight's cast, if it has one."""
        return self.delayed_scales().weight

    def check_synced(self) -> None:
        """Raise a `RuntimeError` before training on where a sync is missing."""
        if self.sync_overdue and torch.is_grad_enabled():
            raise RuntimeError(
                "Float8Linear: the optimizer stepped, but delayed scaling was not synced; call "
                "sync_float8_amax_and_scale_history(model) once per optimizer step, or "
                "attach_to_optimizer(model, optimizer) once before training"
            )

    def delayed_scales(self) -> DelayedScales:
        """The state of this layer's casts with delayed scaling."""
        if not self._delayed:
            return _NO_SCALES
        return DelayedScales(
            **{
                site: DelayedScale(getattr(self, scale), getattr(self, amax))
                for site, scale, amax in self._delayed
            }
        )

    def extra_repr(self) -> str:
        """`nn.Linear`'s, and how each role is scaled."""
        parts = [super().extra_repr()]
        for site in CastSite:
            if self.config.owner(site) is site:
                parts.append(f"{site.value}={self.config.cast_config(site).short_str()}")
        for switch in _SWITCHES:
            if getattr(self.config, switch):
                parts.append(switch)
        return ", ".join(parts)

    # ---------------------------------------------------------------- delayed-scaling state

    def reset_parameters(self) -> None:
        """Initialise weight and bias as `nn.Linear` does, and forget all amaxes."""
        super().reset_parameters()
        if "config" in self.__dict__:  # not yet while nn.Linear.__init__ runs
            state.reset_buffers(self, self.config)
            self._weight_scale_known = False
            self.mark_synced()

    def knows_weight_scale(self) -> bool:
        """Whether delayed scaling has a scale for the weight: looks, on the device, until so."""
        if not self._weight_scale_known:
            scale = self.get_buffer(state.scale_name(CastSite.WEIGHT))
            self._weight_scale_known = scale.item() != UNKNOWN_SCALE
        return self._weight_scale_known

    def has_unsynced_amax(self) -> bool:
        """Whether an amax was recorded since the last sync."""
        return self._amax_versions() != self._synced_versions

    def mark_synced(self) -> None:
        """Note that all amaxes recorded so far are in the history."""
        self.cached_weight = None  # its scale was the last one
        self.sync_overdue = False
        self._synced_versions = self._amax_versions()

    def _amax_versions(self) -> list[int]:
        return [
            buffer._version
            for _, _, amax in self._delayed
            if (buffer := self._buffers[amax]) is not None and not buffer.is_inference()
        ]

    def _watch(self) -> None:
        self._delayed = tuple(
            (site.value, state.scale_name(site), state.amax_name(site))
            for site in self.config.delayed_sites
        )
        self._synced_versions = self._amax_versions()
        self._weight_scale_known = False
        if self._delayed and self.config.enable_pre_and_post_forward:
            overdue.watch(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached_weight": None, "weight_cache": None}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        super().__setstate__(pickled)  # type: ignore[no-untyped-call]
        self._watch()  # a copy is a layer of its own

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """`nn.Module`'s, which assigning a Parameter calls, too."""
        super().register_parameter(name, param)
        self.cached_weight = None

    def _replicate_for_data_parallel(self) -> "Float8Linear":
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.cached_weight = replica.weight_cache = None  # on another device
        return replica  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float8Linear":
        self.cached_weight = None
        before = {name: self._buffers[name] for name in state.buffer_names(self.config)}
        unsynced = self.has_unsynced_amax()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            assert old is not None
            assert new is not None
            if new.dtype != torch.float32:  # `.half()`: move, but never through fewer bits
                self._buffers[name] = old.to(new.device)
        if any(old is not None and old.is_meta for old in before.values()):
            state.reset_buffers(self, self.config)  # `to_empty()` left them undefined
        self._weight_scale_known = False
        # New buffers count versions anew.
        self._synced_versions = None if unsynced else self._amax_versions()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and (weight := destination.get(prefix + "weight")) is not None:
            destination[prefix + "weight"] = high_precision(weight)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        old_weight = self._parameters["weight"]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        # For assign=True, which replaces tensors by others.
        if (weight := self._parameters["weight"]) is not old_weight and weight is not None:
            self._parameters["weight"] = with_plan_of(weight, old_weight)
        state.repair_buffers(self, self.config, self.weight.device)
        ours = {prefix + name for name in state.buffer_names(self.config)}
        if ours.isdisjoint(state_dict):  # a checkpoint of the plain model
            missing = [key for key in missing if key not in ours]
            if any(prefix + name in state_dict for name in self._parameters):
                state.reset_buffers(self, self.config)  # what they knew was of other weights
        missing_keys.extend(missing)
        self._weight_scale_known = False
        self.mark_synced()  # writing the buffers was no recording of amaxes


_NO_SCALES = DelayedScales()
_SWITCHES = ("emulate", "round_scales_to_power_of_2", "enable_fsdp_float8_all_gather")


def _check_tokens(input: Tensor) -> None:
    if input.shape[0] % GEMM_ALIGNMENT:
        raise ValueError(
            f"Float8Linear: got {input.shape[0]} tokens (all leading dims together), expected a "
            f"multiple of {GEMM_ALIGNMENT} for the GEMM 'grad_weight'; set pad_inner_dim=True"
        )
