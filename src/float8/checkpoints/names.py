"""Names of a model's tensors: its own, and those under which transformers publishes it.

transformers 5 renames tensors when it loads them, and joins the weights [N, K] of experts to one
Parameter [E, pieces * N, K]; when it saves, it undoes both. Its own tables are used for that.
"""

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.experts import kind_of
from float8.experts.module import RegisteredExperts, lies_transposed
from float8.linear import Float8Linear
from float8.names import plain_name, unwrapped


class SavedTensor:
    """A Parameter or persistent buffer, with all names of it if it is tied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Any = tensor
        self.uses: list[tuple[str, nn.Module, str]] = []  # full name, module, name in that module

    def replace(self, new: Tensor) -> None:
        """Put `new` in the place of this tensor in all modules that have it."""
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.tensor.requires_grad)
        for _, module, attr in self.uses:
            registry: Any = module._parameters if attr in module._parameters else module._buffers
            registry[attr] = new
        self.tensor = new


def saved_tensors(model: nn.Module) -> list[SavedTensor]:
    """Return Parameters and persistent buffers, without the state of delayed scaling."""
    saved: dict[int, SavedTensor] = {}
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        not_saved = module._non_persistent_buffers_set
        for attr, x in {**module._parameters, **module._buffers}.items():
            is_state = attr.startswith(("fp8_amax_", "fp8_scale_"))
            if x is not None and attr not in not_saved and not is_state:
                name = plain_name(f"{prefix}.{attr}" if prefix else attr)
                saved.setdefault(id(x), SavedTensor(x)).uses.append((name, module, attr))
    return [*saved.values()]


Names = list[list[str]]
"""Names [piece][expert] of the weights [N, K] that weights [E, pieces * N, K] of experts join."""


class PublishedNames(NamedTuple):
    """The names in files of a model's tensors, by their names in the model."""

    names: dict[str, str]  # of all tensors, including weights of experts, which a file may join
    experts: dict[str, Names]  # of weights of experts that are published one by one


def published_names(model: nn.Module) -> PublishedNames:
    """Return the names under which transformers publishes the tensors of `model`.

    Tensors that it would not find again under those, and other models, have their own names.
    """
    saved = [(*use, x.tensor) for x in saved_tensors(model) for use in x.uses]
    published = PublishedNames({name: name for name, *_ in saved}, {})
    root: Any = unwrapped(model)
    if not _is_of_transformers(root):
        return published
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming
    except ImportError:
        if any(_are_experts(module, x) for _, module, _, x in saved):
            raise  # early versions of 5 join experts, but have no table of how
        return published  # versions before 5 rename and join nothing
    # Changes of prefixes are for files of other classes.
    mapping = get_model_conversion_mapping(root, add_legacy=False)
    loading = [step for step in mapping if not isinstance(step, PrefixChange)]
    saving = [step.reverse_transform() for step in reversed(loading)]
    converters = [step for step in saving if not isinstance(step, WeightRenaming)]

    def rename(name: str, steps: list[Any]) -> str:
        for step in steps:
            if isinstance(step, WeightRenaming):
                name, _ = step.rename_source_key(name)
        return name

    for name, module, attr, x in saved:
        matches = ((step, *step.rename_source_key(name)) for step in converters)
        converter, key, pattern = next((m for m in matches if m[2]), (None, name, None))
        if converter is None:
            in_float8 = attr == "weight" and isinstance(module, Float8Linear)
            suffixes = ("", "_scale", "_scale_inv") if in_float8 else ("",)
            new = rename(name, saving)
            # Loading must turn the new name, and those of scales, into this name again.
            if all(rename(new + suffix, loading) == name + suffix for suffix in suffixes):
                published.names[name] = new
        elif _are_experts(module, x) and len(converter.source_patterns) == 1:
            pieces = _split_names(copy.deepcopy(converter), name, key, pattern, x.shape[0], root)
            if pieces and x.shape[1] % len(pieces) == 0:
                published.experts[name] = [[rename(x, saving) for x in piece] for piece in pieces]
    counts = Counter(published.names.values())
    published.names.update({x: x for x, new in published.names.items() if counts[new] > 1})
    return published


def replaced_by_transformers(model: nn.Module, method: str) -> str | None:
    """Return a class in `model` that transformers replaces under this `quant_method`, or None.

    The replacement has other Parameters, for which the weights of `model` are not found.
    """
    if not _is_of_transformers(unwrapped(model)):
        return None
    try:
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as REPLACED
    except ImportError:  # versions without it replace no module
        return None
    names = {name for name, entry in REPLACED.items() if method in entry["quantization_methods"]}
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return min(classes & names, default=None)


def _is_of_transformers(root: nn.Module) -> bool:
    """Return whether `root` is a `PreTrainedModel`; does not import transformers."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(root).__mro__)


def _are_experts(module: nn.Module, x: Tensor) -> bool:
    """Return whether `x` is a weight [E, N, K] of experts as transformers joins them."""
    return kind_of(module) is RegisteredExperts and x.dim() == 3 and not lies_transposed(module)


def _split_names(
    converter: Any, name: str, key: str, pattern: str, experts: int, root: Any
) -> Names | None:
    """Return the names of the weights [n, K] into which transformers splits weights [E, N, K].

    The converter runs on a tensor of numbers, which tells expert and rows of each part. None if the
    parts are not whole rows of one expert, but for example transposed.
    """
    rows = 12  # of each expert; divisible by any number of pieces that models have
    numbers = torch.arange(experts * rows * 2, device="cpu").view(experts, rows, 2)  # [E, N, K]
    converter.add_tensor(key, name, pattern, numbers)
    parts: dict[str, Tensor] = converter.convert(key, model=root, config=root.config)
    part_rows = rows * experts // max(len(parts), 1)
    pieces = [[""] * experts for _ in range(len(parts) // experts)]
    for part, x in parts.items():
        expert, row = divmod(int(x.flatten()[0]) // 2, rows)
        is_rows = torch.equal(x, numbers[expert, row : row + part_rows])
        if not is_rows or not part.endswith(".weight"):
            return None
        pieces[row // part_rows][expert] = part
    return pieces if all(all(names) for names in pieces) else None
