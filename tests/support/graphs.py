"""Graphs as Inductor gets them, run op by op."""

from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table


def op_by_op(options: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a compilation that splits graphs as these options say, and makes no C++."""
    split = options["custom_partitioner_fn"] if options else min_cut_rematerialization_partition
    table = select_decomp_table()
    return {"backend": aot_autograd(fw_compiler=nop, partition_fn=split, decompositions=table)}
