"""Loss curves of a small Mixtral of transformers: float8 beside the spread of two runs in bf16.

All runs go on from one checkpoint, a start in bf16. The second run in bf16 sees the same text in
another order. On a GPU all run at once, since the host takes longer for a step than the GPU.

From the root of a checkout, with transformers and matplotlib installed:

    python -m benchmarks.experts_curve 150m cuda curve.json "1 H200"   # 1,000 steps
"""

import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from matplotlib.figure import Figure

from float8 import conversion_report, convert_to_float8_training
from float8_lab.bench.results import write_results
from float8_lab.trainer.data import load_corpus, train_batch, validation_batches
from float8_lab.trainer.environment import describe_environment

# Hidden, ff, layers; sequences, tokens of each; steps of start and run, and between validations;
# peak of the learning rate.
PRESETS = {
    "tiny": (128, 192, 2, 16, 64, 60, 200, 10, 2e-3),
    "150m": (768, 576, 12, 16, 1024, 100, 1000, 25, 6e-4),
}
OTHER = "bf16, other order"
RUNS = ("bf16", OTHER, "tensorwise", "rowwise")
CORPUS = load_corpus()


class Run:
    """A model in bf16, its weights in float32, and their optimizer."""

    def __init__(self, preset: str, device: str) -> None:
        hidden, ff, layers, batch, length, *rest = PRESETS[preset]
        self.start, self.steps, self.every, self.rate = rest
        sizes = {"hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
        torch.manual_seed(0)
        model = tf.MixtralForCausalLM(tf.MixtralConfig(vocab_size=256, **sizes))
        self.model, self.device = model.to(device, torch.bfloat16), device
        self.masters = [p.detach().float() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), fused=True)
        self.step, self.text = 0, {"batch_size": batch, "seq_len": length}

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        torch.save((self.step, self.masters, self.optimizer.state_dict()), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        self.step, masters, state = torch.load(path, map_location=self.device)
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            torch._foreach_copy_(self.masters, masters)
            torch._foreach_copy_([*self.model.parameters()], masters)

    def loss(self, tokens: torch.Tensor, balance: bool) -> torch.Tensor:
        """Nats per byte, and what balances experts."""
        ids = tokens.to(self.device, torch.int64)
        how = {"output_router_logits": balance, "use_cache": False}
        return self.model(input_ids=ids, labels=ids, **how).loss

    def train_step(self, order: int) -> None:
        """Forward, backward and a step of the optimizer."""
        first = self.step * self.text["batch_size"]
        self.loss(train_batch(CORPUS.train, seed=order, first=first, **self.text), True).backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        wave = 0.55 + 0.45 * math.cos(math.pi * self.step / (self.start + self.steps))
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1, (self.step + 1) / 30) * wave
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.model.parameters()], self.masters)
        self.step += 1

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss of text that is never trained on."""
        batches = validation_batches(CORPUS.validation, batches=8, **self.text)
        return torch.stack([self.loss(each, False).float() for each in batches]).mean().item()


def curve(preset: str, device: str, start: Path, name: str, curves: Any) -> None:
    """Add the validation losses of a run from a checkpoint on, each as it is known."""
    run = Run(preset, device)
    run.load(start)
    if not name.startswith("bf16"):
        body = {"module_filter_fn": lambda mod, fqn: fqn != "lm_head"}
        convert_to_float8_training(run.model, config=name, **body)
        assert all(each.skip_reason is None for each in conversion_report(run.model).experts)
    losses = []
    while run.step < run.start + run.steps:
        run.train_step(1 if name == OTHER else 0)
        if run.step % run.every == 0:
            losses.append(run.validate())
            curves[name] = losses


def plot(curves: dict[str, list[float]], every: int, path: Path) -> None:
    """Draw losses above their differences to bf16, with the band that its other run spans."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = [every * (i + 1) for i in range(len(curves["bf16"]))]
    for i, (name, losses) in enumerate(curves.items()):
        above.plot(steps, losses, label=name, linewidth=5 - 1.2 * i)
        differences = [a - b for a, b in zip(losses, curves["bf16"], strict=True)]
        below.plot(steps, differences, linewidth=5 - 1.2 * i)
    below.axhspan(-gap(curves, OTHER), gap(curves, OTHER), color="#dddddd", zorder=0)
    above.set_ylabel("validation loss (nats per byte)")
    below.set(ylabel="difference to bf16", xlabel="steps after the common start")
    above.legend(frameon=False)
    figure.savefig(path, dpi=110)


def gap(curves: dict[str, list[float]], name: str) -> float:
    """Return the mean absolute difference to the first run in bf16."""
    pairs = [*zip(curves[name], curves["bf16"], strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def main(preset: str, device: str, output: str, hardware: str) -> None:
    """Train, and write results and, beside them, the plot."""
    start = Run(preset, device)
    while start.step < start.start:
        start.train_step(order=0)
    about = describe_environment(torch.device(device)) | {"hardware": hardware}
    settings = {"preset": preset, "sizes": PRESETS[preset], "corpus": CORPUS.describe()}
    results = {"benchmark": "experts curve", "environment": about, "settings": settings}
    processes = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, processes.Manager() as manager:
        checkpoint, at_once = Path(folder, "start.pt"), len(RUNS) if device != "cpu" else 1
        start.save(checkpoint)
        with ProcessPoolExecutor(at_once, processes) as pool:
            so_far = manager.dict()
            runs = [pool.submit(curve, preset, device, checkpoint, name, so_far) for name in RUNS]
            going = True
            while going:  # what there is, in case that it is stopped
                going = bool(wait(runs, timeout=10).not_done)
                if len(so_far) == len(RUNS):
                    least = min(map(len, so_far.values()))
                    curves = {name: so_far[name][:least] for name in RUNS}
                    rows = [{"run": x, "gap": gap(curves, x), "loss": curves[x]} for x in RUNS]
                    write_results(Path(output), {**results, "rows": rows})
                    plot(curves, start.every, Path(output).with_suffix(".png"))
            for run in runs:
                run.result()  # raises what it raised


if __name__ == "__main__":
    main(*sys.argv[1:])
