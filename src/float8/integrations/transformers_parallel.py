"""Convert models under tensor and expert parallel of transformers 5.23 (`DistributedConfig`)."""

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
    """Context manager: remove the parallel forwards of transformers, and install them again.

    transformers shards a model while it loads it, and sets a `forward` attribute on linear layers
    and experts, which communicates and calls the forward of the class. With that attribute a layer
    can be neither converted nor converted back. So, on each rank:

        config = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        with forwards_taken_off(model):
            convert_to_float8_training(model)

    Weights stay DTensors. With gradients enabled, scales of linear layers are those of the whole
    tensor, across ranks; else, and for experts always, each rank scales its shard. A model that is
    not sharded is left alone. Do not call the model within the context.
    """
    removed = []
    for fqn, mod in model.named_modules():
        # Wrappers of other libraries around that forward, such as accelerate's, stay.
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
            removed.append((mod, install))
        elif origin == TensorParallelLayer.__module__ and meshes:
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(fqn)]]
            mesh = meshes[0] if meshes[0].ndim == 1 else meshes[0]["tp"]
            removed.append((mod, functools.partial(style.install_forward, mesh=mesh)))
    for mod, _ in removed:
        del mod.forward
    try:
        yield
    finally:
        for mod, install in removed:
            install(mod)
