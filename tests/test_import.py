"""Importing float8 changes nothing and prints nothing; its public names are all there."""

import subprocess
import sys

import float8

EFFECTS = """
import sys, torch, torch._dynamo, torch._inductor.config
import torch.optim.optimizer as optimizer

def state():
    return (
        torch._dynamo.config.save_config(),
        torch._inductor.config.save_config(),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.nn.Linear.forward,
    )

before, modules = state(), set(sys.modules)
import float8
assert state() == before
heavy = {"torch.distributed.fsdp", "matplotlib", "typer", "rich", "tensorboard"}
assert heavy.isdisjoint(set(sys.modules) - modules)
"""


def test_importing_has_no_effect() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EFFECTS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_exist() -> None:
    assert float8.__all__ == sorted(set(float8.__all__))
    assert all(hasattr(float8, name) for name in float8.__all__)
