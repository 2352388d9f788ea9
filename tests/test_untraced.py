"""What compiled code must not look into runs in eager mode."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from float8.untraced import untraced

seen: list[bool] = []


@untraced
def looked_at(x: torch.Tensor) -> torch.Tensor:
    """Its own."""
    seen.append(torch.compiler.is_compiling())
    return x * 3


def test_compiled_code_calls_it_in_eager_mode() -> None:
    seen.clear()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: looked_at(x + 1) - 1, backend=counter)
    x = torch.ones(3)
    for _ in range(3):
        assert torch.equal(run(x), torch.full((3,), 5.0))
    assert seen == [False] * 3
    assert counter.frame_count == 2  # before and after it
    assert looked_at.__doc__ == "Its own."
