"""A stand-in for torchtitan after 0.3.0, which is in no package: what our converter uses of it.

The names, signatures and calls are those of its repository in November 2026; the code is not. Its
layers have one rank here, so that they send nothing.
"""

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner = None

        def traverse(self, config_cls: type, prefix: str = "") -> Any:
            for each in fields(self):
                value = getattr(self, each.name)
                children = enumerate(value) if isinstance(value, list) else [(each.name, value)]
                for key, child in children:
                    fqn = f"{prefix}{each.name}" + (f".{key}" if isinstance(value, list) else "")
                    if isinstance(child, config_cls):
                        yield fqn, child, value if isinstance(value, list) else self, key
                    elif hasattr(child, "traverse"):
                        yield from child.traverse(config_cls, f"{fqn}.")

        def build(self, **kwargs: Any) -> Any:
            return type(self)._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


class Module(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sharding_config: Any = None

    def _parallelize(self, parallelism_context: Any) -> None:
        for child in self.modules():
            if isinstance(child, Module) and child is not self:
                child._parallelize(parallelism_context)
        if any(True for _ in self.buffers(recurse=False)):
            raise ValueError("a buffer has no placement")


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        num_linears: int = 1
        bias: bool = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.in_features, config.num_linears * config.out_features, config.bias)
        self.num_linears = config.num_linears
        if self.num_linears > 1:
            stack: Tensor = self.weight.detach().unflatten(0, (self.num_linears, -1))
            self.register_parameter("weight", nn.Parameter(stack))

    def forward(self, input: Tensor) -> Tensor:
        output = self._linear(input, self.weight.flatten(0, -2), self.bias)
        return output if self.num_linears == 1 else output.unflatten(-1, self.weight.shape[:-1])

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)


class ColumnParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class RowParallelLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        return self._linear(input, self.weight.flatten(0, -2), self.bias)


class Fp32OutputLinear(Linear):
    """For gates of routers, and heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input.float(), weight.float(), bias)


class GroupedLinear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        group_size: int
        in_features: int
        out_features: int
        num_linears: int = 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        stack = () if config.num_linears == 1 else (config.num_linears,)
        shape = config.group_size, *stack, config.out_features, config.in_features
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, input_RI: Tensor, offsets_E: Tensor) -> Tensor:
        weight = self.weight.flatten(1, -2)
        out = self._grouped_mm(input_RI=input_RI, weight_EOI=weight, offsets_E=offsets_E)
        return out.reshape(*out.shape[:-1], *self.weight.shape[1:-1])

    def _grouped_mm(self, *, input_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
        parts = torch.tensor_split(input_RI, offsets_E[:-1].tolist())
        return torch.cat([x @ w.T for x, w in zip(parts, weight_EOI, strict=True)])


class ModelConfigConverter(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass


class ModelConfigTransform(ABC):
    @abstractmethod
    def transform(self, model: Any, *, context: Any = None) -> Any: ...


class Optim(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable_cuda_graph: bool = False

    def __init__(self, config: Any, *, model_parts: list[nn.Module], **_: Any) -> None:
        self.optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model_parts]


class Model(Module):
    """A block, a layer of experts and a head, as configs of such models lie."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[Any]
        experts: Any
        lm_head: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)
        self.experts, self.lm_head = config.experts.build(), config.lm_head.build()
        nn.init.normal_(self.experts.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        qkv, out, gate = self.layers
        x = out(qkv(x).sum(-2)) + gate(x)
        return self.lm_head(self.experts(x, torch.tensor([10, 32], dtype=torch.int32)).sum(-2))


def model_config(sizes: int = 64) -> Any:
    width = {"in_features": sizes, "out_features": sizes}
    layers = [
        ColumnParallelLinear.Config(num_linears=3, **width),
        RowParallelLinear.Config(bias=True, **width),
        Fp32OutputLinear.Config(**width),
    ]
    experts = GroupedLinear.Config(group_size=2, num_linears=2, **width)
    return Model.Config(layers=layers, experts=experts, lm_head=Linear.Config(**width))


def modules() -> dict[str, types.ModuleType]:
    """Return the entries of `sys.modules` under which `import` finds these classes."""
    names = "models models.common models.common.linear models.common.moe protocols config"
    made = {f"torchtitan.{x}": types.ModuleType(x) for x in [*names.split(), "config.transform"]}
    made["torchtitan"] = types.ModuleType("torchtitan")
    for name, module in made.items():
        module.__path__ = []
        if (parent := name.rpartition(".")[0]) in made:
            setattr(made[parent], name.rpartition(".")[2], module)
    here = sys.modules[__name__]
    for name in ("Linear", "ColumnParallelLinear", "RowParallelLinear", "GroupedLinear"):
        setattr(made["torchtitan.models.common.linear"], name, getattr(here, name))
    for name in ("ModelConfigConverter", "ModelConfigTransform"):
        setattr(made["torchtitan.config.transform"], name, getattr(here, name))
    return made
