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


def run(program: str) -> str:
    """What it prints; without warnings."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_has_no_effect() -> None:
    assert run(EFFECTS) == ""


def test_importing_leaves_dynamo_and_inductor_alone() -> None:
    """They take seconds, and who does not compile never needs them."""
    program = """
import sys, torch
before = set(sys.modules)
import float8
new = sorted(set(sys.modules) - before)
print(*[name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))][:3])
"""
    assert run(program) == "\n"


def test_importing_is_cheap() -> None:
    """In seconds of the CPU, over `import torch`: the least of three, as others may be at work."""
    program = """
import time, torch
before = time.process_time()
import float8
print(time.process_time() - before)
"""
    assert any(float(run(program)) <= 0.5 for _ in range(3))


def test_public_names_exist() -> None:
    assert float8.__all__ == sorted(set(float8.__all__))
    assert all(hasattr(float8, name) for name in float8.__all__)
