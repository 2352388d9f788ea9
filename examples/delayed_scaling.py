"""Delayed scaling with gradient accumulation and a checkpoint that carries the scales.

Run it with `python examples/delayed_scaling.py`; it needs torch and float8 only.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from float8 import Float8LinearConfig, attach_to_optimizer, convert_to_float8_training


def build_model() -> nn.Module:
    """A small MLP in float8 with delayed scaling, all but its last layer."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8))
    return convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("delayed"),
        module_filter_fn=lambda mod, fqn: fqn != "3",
    )


def main() -> None:
    """Train, save, load into a fresh model, compare."""
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach_to_optimizer(model, optimizer)  # the sync now runs at every optimizer.step()

    for step in range(20):
        for _ in range(2):  # microbatches: amaxes count over all of them
            x = torch.randn(32, 64)
            loss = (model(x) - x[:, :8]).square().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step:2d}  loss {2 * loss.item():.4f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save(model.state_dict(), path)
        restored = build_model()
        restored.load_state_dict(torch.load(path, weights_only=True))

    # In training mode with the histories; evaluation would take its scales from the data.
    x = torch.randn(32, 64)
    same = torch.equal(model(x), restored(x))
    print(f"the restored model computes the same, bit by bit: {same}")
    assert same


if __name__ == "__main__":
    main()
