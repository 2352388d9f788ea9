"""Choose what is converted: what a filter takes, or what float8 makes no slower."""

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from float8.checkpoints.names import plain_name
from float8.checkpoints.schemes import config_for, strategy_of, why_not_taken
from float8.config import ConfigOrRecipe, as_config
from float8.convert.keep import Keep, ModuleFilter
from float8.convert.speed import MEMORY, NARROW, judged_as, why_experts_slower, why_slower
from float8.experts import Float8Experts, kind_of, unsupported_experts, weights_of
from float8.formats import BLACKWELL, lacks_float8_gemm
from float8.linear import Float8Linear, unsupported

DEFAULT_TOKENS = 8192

ROUTER = 16
"""Layers with fewer features out are left to a `module_filter_fn`: each output decides much, and a
float8 GEMM computes 16 at least."""

KEPT = "_float8_choice"
"""The attribute in which a layer, or a module of experts, keeps its last `Choice` for the report: a
plain tuple, so that a model in which nothing is converted can be loaded without this library."""


class Choice(NamedTuple):
    """The decision about one layer, or one module of experts."""

    reason: str | None = None
    """Why it stays as it is; None: it changes, or no conversion has seen it."""
    chosen_for: str | None = None
    """For which GPU it was judged, and by what; None: it was not."""

    @property
    def by_filter(self) -> bool:
        """Whether a `module_filter_fn` left it."""
        return (self.reason or "").startswith("module_filter_fn ")


class Chooser:
    """The arguments of a conversion, and what they decide; the constructor raises as that does."""

    def __init__(
        self,
        model: nn.Module,
        config: ConfigOrRecipe | None,
        module_filter_fn: ModuleFilter | Keep | None = None,
        tokens_per_step: int = DEFAULT_TOKENS,
        gpu: str | None = None,
        cuda_graphs: bool = False,
        linear_classes: Collection[type[nn.Linear]] = (),
        head: bool = False,
    ) -> None:
        self.kept: dict[nn.Module, str] = {}
        if isinstance(module_filter_fn, Keep):
            self.kept = module_filter_fn.reasons(model)
            module_filter_fn = module_filter_fn.module_filter_fn
        self.model, self.takes, self.tokens = model, module_filter_fn, tokens_per_step
        self.config = as_config(config)
        self.given = None if config is None else self.config
        gathers = self.config.enable_fsdp_float8_all_gather and dist.is_available()
        ranks = dist.get_world_size() if gathers and dist.is_initialized() else 1
        self.ranks = ranks, ranks  # that share the casts of a weight: of a layer, of experts
        self.gpu: str | None = short_name(gpu)
        self.cuda_graphs, self.head = cuda_graphs, head
        self.classes = tuple(linear_classes) if isinstance(linear_classes, Iterable) else (None,)
        self.experts = {mod for mod in model.modules() if kind_of(mod) is not None}
        if self.takes is not None and not callable(self.takes):
            raise TypeError(
                f"module_filter_fn: got {type(self.takes).__name__}, expected a function "
                f"(module, name) -> bool, or None"
            )
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool):
            raise TypeError(f"tokens_per_step: got {self.tokens!r}, expected an int")
        if self.tokens < 1:
            raise ValueError(f"tokens_per_step: got {self.tokens}, expected at least 1 per forward")
        for name, flag in (("cuda_graphs", cuda_graphs), ("head", head)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: got {flag!r}, expected True or False")
        if gpu is not None and self.gpu not in tuple(MEMORY):
            names = f"{', '.join(map(repr, MEMORY))}; leave it out for the GPU here"
            raise ValueError(f"gpu: got {gpu!r}, expected one that is modelled, of {names}")
        if self.config.only_on == BLACKWELL and not self.config.emulate:
            lacks = [lacks_float8_gemm(x.device, only=BLACKWELL) for x in model.parameters()]
            lacks += [gpu and f"{self.gpu} multiplies no 8-bit exponents"]
            if reason := next(filter(None, lacks), None):
                do = "set emulate=True to compute in high precision on the same values"
                raise ValueError(f"config: got {self.config.short_str()}, but {reason}; {do}")
        if self.takes is not None and (gpu is not None or cuda_graphs or head):
            got = f"a module_filter_fn, which decides alone, with {gpu=}, {cuda_graphs=}, {head=}"
            raise ValueError(f"got {got}; expected none of these beside it")
        if not all(isinstance(cls, type) and issubclass(cls, nn.Linear) for cls in self.classes):
            expected = "a list of subclasses of nn.Linear, as [MyLinear]"
            raise TypeError(f"linear_classes: got {linear_classes!r}, expected {expected}")

    def choose(self, mod: nn.Module, fqn: str) -> Choice | None:
        """Decide about a module of the model; None: it has no weights that could be in float8."""
        if isinstance(mod, Float8Linear | Float8Experts):
            same = mod._float8_config == self.config
            return self._decide(mod, fqn, "converted already" if same else None)
        if mod in self.experts:
            problem = unsupported_experts(mod, self.config)
            return self._decide(mod, fqn, problem, self._why_no_experts)
        if strategy_of(mod) is not None:
            return self._decide(mod, fqn, why_not_taken(mod, config_for(mod, self.given)))
        if isinstance(mod, nn.Linear):
            if self.takes is None and self.config.float8_gemms and (left := self._left(mod, fqn)):
                return self._decide(mod, fqn, None, lambda mod, fqn: left)
            problem = unsupported(mod, self.config, self.classes)
            return self._decide(mod, fqn, problem, self._why_no_linear)
        return None

    def _decide(self, mod: Any, fqn: str, problem: str | None, judge: Any = None) -> Choice:
        """Decide by `problem`, of which no filter need know; by the filter; by `judge` without."""
        problem = problem or self.kept.get(mod)
        if self.takes is None:
            by = None if isinstance(mod, Float8Linear | Float8Experts) else self._chosen_for(mod)
            return Choice(problem or (judge and judge(mod, fqn)), chosen_for=by)
        if problem is not None:
            return Choice(problem)
        try:
            taken = self.takes(mod, fqn)
        except AttributeError as error:  # as of `in_features`, which experts have not
            if isinstance(mod, nn.Linear):
                raise
            return Choice(f"module_filter_fn raised an AttributeError: {error}")
        return Choice(None if taken else f"module_filter_fn returned {taken!r}")

    def _why_no_experts(self, module: Any, fqn: str) -> str | None:
        gpu = self._gpu(module)
        if (reason := left_out(fqn)) or gpu is None:
            return reason
        parent = self.model.get_submodule(fqn.rpartition(".")[0])
        return why_experts_slower(module, parent, self.config, self.tokens, self.ranks[1], gpu)

    def _left(self, layer: Any, fqn: str) -> str | None:
        router = "a router: converted only if a module_filter_fn takes it"
        return router if is_router(layer, fqn, self.experts) else left_out(fqn, self.head)

    def _why_no_linear(self, layer: Any, fqn: str) -> str | None:
        if not self.config.float8_gemms:
            return None
        if layer.out_features < ROUTER:
            few = f"N={layer.out_features} is less than {ROUTER}, as a router's"
            return f"{few}: converted only if a module_filter_fn takes it"
        gpu, of = self._gpu(layer), (self.config, self.tokens, self.ranks[0])
        return gpu and why_slower(layer, *of, gpu, self.cuda_graphs)

    def _gpu(self, mod: nn.Module) -> str | None:
        """Return the GPU that `mod` is judged for; None without one, and where it is emulated."""
        if self.gpu is None and not self.config.emulate:
            return gpu_for(next((x.device for x in mod.parameters()), torch.device("cpu")))
        return self.gpu

    def _chosen_for(self, mod: nn.Module) -> str | None:
        """Say for which GPU `mod` is judged, and by what; None: speed is not asked for."""
        if not self.config.float8_gemms or (self.config.emulate and self.gpu is None):
            return None
        gpu = self._gpu(mod)
        if gpu in MEMORY:
            said = f'gpu="{gpu}"' if self.gpu else "the GPU here"
            at = f"modelled as {judged_as(self.config)} at {self.tokens} tokens per forward"
            at += f", casts shared by {self.ranks[0]} ranks" * (self.ranks[0] > 1)
            return f"chosen for {gpu} ({said}): {at}{', as CUDA graphs' * self.cuda_graphs}"
        if gpu is None:
            names = " or ".join(f'gpu="{name}"' for name in MEMORY)
            return f"no GPU here: layers of any size are converted; {names} leaves those that lose"
        narrow = f"layers narrower than {NARROW} stay; float8 plan measures the others"
        return f"{gpu} is not modelled: {narrow}"


def all_linears(mod: nn.Module, fqn: str) -> bool:
    """Take every layer, however slow float8 makes it: a `module_filter_fn`."""
    return True


def is_router(linear: Any, fqn: str, experts: Iterable[nn.Module]) -> bool:
    """Whether a linear layer chooses between the experts of its model, by its name and outputs."""
    named = any("router" in word or "gate" in word for word in fqn.split(".")[-2:])
    outputs = getattr(linear, "out_features", None)
    return named and any(x.experts == outputs for each in experts for x in weights_of(each)[:1])


def left_out(fqn: str, head: bool = False) -> str | None:
    """Say why a layer of this name is left to a `module_filter_fn`, or return None.

    The head, unless `head` is True: the loss depends on its logits directly, and it is a small part
    of a large model. And what PEFT trains: low-rank adapters, too small to gain, and copies of
    layers, so that no state of delayed scaling gets into its checkpoints.
    """
    wrappers = "module", "model", "base_model"  # the names of a model in what wraps it
    words = [word for word in plain_name(fqn).split(".") if word not in wrappers]
    if not head and ("lm_head" in words or words == ["output"]):
        return "the head: converted only with head=True, or if a module_filter_fn takes it"
    if any(word.startswith("lora_") or word == "modules_to_save" for word in words):
        return "of an adapter: converted only if a module_filter_fn takes it"
    return None


def gpu_for(device: torch.device) -> str | None:
    """Return the GPU that weights on `device` are for, by its `short_name`; None: there is none.

    Weights on the CPU or the meta device are taken to be on their way to the current GPU.
    """
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device if device.type == "cuda" else None)
    return str(short_name(name))


def short_name(gpu: Any) -> Any:
    """Return the name in `MEMORY` of a GPU, however long its own is; without one, that."""
    names = re.findall(rf"({'|'.join(MEMORY)})(?!\w)", gpu.upper() if isinstance(gpu, str) else "")
    return names[0] if len({*names}) == 1 else gpu
