"""Map tensors of a model, by name, to the parts and names under which transformers saves them."""

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.convert.conversion import conversion_of
from float8.linear import Float8Linear
from float8.names import plain_name, unwrapped
from float8.tensor import Float8Tensor, dequantise


class SavedTensor:
    """Holds a Parameter or persistent buffer, and its uses, several if tied: modules and names."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Any = tensor
        self.uses: list[tuple[str, nn.Module, str]] = []  # full name, module, name in that module

    def replace(self, new: Tensor) -> None:
        """Replace the tensor by `new` in all modules that have it, as a Parameter if it was one."""
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.tensor.requires_grad)
        for _, module, attr in self.uses:
            registry: Any = module._parameters if attr in module._parameters else module._buffers
            registry[attr] = new
        self.tensor = new


def saved_tensors(model: nn.Module) -> list[SavedTensor]:
    """Return each Parameter and persistent buffer of `model` once, but no delayed-scaling state."""
    saved: dict[int, SavedTensor] = {}  # id -> tensor, so that a tied tensor is in it once
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        for attr, x in {**module._parameters, **module._buffers}.items():
            is_state = attr.startswith(("fp8_amax_", "fp8_scale_"))
            if x is not None and attr not in module._non_persistent_buffers_set and not is_state:
                name = plain_name(f"{prefix}.{attr}" if prefix else attr)
                saved.setdefault(id(x), SavedTensor(x)).uses.append((name, module, attr))
    return [*saved.values()]


class Part(NamedTuple):
    """Selects the part of a tensor that files store under one name.

    `expert` None selects the whole tensor. A number selects one weight [N, K] of that expert from a
    tensor [E, pieces * N, K]: the rows `piece * N` to `piece * N + N`.
    """

    expert: int | None = None
    piece: int = 0
    pieces: int = 1  # 2 for the gate projection joined with the up projection

    def shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of shape `full_shape`."""
        return full_shape if self.expert is None else (full_shape[1] // self.pieces, full_shape[2])

    def of(self, x: Tensor) -> Tensor:
        """Return this part of `x`: a view, or dequantized if one scale of `x` covers two parts."""
        if self.expert is None:
            return x
        N, _ = self.shape(x.shape)
        begin, end = N * self.piece, N * self.piece + N
        if not isinstance(x, Float8Tensor):
            return x[self.expert, begin:end]
        height: Any = x._granularity.height  # rows per scale; experts never have one scale (None)
        if self.pieces > 1 and N % height:  # one scale covers rows of two pieces
            expert_weight: Any = x[self.expert]  # [pieces * N, K]
            return dequantise(expert_weight)[begin:end]
        scale = x._scale[self.expert, begin // height : -(-end // height)]  # -(-a // b) rounds up
        return Float8Tensor(x._data[self.expert, begin:end], scale, x.dtype, x._granularity)


WHOLE = Part()
Parts = dict[str, Part]
"""Name in files -> part, for one tensor of a model."""


def published_parts(model: nn.Module) -> dict[str, Parts]:
    """Return {name in `model`: {name in files: part}} for each tensor of `saved_tensors(model)`.

    A tensor that transformers 5 renames in files has its new name. A Parameter [E, pieces * N, K]
    of experts that it splits has a part [N, K] for each expert and piece (such as the gate and the
    up projection). Tensors that it converts otherwise or could not load again, and all others, have
    one part: all of it, under the name in `model`. Raises `ImportError` if `model` has experts, and
    transformers is an early release of version 5, which does not tell how it saves them.
    """
    saved = [(*use, x.tensor) for x in saved_tensors(model) for use in x.uses]  # one per name
    published = {name: {name: WHOLE} for name, *_ in saved}
    root: Any = unwrapped(model)
    if not _is_of_transformers(root):
        return published
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming
    except ImportError:
        if any(_is_experts_weight(module, attr) for _, module, attr, _ in saved):
            raise  # early releases of version 5 join experts, but have no tables
        return published  # versions before 5 rename and join nothing
    mapping = get_model_conversion_mapping(root, add_legacy=False)
    # Leave out `PrefixChange`, which is for checkpoints of other model classes.
    loading = [step for step in mapping if not isinstance(step, PrefixChange)]
    saving = [step.reverse_transform() for step in reversed(loading)]
    converters = [step for step in saving if not isinstance(step, WeightRenaming)]

    def rename(name: str, steps: list[Any]) -> str:
        for step in steps:
            if isinstance(step, WeightRenaming):
                name, _ = step.rename_source_key(name)
        return name

    for name, module, attr, x in saved:
        # `rename_source_key` returns (new name, pattern that matches `name`, or None).
        converter = next((step for step in converters if step.rename_source_key(name)[1]), None)
        if converter is None:  # transformers saves the whole tensor, perhaps renamed
            in_float8 = attr == "weight" and isinstance(module, Float8Linear)
            suffixes = ("", "_scale", "_scale_inv") if in_float8 else ("",)  # of scales in files
            new = rename(name, saving)
            # Take the new names, of scales as well, only if loading turns them into the old ones.
            if all(rename(new + suffix, loading) == name + suffix for suffix in suffixes):
                published[name] = {new: WHOLE}
        elif _is_experts_weight(module, attr) and len(converter.source_patterns) == 1:
            parts = _split(copy.deepcopy(converter), name, x.shape, root)  # {} if not possible
            renamed = {rename(new, saving): part for new, part in parts.items()}
            if parts and len(renamed) == len(parts):  # no two have the same new name
                published[name] = renamed
    # Whole tensors that have the same new name as others get their old ones back. Experts do not:
    # joined again, they would stay in high precision. Saving raises an error if names still repeat.
    counts = Counter(new for parts in published.values() for new in parts)
    for name, parts in published.items():
        if WHOLE in parts.values() and any(counts[new] > 1 for new in parts):
            published[name] = {name: WHOLE}
    return published


def replaced_by_transformers(model: nn.Module, method: str) -> str | None:
    """Return the name of a class in `model` whose weights transformers could not load, or None.

    When transformers loads a checkpoint with the `quant_method` `method`, it replaces modules of
    some classes by modules of its own, whose weights have other names than files of `model` have.
    """
    if not _is_of_transformers(unwrapped(model)):
        return None
    try:
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as REPLACED
    except ImportError:  # versions without it replace no module
        return None
    replaced = {name for name, entry in REPLACED.items() if method in entry["quantization_methods"]}
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return min(classes & replaced, default=None)  # always the same one of several


def _is_of_transformers(root: nn.Module) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(root).__mro__)


def _is_experts_weight(module: nn.Module, attr: str) -> bool:
    """Return whether Parameter `attr` of `module` has experts' weights as [E, N, K] (K inputs)."""
    conversion, weight = conversion_of(module), module._parameters.get(attr)
    has_experts = weight is not None and weight.dim() == 3
    return has_experts and conversion is not None and attr in conversion.stored_by_rows(module)


def _split(converter: Any, name: str, shape: tuple[int, ...], model: Any) -> Parts:
    """Return {name in files: part} for the weights into which transformers splits a Parameter.

    Parameter `name` of `model` has `shape` [E, pieces * N, K]; a part is a piece [N, K] of one
    expert. transformers' `converter` for `name` is run on a small tensor of the numbers 0, 1, ...,
    which show the rows that each result has. Parts are sorted by piece, then expert. Returns {}
    unless each result is such a piece, named `*.weight`, and no two are the same.
    """
    rows = 12  # of each expert in the small tensor; divisible by 1, 2, 3, 4, 6 and 12 pieces
    numbers = torch.arange(shape[0] * rows * 2, device="cpu").view(-1, rows, 2)  # [E, rows, 2]
    first_name, pattern = converter.rename_source_key(name)  # the name of the first part
    converter.add_tensor(first_name, name, pattern, numbers)
    tensors: dict[str, Tensor] = converter.convert(first_name, model=model, config=model.config)
    pieces, rest = divmod(len(tensors), shape[0])
    if rest or not pieces or shape[1] % pieces:
        return {}
    parts = Parts()
    for new, x in tensors.items():
        first_row = int(x.flatten()[0]) // 2  # among the rows of all experts, of 2 numbers each
        expert, row = divmod(first_row, rows)
        parts[new] = part = Part(expert, row * pieces // rows, pieces)
        if not new.endswith(".weight") or not torch.equal(x, part.of(numbers)):
            return {}
    if len({*parts.values()}) < len(parts):  # two names have the same part, so another has none
        return {}
    return dict(sorted(parts.items(), key=lambda item: (item[1].piece, item[1].expert)))
