"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from float8.config import CastSite, Float8LinearConfig
from float8.formats import GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES, lacks_float8_gemm
from float8.linear import overdue, state
from float8.linear.function import DelayedScales, Float8LinearFunction
from float8.linear.plan import plan_linear
from float8.scaling import DelayedScale


class Float8Linear(nn.Linear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a plain high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    config: Float8LinearConfig
    sync_overdue: bool
    _synced_versions: list[int] | None

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
        self._set_up(Float8LinearConfig() if config is None else config)

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> "Float8Linear":
        """Make a `Float8Linear` that shares all of `mod`: Parameters, hooks, training mode.

        Args:
            mod: the layer; its Parameters are shared, not copied.
            config: None means `Float8LinearConfig()`, dynamic tensorwise scaling.

        Raises:
            TypeError: `mod` is no `nn.Linear`, or its dtype cannot be cast to float8.
            ValueError: `config` cannot be honoured for this layer.
        """
        if not isinstance(mod, nn.Linear):
            raise TypeError(f"from_float: got {type(mod).__name__}, expected an nn.Linear")
        new = cls.__new__(cls)
        new.__dict__.update(mod.__dict__)
        new._buffers = dict(mod._buffers)  # ours must not show up in `mod`
        if isinstance(mod, Float8Linear):
            for name in state.buffer_names(mod.config):  # those of its configuration, not ours
                del new._buffers[name]
        new._set_up(Float8LinearConfig() if config is None else config)
        return new

    def _set_up(self, config: Float8LinearConfig) -> None:
        problem = unsupported(self, config)
        if problem is not None:
            raise (TypeError if "dtype" in problem else ValueError)(f"Float8Linear: {problem}")
        self.config = config
        self._plan = plan_linear(config)
        self.sync_overdue = False
        state.register_buffers(self, config, self.weight.device)
        self._watch()

    # ---------------------------------------------------------------- forward

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.

        Returns:
            [..., N], dtype of the (autocast) input.

        Raises:
            TypeError: the dtype of `input` is not that of the weight, or no supported one.
            ValueError: the last dim of `input` is not `in_features`, or needs padding that
                `pad_inner_dim=False` forbids.
            RuntimeError: a sync of delayed scaling is missing.
        """
        if self.sync_overdue and self.training:
            raise RuntimeError(
                "Float8Linear: the optimizer stepped, but delayed scaling was not synced; call "
                "sync_float8_amax_and_scale_history(model) once per optimizer step, or "
                "attach_to_optimizer(model, optimizer) once before training"
            )
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # meta knows no autocast
            if input.is_floating_point():
                input = input.to(torch.get_autocast_dtype(device))
        elif input.dtype != self.weight.dtype:
            raise TypeError(
                f"Float8Linear: got input of dtype {input.dtype} and weight of dtype "
                f"{self.weight.dtype}, expected the same; cast one of them or use torch.autocast"
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

        output_shape = (*input.shape[:-1], self.out_features)
        if input.numel() == 0:  # no rows: nothing to measure, nothing to multiply
            output = input.reshape(-1, self.in_features) @ self.weight.to(input.dtype).t()
        else:
            output = self._multiply(input.reshape(-1, self.in_features))
        output = output.reshape(output_shape)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output

    def _multiply(self, input: Tensor) -> Tensor:
        grad = torch.is_grad_enabled()
        need_grad_input = grad and input.requires_grad
        need_grad_weight = grad and self.weight.requires_grad
        if not self._plan.pad and need_grad_weight and self._plan.grad_weight.float8:
            _check_tokens(input)
        return cast(
            Tensor,
            Float8LinearFunction.apply(  # type: ignore[no-untyped-call]
                input,
                self.weight,
                self._plan,
                self._delayed_scales(),
                self.training,
                need_grad_input,
                need_grad_weight,
            ),
        )

    def _delayed_scales(self) -> DelayedScales:
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
        for switch in ("emulate", "round_scales_to_power_of_2"):
            if getattr(self.config, switch):
                parts.append(switch)
        return ", ".join(parts)

    # ---------------------------------------------------------------- delayed-scaling state

    def reset_parameters(self) -> None:
        """Initialise weight and bias as `nn.Linear` does, and forget all amaxes."""
        super().reset_parameters()
        if "config" in self.__dict__:  # not yet while nn.Linear.__init__ runs
            state.reset_buffers(self, self.config)
            self.mark_synced()

    def has_unsynced_amax(self) -> bool:
        """Whether an amax was recorded since the last sync."""
        return self._amax_versions() != self._synced_versions

    def mark_synced(self) -> None:
        """Note that all amaxes recorded so far are in the history."""
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
        if self._delayed and self.config.enable_pre_and_post_forward:
            overdue.watch(self)

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        super().__setstate__(pickled)  # type: ignore[no-untyped-call]
        self._watch()  # a copy is a layer of its own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float8Linear":
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
        # New buffers count versions anew.
        self._synced_versions = None if unsynced else self._amax_versions()
        return self

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
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        state.repair_buffers(self, self.config, self.weight.device)  # for assign=True
        self.mark_synced()  # writing the buffers was no recording of amaxes
        ours = {prefix + name for name in state.buffer_names(self.config)}
        if ours.isdisjoint(state_dict):  # a checkpoint of the plain model: keep our state
            missing = [key for key in missing if key not in ours]
        missing_keys.extend(missing)


_NO_SCALES = DelayedScales()


def unsupported(mod: nn.Linear, config: Float8LinearConfig) -> str | None:
    """Say why `mod` cannot become a `Float8Linear` of this configuration, or return None."""
    if "forward" in mod.__dict__:  # it would win over ours
        return "got a layer with a `forward` of its own as attribute, expected nn.Linear's"
    if mod._compiled_call_impl is not None:  # bound to the layer it was made for
        return "got a layer after `.compile()`, expected one before; convert first, then compile"
    weight = mod.weight
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        expected = ", ".join(map(str, HIGH_PRECISION_DTYPES))
        return f"got weight of dtype {weight.dtype}, expected one of {expected}"
    if 0 in weight.shape:
        return f"got weight of shape {tuple(weight.shape)}, expected no empty dim"
    if not config.pad_inner_dim and any(dim % GEMM_ALIGNMENT for dim in weight.shape):
        return (
            f"got weight of shape {tuple(weight.shape)}, expected dims divisible by "
            f"{GEMM_ALIGNMENT}; set pad_inner_dim=True to have them padded"
        )
    if not config.emulate and (reason := lacks_float8_gemm(weight.device)) is not None:
        return f"{reason}; set emulate=True to compute in high precision instead"
    return None


def _check_tokens(input: Tensor) -> None:
    if input.shape[0] % GEMM_ALIGNMENT:
        raise ValueError(
            f"Float8Linear: got {input.shape[0]} tokens (all leading dims together), expected a "
            f"multiple of {GEMM_ALIGNMENT} for the GEMM 'grad_weight'; set pad_inner_dim=True"
        )
