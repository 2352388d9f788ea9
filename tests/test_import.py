"""Importing float8 changes nothing and prints nothing; its public names are all there."""

import pytest

import float8
from support.forks import run_program

pytestmark = pytest.mark.xdist_group("programs")

EFFECTS = """
import torch._dynamo, torch._inductor.config
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

before = state()
import float8
assert state() == before
"""

LIGHT = """
import argparse, inspect
text, start = inspect.getsource(argparse), time.process_time()
for _ in range(10):
    compile(text, "", "exec")
unit = time.process_time() - start  # of work that a busy host makes longer, too
before, start = set(sys.modules), time.process_time()
import float8
seconds = time.process_time() - start
new = set(sys.modules) - before

def are_light(names):
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "matplotlib", "typer")
    found = [x for x in names if x.startswith((*heavy, "rich", "tensorboard", "float8.float8_"))]
    assert not found, found

are_light(new)
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
float8.convert_to_float8_training(model, config="delayed")
model(torch.randn(16, 32)).sum().backward()
float8.sync_float8_amax_and_scale_history(model)
are_light(x for x in set(sys.modules) - before if x.startswith(("torch._dynamo", "torch._ind")))
print(seconds / unit)
"""


def run(program: str) -> str:
    """Return what a program prints; warnings are errors."""
    header = "import sys, time, warnings, torch\nwarnings.simplefilter('error')\n"
    done = run_program(header + program)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_has_no_effect() -> None:
    assert run(EFFECTS) == ""


def test_importing_is_cheap_and_takes_no_compiler_along() -> None:
    """Dynamo takes seconds: who does not compile never needs it, in eager training neither.

    Over `import torch`, in units of ten compilations of argparse, about 0.11 seconds of the CPU:
    the least of three, as others may be at work.
    """
    assert any(float(run(LIGHT)) <= 4.5 for _ in range(3))


def test_public_names_exist() -> None:
    assert float8.__all__ == sorted(set(float8.__all__))
    assert all(hasattr(float8, name) for name in float8.__all__)
