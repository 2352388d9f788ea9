"""The tensor and expert parallel of Hugging Face's transformers 5.23: `DistributedConfig`."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from float8.experts.module import kind_of
from float8.tensor import is_dtensor


@contextmanager
def forwards_taken_off(model: Any) -> Iterator[None]:
    """Take off the forwards that layers got from transformers, and give them anew at the end.

    transformers shares a model among ranks while it loads it, and gives linear layers and experts a
    `forward` as attribute, which talks to other ranks and calls that of the class. Nothing can be
    converted below it, nor turned back. So, on each rank:

        config = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        with forwards_taken_off(model):
            convert_to_float8_training(model)

    Weights stay the DTensors that they are. While gradients are taken, tensors of linear layers are
    cast under the scale of all ranks; else each rank casts its part by itself, as always of the
    experts. Nothing happens to a model that is not shared. Do not call one before the end.
    """
    taken = []
    for fqn, mod in model.named_modules():
        # That of somebody else around theirs, as accelerate's, stays.
        origin = getattr(vars(mod).get("forward"), "__module__", None)
        if not isinstance(mod, nn.Linear) and kind_of(mod) is None:
            continue
        meshes = [p.device_mesh for p in mod.parameters(recurse=False) if is_dtensor(p)]
        if origin == EpDispatchExpertsParallel.__module__:
            install = functools.partial(
                EpDispatchExpertsParallel().install_forward,
                ep_mesh=model._mesh_manager.get_mesh("ep"),
                tp_mesh=model._mesh_manager.get_mesh("tp"),
                ep_implementation=model.config.distributed_config.ep_implementation,
            )
            taken.append((mod, install))
        elif origin == TensorParallelLayer.__module__ and meshes:
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(fqn)]]
            mesh = meshes[0] if meshes[0].ndim == 1 else meshes[0]["tp"]
            taken.append((mod, functools.partial(style.install_forward, mesh=mesh)))
    for mod, _ in taken:
        del mod.forward
    try:
        yield
    finally:
        for mod, install in taken:
            install(mod)
