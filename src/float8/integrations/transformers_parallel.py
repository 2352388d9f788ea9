"""The tensor parallel of Hugging Face's transformers 5.23: `tp_plan`, `DistributedConfig`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer


@contextmanager
def forwards_taken_off(model: Any) -> Iterator[None]:
    """Take off the forwards that tensor parallel gave linear layers, and give them anew at the end.

    transformers shares a model among ranks while it loads it, and gives each layer a `forward` of
    its own as attribute, which talks to other ranks and calls that of the layer. No layer can be
    converted below such a forward, nor turned back. So, on each rank:

        config = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        with forwards_taken_off(model):
            convert_to_float8_training(model)

    Weights stay the DTensors that they are. While gradients are taken, tensors are cast under the
    scale of the whole, of all ranks; else each rank casts its part by itself.

    Args:
        model: a `PreTrainedModel`. Do not call it before the end. Nothing happens to one that is
            not shared.
    """
    taken = []
    for fqn, mod in model.named_modules():
        # That of somebody else around theirs, as accelerate's, stays.
        origin = getattr(vars(mod).get("forward"), "__module__", None)
        if origin == TensorParallelLayer.__module__ and isinstance(mod, nn.Linear):
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(fqn)]]
            if mesh := getattr(mod.weight, "device_mesh", None):
                taken.append((mod, style, mesh if mesh.ndim == 1 else mesh["tp"]))
    for mod, _, _ in taken:
        del mod.forward
    try:
        yield
    finally:
        for mod, style, mesh in taken:
            style.install_forward(mod, mesh)
