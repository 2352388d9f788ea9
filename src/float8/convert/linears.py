"""The conversion of `nn.Linear` to `Float8Linear`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from float8.convert.choice import Chooser, reason_by_name
from float8.convert.conversion import Conversion
from float8.convert.speed import why_fsdp_waits, why_slower
from float8.linear import Float8Linear, unsupported
from float8.linear.source import become

ROUTER = 16
"""Without a filter, layers of fewer outputs, as routers, are skipped: GEMMs compute at least 16."""


class Linears(Conversion):
    """Converts `nn.Linear` layers and subclasses that compute the same to `Float8Linear`."""

    def matches(self, mod: nn.Module) -> bool:
        """Return whether `mod` is an `nn.Linear`."""
        return isinstance(mod, nn.Linear)

    def modules_to_keep(self, chooser: Chooser) -> dict[nn.Module, str]:
        """Return {layer: why to skip it}: all if float8 gathers have GPUs wait for CPUs; or {}."""
        layers = dict[Any, str]()  # layer that could be converted: its GPU
        for fqn, mod in chooser.model.named_modules() if self._judged_together(chooser) else ():
            taken = chooser.conversions[mod] is self and not reason_by_name(fqn, head=chooser.head)
            if taken and mod.out_features >= ROUTER and not self.problem(mod, chooser):
                layers[mod] = chooser.gpu_of(mod) or ""
        reason = why_fsdp_waits(layers, chooser.tokens)
        return dict.fromkeys(layers, reason) if reason else {}

    def _judged_together(self, chooser: Chooser) -> bool:
        """Return whether GPU waits for the CPU are judged for all layers together, not for each."""
        gather = chooser.config.enable_fsdp_float8_all_gather and not chooser.cuda_graphs
        return gather and chooser.kinds == {self}  # no other kind, such as experts

    def problem(self, mod: nn.Module, chooser: Chooser) -> str | None:
        """Return why `mod` cannot be a `Float8Linear` with `chooser.config`, or None if it can."""
        return unsupported(mod, chooser.config, chooser.classes)

    def why_slower(self, mod: Any, fqn: str, chooser: Chooser) -> str | None:
        """Return why to skip `mod`: fewer than 16 outputs, or no gain in speed; or None."""
        if not chooser.config.float8_gemms:
            return None
        if mod.out_features < ROUTER:
            few = f"N={mod.out_features} is less than {ROUTER}, as a router's"
            return f"{few}: converted only if a module_filter_fn takes it"
        gpu, step = chooser.gpu_of(mod), (chooser.tokens, chooser.linear_ranks)
        waits = not chooser.cuda_graphs and not self._judged_together(chooser)
        return why_slower(mod, chooser.config, *step, gpu, waits=waits) if gpu else None

    def prepare(self, mod: nn.Module, chooser: Chooser) -> Callable[[], None]:
        """Make a `Float8Linear` from `mod`; return a function that turns `mod` into it in place."""
        new = Float8Linear._float8_made_of(mod, chooser.config, finish=False)

        def convert() -> None:
            # Not in `prepare`, which is called for all layers before one changes: under `ONLY`, all
            # weights would be in memory in float8 beside those in high precision.
            new._float8_finish()
            become(mod, new)

        return convert
