"""Keep `nn.TransformerEncoder` off its fast path, which does not call its linear layers.

In evaluation that reads their weights and computes in high precision: another model than the one
that was trained.
"""

from torch import nn

from float8.linear import Float8Layer

_BEFORE = "_float8_before"

# What forward asks for before it takes that path.
_SWITCHES = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def leave_fast_path(module: nn.Module) -> None:
    """Have encoders with converted layers call them in evaluation, too; or no more, without any."""
    for part in module.modules():
        for cls, name, off in _SWITCHES:
            if not isinstance(part, cls):
                continue
            if any(isinstance(layer, Float8Layer) for layer in part.modules()):
                part.__dict__.setdefault(_BEFORE, getattr(part, name))
                setattr(part, name, off)
            elif _BEFORE in part.__dict__:
                setattr(part, name, part.__dict__.pop(_BEFORE))
