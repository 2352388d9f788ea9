"""Convert a model with one call, compile it, train a few steps.

Run it with `python examples/convert_and_compile.py`; it needs torch and float8 only.
"""

import torch
from torch import nn

from float8 import all_linears, conversion_report, convert_to_float8_training


def main() -> None:
    """Fit a small MLP to a random teacher."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = nn.Linear(128, 32, device=device)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 32)).to(device)

    # Layers this small gain nothing: on a GPU that is known, only `all_linears` converts them.
    convert_to_float8_training(model, module_filter_fn=all_linears)
    print(conversion_report(model))
    compiled = torch.compile(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(50):
        x = torch.randn(256, 128, device=device)
        loss = (compiled(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    print(f"final     loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
