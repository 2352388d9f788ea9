"""Keep chosen layers in high precision, by block or by name, whatever other rules say."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from float8.convert.conversion import conversion_of
from float8.names import plain_name

ModuleFilter = Callable[[nn.Module, str], bool]


class Keep(NamedTuple):
    """Holds the arguments of `keep_high_precision`, for `convert_to_float8_training` to apply."""

    first: int
    last: int
    names: tuple[str, ...]
    module_filter_fn: ModuleFilter | None

    def reasons(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return {excluded module: why}; raise `ValueError` if `model` lacks names or blocks."""
        reasons: dict[nn.Module, str] = {}
        in_blocks, unused = set[nn.Module](), {*self.names}
        for fqn, mod in model.named_modules(remove_duplicate=False):  # shared modules by each name
            name = plain_name(fqn)
            conversion = conversion_of(mod)
            weights = conversion.parameters(mod) if conversion else ()
            paths = [f".{name}.", *(f".{name}.{weight}." for weight in weights)]  # whole words
            for word in self.names:
                if any(f".{word}." in path for path in paths):
                    unused.discard(word)
                    reasons[mod] = f"keep_high_precision: named {word!r}"
            is_numbered = isinstance(mod, nn.ModuleDict) and all(key.isdecimal() for key in mod)
            is_list = isinstance(mod, nn.ModuleList) or is_numbered
            blocks = [*mod.children()] if is_list and mod not in in_blocks else []
            if blocks:  # a list inside a block is ignored
                in_blocks.update(mod.modules())
            ends = ("first", blocks[: self.first]), ("last", blocks[::-1][: self.last])
            for argument, kept in ends:  # not blocks[-last:], which is all of them for last=0
                reason = f"keep_high_precision: {argument}={getattr(self, argument)} of {name}"
                reasons |= {child: reason for block in kept for child in block.modules()}
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
    """Return what to pass to `convert_to_float8_training` as `module_filter_fn` to exclude layers.

    Args:
        first: number of modules to exclude at the beginning of each list of blocks: `nn.ModuleList`
            or `nn.ModuleDict` with numbers as keys. Lists inside a block do not count.
        last: number of modules to exclude at the end of each list of blocks.
        names: exclude modules whose full name has one of these as whole words: `"down_proj"`,
            `"mlp.down_proj"` or `"layers.3"`; and experts with a weight of such a name.
        module_filter_fn: decides on the other linear layers and experts, as it does if given to
            `convert_to_float8_training`. None: the rules there, by name and speed, decide.

    Raises:
        TypeError: `first` or `last` is no int >= 0, or `names` is no list of strings.
        ValueError: a name is empty. `convert_to_float8_training` raises one for a name that no
            module has, and if `first` or `last` is not 0 for a model without blocks.
    """
    for name, value in (("first", first), ("last", last)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise TypeError(f"{name}: got {value!r}, expected a number of blocks >= 0")
    is_list = isinstance(names, Iterable) and not isinstance(names, str | Mapping)
    words: Any = tuple(names) if is_list else (None,)  # raises the next error
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"names: got {names!r}, expected a list of names, as ['down_proj']")
    if not all(words):
        raise ValueError(f"names: got an empty one in {[*words]}, expected names, as ['down_proj']")
    return Keep(first, last, words, module_filter_fn)
