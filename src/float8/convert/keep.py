"""Keep chosen layers in high precision, by block or by name, whatever other rules say."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from float8.convert.conversion import conversion_of
from float8.names import plain_name

ModuleFilter = Callable[[nn.Module, str], bool]


class Keep(NamedTuple):
    """Arguments of `keep_high_precision`; accepted as a `module_filter_fn`, but not callable."""

    first: int
    last: int
    names: tuple[str, ...]
    module_filter_fn: ModuleFilter | None

    def reasons(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return the modules to keep, with reasons; raise `ValueError` if a name has no module."""
        reasons: dict[nn.Module, str] = {}
        in_blocks, unused = set[nn.Module](), {*self.names}
        for fqn, mod in model.named_modules(remove_duplicate=False):
            name = plain_name(fqn)
            conversion = conversion_of(mod)
            weights = conversion.parameters(mod) if conversion else ()
            paths = [f".{name}.", *(f".{name}.{weight}." for weight in weights)]
            for word in self.names:
                if any(f".{word}." in path for path in paths):
                    unused.discard(word)
                    reasons[mod] = f"keep_high_precision: named {word!r}"
            blocks = [*mod.children()]
            numbered = isinstance(mod, nn.ModuleDict) and all(key.isdecimal() for key in mod)
            if mod in in_blocks or not blocks or not (isinstance(mod, nn.ModuleList) or numbered):
                continue
            in_blocks.update(mod.modules())
            ends = ("first", blocks[: self.first]), ("last", blocks[::-1][: self.last])
            for argument, kept in ends:
                reason = f"keep_high_precision: {argument}={getattr(self, argument)} of {name}"
                reasons.update((child, reason) for block in kept for child in block.modules())
        if (self.first or self.last) and not in_blocks:
            got = f"keep_high_precision: got first={self.first} and last={self.last} for a model"
            raise ValueError(f"{got} without an nn.ModuleList of blocks; name its layers by names=")
        if unused:
            got = f"keep_high_precision: got names={self.names}, but no module is called"
            raise ValueError(f"{got} {sorted(unused)}; print(model) shows all names")
        return reasons


def keep_high_precision(
    *,
    first: int = 0,
    last: int = 0,
    names: Iterable[str] = (),
    module_filter_fn: ModuleFilter | None = None,
) -> Keep:
    """Return a `module_filter_fn` that keeps some layers and experts in high precision.

    `module_filter_fn`, or without one the rules of `convert_to_float8_training`, decides about all
    others.

    Args:
        first: how many blocks stay at the beginning of each `nn.ModuleList`, or `nn.ModuleDict`
            with numbers as keys. Lists within a block, as of experts, do not count.
        last: how many blocks stay at the end of each.
        names: modules stay if consecutive parts of their name are one of these, as `"down_proj"`,
            `"mlp.down_proj"` or `"layers.3"`; experts also if one of their weights has that name.
        module_filter_fn: a filter for the others; None: the rules without a filter.

    Raises:
        TypeError: `first` or `last` is no int >= 0, or `names` is no list of strings.
        ValueError: a name is empty. The conversion raises it for a model without blocks, and for a
            name that no module has.
    """
    for name, value in (("first", first), ("last", last)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(f"{name}: got {value!r}, expected a number of blocks >= 0")
    is_list = isinstance(names, Iterable) and not isinstance(names, str | Mapping)
    words: Any = tuple(names) if is_list else (None,)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"names: got {names!r}, expected a list of names, as ['down_proj']")
    if not all(words):
        raise ValueError(f"names: got an empty one in {[*words]}, expected names, as ['down_proj']")
    return Keep(first, last, words, module_filter_fn)
