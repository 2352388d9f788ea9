"""Names without the parts that wrappers of a model add, and models without wrappers."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain_name(name: str) -> str:
    """Return `name` without the parts that torch.compile, checkpoint_wrapper and FSDP1 add."""
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        name = f"{name}.".replace(f"{wrapper}.", "")[:-1]
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers of torch.compile and DDP; `model` if it has none."""
    is_ddp = isinstance(model, DistributedDataParallel)
    inner = model._modules.get("module" if is_ddp else "_orig_mod")
    return model if inner is None else unwrapped(inner)
