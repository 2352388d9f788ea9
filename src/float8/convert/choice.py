"""Decide which modules a conversion changes: by the user's filter, or by names and speed."""

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from float8.config import ConfigOrRecipe, as_config
from float8.convert.conversion import FEATURES, conversion_of
from float8.convert.keep import Keep, ModuleFilter
from float8.convert.speed import MODELLED, NARROW, judged_as
from float8.formats import BLACKWELL, lacks_float8_gemm
from float8.linear import Float8Module
from float8.names import plain_name

DEFAULT_TOKENS = 8192

CHOICE = "_float8_choice"
"""The attribute with a module's last `Choice`, a plain tuple: unpickling it needs no float8."""


class Choice(NamedTuple):
    """Why a module is not converted (None: it is), and for which GPU that was decided, as text."""

    skip_reason: str | None = None  # why the module is not converted; None: it is
    chosen_for: str | None = None  # for the report: the GPU, or that there is none

    @property
    def by_filter(self) -> bool:
        """Whether the module is skipped because the user's `module_filter_fn` excluded it."""
        return (self.skip_reason or "").startswith("module_filter_fn ")


class Chooser:
    """Checks the arguments of `convert_to_float8_training`; `choose` decides what to convert."""

    def __init__(
        self,
        model: nn.Module,
        config: ConfigOrRecipe | None,  # None: "tensorwise"
        module_filter_fn: ModuleFilter | Keep | None = None,  # None: by names and speed
        tokens_per_step: int = DEFAULT_TOKENS,  # rows of a layer's input, to model its speed
        gpu: str | None = None,  # whose speed decides; None: the GPU of the weights
        cuda_graphs: bool = False,  # True: never skip a layer as one that waits for the CPU
        linear_classes: Collection[type[nn.Linear]] = (),  # override forward, compute the same
        head: bool = False,  # whether the output head may be converted, too
    ) -> None:
        self.keep_reasons: dict[nn.Module, str] = {}
        if isinstance(module_filter_fn, Keep):
            self.keep_reasons = module_filter_fn.reasons(model)
            module_filter_fn = module_filter_fn.module_filter_fn
        self.model, self.tokens = model, tokens_per_step
        self.filter: Any = module_filter_fn
        self.config = as_config(config)
        self.config_or_none = None if config is None else self.config
        self.linear_ranks = max(feature.sharing_ranks(self.config) for feature in FEATURES)
        self.expert_ranks = self.linear_ranks  # `float8 plan` sets fewer under expert parallel
        self.gpu, self.cuda_graphs, self.head = short_name(gpu), cuda_graphs, head
        classes: Any = linear_classes if isinstance(linear_classes, Iterable) else (None,)
        self.classes = tuple(classes)  # `_check` raises a TypeError for None
        self.conversions = {mod: conversion_of(mod) for mod in model.modules()}
        self._check(gpu, cuda_graphs, linear_classes, head)  # also reads attributes set above
        self.kinds = {conversion for conversion in self.conversions.values() if conversion}
        self.kept_by_model: dict[nn.Module, str] = {}
        for conversion in self.kinds if self.filter is None else ():
            self.kept_by_model |= conversion.modules_to_keep(self)

    def _check(self, gpu: Any, cuda_graphs: Any, linear_classes: Any, head: Any) -> None:
        """Raise `TypeError` or `ValueError` if an argument, given here or in `self`, is invalid."""
        if self.filter is not None and not callable(self.filter):
            got = f"module_filter_fn: got {type(self.filter).__name__}"
            raise TypeError(f"{got}, expected a function (module, name) -> bool, or None")
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool):
            raise TypeError(f"tokens_per_step: got {self.tokens!r}, expected an int")
        if self.tokens < 1:
            raise ValueError(f"tokens_per_step: got {self.tokens}, expected at least 1 per forward")
        for name, flag in (("cuda_graphs", cuda_graphs), ("head", head)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: got {flag!r}, expected True or False")
        if gpu is not None and self.gpu not in MODELLED:
            names = f"{', '.join(map(repr, MODELLED))}; leave it out for the GPU here"
            raise ValueError(f"gpu: got {gpu!r}, expected one that is modelled, of {names}")
        if self.config.only_on == BLACKWELL and not self.config.emulate:  # MXFP8
            reasons = [lacks_float8_gemm(x.device, only=BLACKWELL) for x in self.model.parameters()]
            reasons += [f"{self.gpu} multiplies no 8-bit exponents"] if gpu else []  # a Hopper GPU
            if reason := next(filter(None, reasons), None):
                fix = "set emulate=True to compute in high precision on the same values"
                raise ValueError(f"config: got {self.config.short_str()}, but {reason}; {fix}")
        if self.filter is not None and (gpu is not None or cuda_graphs or head):
            got = f"a module_filter_fn, which decides alone, with {gpu=}, {cuda_graphs=}, {head=}"
            raise ValueError(f"got {got}; expected none of these beside it")
        if not all(isinstance(cls, type) and issubclass(cls, nn.Linear) for cls in self.classes):
            expected = "a list of subclasses of nn.Linear, as [MyLinear]"
            raise TypeError(f"linear_classes: got {linear_classes!r}, expected {expected}")

    def choose(self, mod: nn.Module, fqn: str) -> Choice | None:
        """Return whether and why to skip `mod`; None if it is no linear layer and no experts."""
        conversion = self.conversions[mod] if mod in self.conversions else conversion_of(mod)
        if conversion is None:
            return None
        is_converted, problem, rule_reason = isinstance(mod, Float8Module), None, None
        if is_converted:  # `_prepare` raises an error if `mod` cannot change to `config`
            problem = "converted already" if mod._float8_config == self.config else None
        else:
            if self.filter is None and self.config.float8_gemms and conversion.has_rules:
                rule_reason = self.kept_by_model.get(mod) or reason_by_name(fqn, head=self.head)
            if rule_reason is None:  # else `mod` is skipped anyway
                problem = conversion.problem(mod, self)
        skip_reason = problem or self.keep_reasons.get(mod) or rule_reason
        if self.filter is not None:
            return Choice(skip_reason or self._why_filtered(mod, fqn))
        if is_converted:  # gets the new config whatever its speed
            return Choice(skip_reason)
        return Choice(skip_reason or conversion.why_slower(mod, fqn, self), self._chosen_for(mod))

    def _why_filtered(self, mod: nn.Module, fqn: str) -> str | None:
        try:
            decision = self.filter(mod, fqn)
        except AttributeError as error:  # experts have no `in_features`
            if isinstance(mod, nn.Linear):
                raise
            return f"module_filter_fn raised an AttributeError: {error}"
        return None if decision else f"module_filter_fn returned {decision!r}"

    def gpu_of(self, mod: nn.Module) -> str | None:
        """Return the name of the GPU for which to judge the speed of `mod`; None: do not judge."""
        if self.gpu is None and not self.config.emulate:
            return gpu_for(next((x.device for x in mod.parameters()), torch.device("cpu")))
        return self.gpu

    def _chosen_for(self, mod: nn.Module) -> str | None:
        """Return text for the report: how the speed of `mod` is judged. None: no speed to gain."""
        if not self.config.float8_gemms or (self.config.emulate and self.gpu is None):
            return None  # nothing to speed up: no casts, or emulated here and no other GPU given
        gpu = self.gpu_of(mod)
        if gpu in MODELLED:
            source = f'gpu="{gpu}"' if self.gpu else "the GPU here"
            modelled = f"modelled as {judged_as(self.config)} at {self.tokens} tokens per forward"
            shared = f", casts shared by {self.linear_ranks} ranks" if self.linear_ranks > 1 else ""
            if self.expert_ranks < self.linear_ranks:
                shared += f" (experts' by {self.expert_ranks})"
            graphs = ", as CUDA graphs" if self.cuda_graphs else ""
            return f"chosen for {gpu} ({source}): {modelled}{shared}{graphs}"
        if gpu is None:
            names = " or ".join(f'gpu="{name}"' for name in MODELLED)
            return f"no GPU here: layers of any size are converted; {names} leaves out slower ones"
        narrow = f"layers with fewer than {NARROW} features in or out stay in high precision"
        return f"{gpu} is not modelled: {narrow}; `float8 plan` measures the others"


def all_linears(mod: nn.Module, fqn: str) -> bool:
    """Return True. As `module_filter_fn`, it selects all layers and experts, fast or slow."""
    return True


def reason_by_name(fqn: str, *, head: bool = False) -> str | None:
    """Return why the name `fqn` keeps a layer in high precision by default; None if it does not.

    Names of the output head do, unless `head` is True: the loss depends directly on its logits, and
    it is a small part of a large model. So do names of PEFT: low-rank adapters (`lora_*`) gain no
    speed, and with `modules_to_save`, trained copies of layers, PEFT would save scaling state.
    """
    wrappers = "module", "model", "base_model"  # attributes in which wrappers keep a model
    words = [word for word in plain_name(fqn).split(".") if word not in wrappers]
    if not head and ("lm_head" in words or words == ["output"]):
        return "the head: converted only with head=True, or if a module_filter_fn takes it"
    if any(word.startswith("lora_") or word == "modules_to_save" for word in words):
        return "of an adapter: converted only if a module_filter_fn takes it"
    return None


def gpu_for(device: torch.device) -> str | None:
    """Return the name of `device`, as "H100", if it is a GPU, else of the current GPU, if any."""
    if not torch.cuda.is_available():
        return None
    gpu = device if device.type == "cuda" else None  # CPU and meta weights go to the current GPU
    return str(short_name(torch.cuda.get_device_name(gpu)))


def short_name(gpu: str | None) -> str | None:
    """Return "H100" or "H200" if `gpu` has words that end in just one, in any case; else `gpu`."""
    text = gpu.upper() if isinstance(gpu, str) else ""
    names = re.findall(rf"({'|'.join(MODELLED)})(?!\w)", text)
    return names[0] if len({*names}) == 1 else gpu
