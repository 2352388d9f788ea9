"""The names of the tensors of a model: its own, and those under which models are published.

transformers 5 renames tensors as it loads them, and joins the weights [N, K] of experts to one
Parameter [E, pieces * N, K]; it undoes that when it saves. So it is asked: no list of models here.
"""

import copy
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from float8.experts import kind_of
from float8.experts.module import RegisteredExperts, lies_transposed
from float8.linear import Float8Linear


def plain_name(name: str) -> str:
    """Return the name of a module or tensor without what wrappers within a model add to it."""
    # Of torch.compile, of activation checkpointing, of FSDP1.
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        name = f"{name}.".replace(f"{wrapper}.", "")[:-1]
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile or DDP wraps, or itself."""
    is_ddp = isinstance(model, DistributedDataParallel)
    inner = model._modules.get("module" if is_ddp else "_orig_mod")
    return model if inner is None else unwrapped(inner)


class SavedTensor:
    """A Parameter or buffer that is saved: under one name, or if it is tied under several."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Any = tensor
        # Each name of it, with the module that has it, and its name there.
        self.uses: list[tuple[str, nn.Module, str]] = []

    def replace(self, new: Tensor) -> None:
        """Give all modules that have this tensor another one."""
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.tensor.requires_grad)
        for _, module, attr in self.uses:
            registry: Any = module._parameters if attr in module._parameters else module._buffers
            registry[attr] = new
        self.tensor = new


def saved_tensors(model: nn.Module) -> list[SavedTensor]:
    """Return the Parameters and buffers that are saved, without the state of delayed scaling."""
    saved: dict[int, SavedTensor] = {}
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        for attr, x in {**module._parameters, **module._buffers}.items():
            is_state = attr.startswith(("fp8_amax_", "fp8_scale_"))
            if x is not None and attr not in passing and not is_state:
                name = plain_name(f"{prefix}.{attr}" if prefix else attr)
                saved.setdefault(id(x), SavedTensor(x)).uses.append((name, module, attr))
    return [*saved.values()]


Names = list[list[str]]
"""For each piece of the rows of weights [E, pieces * N, K]: names of all experts, in order."""


class PublishedNames(NamedTuple):
    """The names that the tensors of a model have in files, by their own names."""

    names: dict[str, str]  # of all tensors, experts too: these need not come one by one
    experts: dict[str, Names]  # of those that are published one by one, as weights [N, K]


def published_names(model: nn.Module) -> PublishedNames:
    """Return the names under which the tensors of a model are published.

    Of a model that is not transformers', and where a name would be lost, they are its own.
    """
    saved = [(*use, each.tensor) for each in saved_tensors(model) for use in each.uses]
    found = PublishedNames({name: name for name, *_ in saved}, {})
    root: Any = unwrapped(model)
    if not _is_of_transformers(root):
        return found
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming
    except ImportError:
        if any(_are_experts(module, x) for _, module, _, x in saved):
            raise  # early versions of 5 join experts, and do not tell how
        return found  # older than 5, it has models as they are published
    # Those that add or remove a prefix are for files of other classes.
    mapping = get_model_conversion_mapping(root, add_legacy=False)
    loading = [each for each in mapping if not isinstance(each, PrefixChange)]
    saving = [each.reverse_transform() for each in reversed(loading)]
    converters = [each for each in saving if not isinstance(each, WeightRenaming)]

    def renamed(name: str, by: list[Any]) -> str:
        for each in by:
            if isinstance(each, WeightRenaming):
                name, _ = each.rename_source_key(name)
        return name

    for name, module, attr, x in saved:
        matches = ((each, *each.rename_source_key(name)) for each in converters)
        converter, first, pattern = next((m for m in matches if m[2]), (None, name, None))
        if converter is None:
            in_float8 = attr == "weight" and isinstance(module, Float8Linear)
            ends = ("", "_scale", "_scale_inv") if in_float8 else ("",)
            new = renamed(name, saving)
            # Only if that, and the names of scales beside it, are read as this one.
            if all(renamed(new + end, loading) == name + end for end in ends):
                found.names[name] = new
        elif _are_experts(module, x) and len(converter.source_patterns) == 1:
            pieces = _pieces_of(copy.deepcopy(converter), name, first, pattern, x.shape[0], root)
            if pieces and x.shape[1] % len(pieces) == 0:
                found.experts[name] = [[renamed(x, saving) for x in piece] for piece in pieces]
    often = Counter(found.names.values())
    found.names.update({name: name for name, new in found.names.items() if often[new] > 1})
    return found


def replaced_by_transformers(model: nn.Module, method: str) -> str | None:
    """Return the class of a module that transformers replaces under this `quant_method`, or None.

    What it puts in the place of that module has other Parameters, and finds none of its weights.
    """
    if not _is_of_transformers(unwrapped(model)):
        return None
    try:
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as REPLACED
    except ImportError:  # another version, which replaces none
        return None
    names = {name for name, entry in REPLACED.items() if method in entry["quantization_methods"]}
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return min(classes & names, default=None)


def _is_of_transformers(root: nn.Module) -> bool:
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(root).__mro__)


def _are_experts(module: nn.Module, x: Tensor) -> bool:
    return kind_of(module) is RegisteredExperts and x.dim() == 3 and not lies_transposed(module)


def _pieces_of(
    converter: Any, name: str, first: str, pattern: str, experts: int, root: Any
) -> Names | None:
    """Return how transformers takes weights [E, N, K] apart, told by what it makes of numbers.

    None: into no weights [n, K], such as transposed or mixed ones.
    """
    all_rows = 12  # of each expert; any number of pieces that models have divides them
    numbers = torch.arange(experts * all_rows * 2, device="cpu").view(experts, all_rows, 2)
    converter.add_tensor(first, name, pattern, numbers)
    made: dict[str, Tensor] = converter.convert(first, model=root, config=root.config)
    rows = all_rows * experts // max(len(made), 1)
    pieces = [[""] * experts for _ in range(len(made) // experts)]
    for key, x in made.items():
        expert, row = divmod(int(x.flatten()[0]) // 2, all_rows)
        if not torch.equal(x, numbers[expert, row : row + rows]) or not key.endswith(".weight"):
            return None
        pieces[row // rows][expert] = key
    return pieces if all(all(names) for names in pieces) else None
