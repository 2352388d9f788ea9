"""Find the attention of a model by its modules, on any device, without running it."""

import inspect
import itertools
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Names of attention, of classes and in code of methods; and of classes with heads that are linear.
_ATTENTION, _NOT = r"(?i)atten(tion|d)|attn|sdpa|mha", r"(?i)linear_?att|rwkv|delta|mamba|ssm"


def find_attention(model: nn.Module) -> list[tuple[nn.Module, float, float]]:
    """Return the innermost modules that attend, with the features of all heads, and of one.

    A module has projections of queries, keys and values, and is attention by its class, or by what
    its methods use. Where only heads or a softmax say so, their sizes must fit no other layers.
    """
    found: dict[str, tuple[nn.Module, float, float]] = {}
    for name, module in reversed([*model.named_modules()]):
        names, about = {*_names(module)}, vars(module).items()
        numbers = {key: x for key, x in about if "head" in key and type(x) is int and x > 0}
        attends = any(re.search(_ATTENTION, each) for each in names)
        inner = any(each.startswith(f"{name}." * bool(name)) for each in found)
        if inner or not (attends or numbers or any("softmax" in each for each in names)):
            continue
        other = hasattr(module, "weight") or re.search(_NOT, type(module).__name__)
        shapes = [] if other else [*_shapes(module)]  # PEFT's layers have weights, for one
        turned = [(K, N) for N, K in shapes]  # as of GPT2's Conv1D
        if width := _width(shapes, attends) or _width(turned, attends):
            heads = [x for key, x in numbers.items() if not re.search("dim|size", key)]
            head = numbers.get("head_dim", width / max(heads) if heads else 128)
            if (value := numbers.get("v_head_dim")) and (key := numbers.get("qk_head_dim")):
                width *= (key + value) / value / 2  # queries and keys are wider than values
            found[name] = module, width, head
    return [*found.values()]


def _width(shapes: list[tuple[int, int]], attends: bool) -> float | None:
    """Return the features of all heads, or None if layers [N, K] are not those of attention."""
    for fused, order in ((False, 1), (True, 1), (True, -1)):
        layers = shapes[::order]
        for i, j in itertools.combinations(range(len(layers)), 2):
            (out, width), inner = layers[j], [N for N, _ in layers[i:j]]
            # Keys and values are alike, or one layer makes both.
            apart = width in inner and len({*inner}) < len(inner) > 2
            apart = apart or (len(inner) == 2 and inner[0] == width != inner[1])
            matches = max(inner) > width if fused else apart
            sure = (attends and order > 0) or _shared(sum(inner), width)
            if out == layers[i][1] and matches and sure:
                return width
    if len(shapes) > 2 and shapes[1] == shapes[2]:  # the output is projected elsewhere
        return shapes[0][0] if attends or shapes[0][1] == shapes[1][1] else None
    return shapes[0][1] if len(shapes) == 1 and _shared(*shapes[0]) else None


def _shared(projected: int, width: int) -> bool:
    """Whether queries have the width, and keys and values the rest, which groups of them share."""
    keys, odd = divmod(projected - width, 2)
    return keys > 0 and not odd and width % keys == 0


def _shapes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield [N, K] of the weights of a module and its layers, also of those in lists of it."""
    weights: list[Any] = [x for name, x in module._parameters.items() if "bias" not in name]
    for child in module.children():
        listed = isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        layers = child.children() if listed else [child]
        weights += [getattr(x, "weight", None) for x in layers if not isinstance(x, nn.Embedding)]
    for x in weights:
        if isinstance(x, Tensor) and not is_lazy(x) and x.dim() > 1 and x.shape[2:].numel() == 1:
            yield x.shape[0], x.shape[1]


def _names(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's classes, and those that their methods use."""
    for cls in [each for each in type(module).__mro__ if each not in nn.Module.__mro__]:
        methods = [inspect.unwrap(x) for x in vars(cls).values() if inspect.isfunction(x)]
        codes = [getattr(method, "__code__", None) for method in methods]
        for code in codes:
            codes += [x for x in getattr(code, "co_consts", ()) if isinstance(x, CodeType)]
            yield from getattr(code, "co_names", ())
        yield cls.__name__
