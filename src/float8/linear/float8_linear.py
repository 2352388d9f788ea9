"""`Float8Linear`: a drop-in `nn.Linear` whose GEMMs run in float8."""

import torch
from torch import Tensor, nn

from float8.cast import Operand
from float8.config import CastSite, Float8LinearConfig
from float8.formats import GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES
from float8.linear.cached import current_operand
from float8.linear.delayed import StatefulLinear
from float8.linear.function import DelayedScales, Float8LinearFunction, with_leading_dims
from float8.linear.plan import LinearPlan, plan_linear
from float8.linear.source import own_containers, require_supported
from float8.linear.weight import float8_operand
from float8.scaling import DelayedScale


class Float8Linear(StatefulLinear):
    """A linear layer whose GEMMs run in float8: `output = input @ weight.T + bias`.

    The weight [N, K] stays a high-precision `Parameter`. Made from an `nn.Linear` by
    `from_float` or, for a whole model, by `convert_to_float8_training`. Layers with delayed
    scaling carry the buffers `fp8_amax_*`, `fp8_amax_history_*` and `fp8_scale_*`, always float32.
    """

    plan: LinearPlan

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
            for site in mod.delayed:  # of its configuration, not ours
                for name in site.buffers:
                    del new._buffers[name]
        new._set_up(config)
        return new

    def _set_up(self, config: Float8LinearConfig) -> None:
        self.plan = plan_linear(config)
        self.register_state(config)

    # ---------------------------------------------------------------- forward

    def forward(self, input: Tensor, *, keep_input: bool = False) -> Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: [..., K] float32, bfloat16 or float16; cast to autocast's dtype under autocast.
            keep_input: save `input` for backward, and cast it again there, instead of a float8
                copy. Less memory where somebody else saves it anyway, as attention does its
                output; else more. Without effect on an input that must be copied first.

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
        rows = input if input.dim() == 2 else input.reshape(-1, self.in_features)
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
                # A copy made for this layer alone is nobody else's.
                keep_input and self.plan.share_input and input is source and input.is_contiguous(),
            )
        output = with_leading_dims(output, input)
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
        if cached is not None and cached.amax is not None and not self.uses_history:
            cached = None
        return float8_operand(weight) if cached is None else cached

    def weight_state(self) -> DelayedScale | None:
        """The delayed-scaling state of the weight's cast, if it has one, to train or not."""
        return self._scales(spare=False).weight

    def delayed_scales(self) -> DelayedScales:
        """The state of the casts that take their scales from the history now."""
        if not self.delayed or not self.uses_history:
            return _NO_SCALES
        # A compiled graph counts as written what its ops may write: not the amaxes, where a forward
        # without gradients only leaves them alone, since their version counters tell of training.
        return self._scales(spare=torch.compiler.is_compiling() and not torch.is_grad_enabled())

    def _scales(self, *, spare: bool) -> DelayedScales:
        scales = {}
        for site in self.delayed:
            recorded: Tensor = getattr(self, site.amax)
            recorded = torch.empty_like(recorded) if spare else recorded
            scales[site.name] = DelayedScale(getattr(self, site.scale), recorded)
        return DelayedScales(**scales)

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


_NO_SCALES = DelayedScales()
_SWITCHES = ("emulate", "round_scales_to_power_of_2", "enable_fsdp_float8_all_gather")


def _check_tokens(input: Tensor) -> None:
    if input.shape[0] % GEMM_ALIGNMENT:
        raise ValueError(
            f"Float8Linear: got {input.shape[0]} tokens (all leading dims together), expected a "
            f"multiple of {GEMM_ALIGNMENT} for the GEMM 'grad_weight'; set pad_inner_dim=True"
        )
