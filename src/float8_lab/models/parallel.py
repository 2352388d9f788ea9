"""Blocks whose layers several ranks share: tensor parallel, by torch's styles and by float8's."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, parallel
from torch.distributed.tensor.placement_types import Placement


def share_layers(
    blocks: Iterable[nn.Module], mesh: DeviceMesh, tokens: Placement, styles: Any = None
) -> None:
    """Leave each rank of the mesh, of one dim, its part of the layers of a Llama's blocks.

    All have the same weights. `tokens` is how ranks hold inputs and outputs, [batch, seq, dim]:
    `Shard(1)` under sequence parallel, where layers that read the same tokens gather them once;
    else `Replicate()`. `styles` are float8's, a module with torchao's names, or else torch's.
    """
    prefix, styles = ("Float8", styles) if styles else ("", parallel)
    colwise, rowwise = (getattr(styles, f"{prefix}{way}Parallel") for way in ("Colwise", "Rowwise"))
    norm: Any = parallel.SequenceParallel()
    norm.sequence_sharding = (tokens,)
    plan: dict[str, Any] = dict.fromkeys(("attention_norm", "feed_forward_norm"), norm)
    inner = ("attention.query", "attention.key", "attention.value")
    plan |= {name: colwise() for name in (*inner, "feed_forward.gate", "feed_forward.up")}
    last = ("attention.out", "feed_forward.down")
    plan |= {name: rowwise(output_layouts=tokens) for name in last}
    if tokens != (whole := Replicate()):
        gather = getattr(styles, f"Prepare{prefix}ModuleInput")
        for name, others in (("attention", (None, None)), ("feed_forward", ())):
            plan[name] = gather(
                input_layouts=(tokens, *others), desired_input_layouts=(whole, *others)
            )
    for block in blocks:
        parallel.parallelize_module(block, mesh, plan, src_data_rank=None)
