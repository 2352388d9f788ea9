"""Graphs as Inductor gets them, run op by op."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table


def op_by_op(options: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a compilation that splits graphs as these options say, and makes no C++."""
    split = options["custom_partitioner_fn"] if options else min_cut_rematerialization_partition
    table = select_decomp_table()
    return {"backend": aot_autograd(fw_compiler=nop, partition_fn=split, decompositions=table)}


def without_code(graph: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
    """Take the place of what generates code for Inductor: after all it parts and decomposes."""
    return make_boxed_func(graph.forward)


def make_no_code(set_to: Callable[..., None] = setattr) -> None:
    """From now on Inductor runs graphs op by op in this process."""
    quick = functools.partial(compile_fx.compile_fx, inner_compile=without_code)
    set_to(compile_fx, "compile_fx", quick)
