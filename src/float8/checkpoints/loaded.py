"""Convert linear layers that another library loaded in float8."""

from collections.abc import Callable

import torch
from torch import nn

from float8.checkpoints import schemes
from float8.config import Float8LinearConfig
from float8.convert.choice import Chooser
from float8.convert.conversion import Conversion, Feature
from float8.formats import FLOAT8_MAX, HIGH_PRECISION_DTYPES
from float8.linear import Float8Linear
from float8.linear.source import become


class LoadedInFloat8(Conversion):
    """Converts layers that other libraries loaded in float8, as `FP8Linear`, to `Float8Linear`."""

    has_rules = False  # heads and adapters are in float8 already

    def matches(self, mod: nn.Module) -> bool:
        """Return whether `mod` is a linear layer that another library loaded in float8."""
        return schemes.scheme_of_layer(mod) is not None

    def problem(self, mod: nn.Module, chooser: Chooser) -> str | None:
        """Return why `mod` cannot take the config of `chooser` (None: keep its bytes), or None."""
        return schemes.why_not_taken(mod, schemes.config_for(mod, chooser.config_or_none))

    def prepare(self, mod: nn.Module, chooser: Chooser) -> Callable[[], None]:
        """Return a function that turns `mod`, in place, into a `Float8Linear`.

        If the user's config in `chooser` is None or has `Float8Weights.ONLY` (weights in float8
        only), the weight keeps its float8 bytes, frozen; otherwise it is dequantized, and trains.
        """
        config = schemes.config_for(mod, chooser.config_or_none)
        params = chooser.model.named_parameters()
        dtypes = (p.dtype for name, p in params if not name.endswith(("_scale", "_scale_inv")))
        dtype = next((x for x in dtypes if x in HIGH_PRECISION_DTYPES), torch.bfloat16)  # the first
        make = Float8Linear._float8_made_of
        return lambda: become(mod, make(schemes.as_linear(mod, config, dtype), config))


class Quantizers(Feature):
    """Removes what transformers and compressed-tensors attach to float8 models, once converted."""

    def after_conversion(self, model: nn.Module, config: Float8LinearConfig | None) -> None:
        """Remove transformers' float8 `hf_quantizer` and compressed-tensors' `ct_decompress_hook`.

        With the quantizer, transformers refuses to train `model`, and saves the loaded config; the
        hook replaces all dicts of Parameters in the first forward. Both stay if `model` still has a
        layer of these libraries or float8 Parameter, or if `config` is None (to high precision).
        """
        has_mark = any(schemes.COMPRESSED_MARK in vars(mod) for mod in model.modules())
        if config is None or has_mark or any(p.dtype in FLOAT8_MAX for p in model.parameters()):
            return
        for mod in model.modules():
            if hook := mod.__dict__.pop("ct_decompress_hook", None):
                hook.remove()
            quantizer = vars(mod).get("hf_quantizer")
            method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
            if quantizer and method in (*schemes.FP8_METHODS, schemes.COMPRESSED):
                quantizer.remove_quantization_config(mod)
