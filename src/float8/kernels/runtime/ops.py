"""Registration of kernels as PyTorch ops, ``torch.ops.float8.*``, without gradients.

`register` uses the Library API; ops of ``custom_op`` take several times as long per eager call.
CPUs run the plain-torch twins; CUDA runs Triton, or the twins where Triton is not installed.
Compilers see opaque ops and merge equal calls, such as the casts of the input of q, k and v.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from float8.kernels.runtime import private
from float8.kernels.runtime.triton import HAS_TRITON

_library: Any = torch.library.Library("float8", "DEF")  # type: ignore[no-untyped-call]

NO_ONNX = (
    "float8: got torch.onnx.export, expected a model in high precision: ONNX has no such casts to "
    "float8; call convert_to_high_precision(model) first"
)

cpu, cuda = types.SimpleNamespace(), types.SimpleNamespace()
"""The function of each op, by the name of the op, for each device; generated code calls them.

Inductor's cache on disk outlives an upgrade of this library. Keep the names `cpu` and `cuda` and
that of this file, and do not change what an op of a given name returns."""


def register(
    name: str,
    plain: Callable[..., Any],  # made of PyTorch ops
    *,
    triton: Callable[..., Any] | None = None,  # runs Triton kernels
    fake: Callable[..., Any],  # returns empty results, for tracing
    writes: tuple[str, ...] = (),  # names of arguments that the op mutates
    flops: Callable[..., Any] | None = None,  # a formula for `FlopCounterMode`
) -> None:
    """Define the op `torch.ops.float8.<name>`, without gradients, with the signature of `plain`.

    CPUs run `plain`. GPUs run `triton`, or `plain` if that is None or Triton is missing. All take
    the op's arguments; `flops` takes shapes in place of tensors, and also a keyword `out_shape`.
    """
    schema = torch.library.infer_schema(plain, mutates_args=writes)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    plain = torch.no_grad()(plain)  # the op skips autograd, so its body must build no graph
    if triton is None or not HAS_TRITON:
        triton = plain if triton is None else without_triton(plain)  # warns once
    for namespace, key, body in ((cpu, "CPU", plain), (cuda, "CUDA", _on_its_device(triton))):
        _library.impl(name, body, key)
        setattr(namespace, name, body)  # for code that Inductor generates
    # Calls skip autograd, which takes time, and results do not claim to have a gradient.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")

    @functools.wraps(fake)
    def traced(*args: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            raise RuntimeError(NO_ONNX)
        _tell_inductor(name)
        return fake(*args)

    torch.library.register_fake(f"float8::{name}", traced, lib=_library)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.float8, name))(flops)


def _on_its_device(body: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `body` so that the GPU of its first argument is the current one, as Triton needs."""

    def op(x: Tensor, *args: Any, **named: Any) -> Any:
        current = private.current_device or torch.cuda.current_device
        if not x.is_cuda or x.device.index == current():
            return body(x, *args, **named)
        with torch.cuda.device(x.device):
            return body(x, *args, **named)

    return op


def _tell_inductor(name: str) -> None:
    """Make code that Inductor generates call the op `name` without the dispatcher's overhead.

    Called when an op is traced, not at import, since importing Inductor takes seconds. If torch
    lacks the private interface, generated code calls the op through the dispatcher.
    """
    module = sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen")
    registry: Any = getattr(module, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)  # None: no Inductor yet
    codegen: Any = getattr(module, "CustomCodegen", None)
    op = f"torch.ops.float8.{name}.default"
    if private.PUBLIC_API_ONLY or None in (registry, codegen) or op in registry:
        return

    def generate(node: Any, writeline: Callable[[str], None]) -> None:
        code = importlib.import_module("torch._inductor.virtualized").V.graph.wrapper_code
        device = node.get_device().type  # "cpu" or "cuda", both namespaces of this module
        code.add_import_once(f"from {__name__} import {device} as float8_{device}")
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = float8_{device}.{name}({arguments})")

    registry[op] = codegen(python=generate)


@functools.cache
def _warn_without_triton() -> None:
    private.warn(
        "float8: Triton cannot be imported, so casts on the GPU run as several plain PyTorch "
        "kernels, which is several times slower. Install triton to avoid this."
    )


def without_triton(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `plain` to warn that Triton is missing; only the first call of all wrappers warns."""

    def op(*args: object, **named: object) -> Any:
        _warn_without_triton()
        return plain(*args, **named)

    return op
