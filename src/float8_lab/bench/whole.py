"""`float8 plan --gpu`: what a step of training takes, modelled by its parts, in bf16 and in float8.

Compiled, with AdamW; fitted to what was measured of H200s and H100s. Linear layers and experts are
those of `float8.convert.speed`; what float8 leaves alone is modelled here.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from float8 import Float8LinearConfig, Float8Tensor, conversion_report
from float8.convert import speed
from float8.convert.choice import reason_by_name
from float8.convert.conversion import LayerReport
from float8.experts import kind_of, weights_of
from float8.experts.conversion import experts_per_token, ranks_that_cast
from float8_lab.bench.attention import find_attention
from float8_lab.bench.step import Row
from float8_lab.errors import ConfigError

# FLOP per ms of attention, forward and backward, with heads of 128 and of 64 and fewer.
_WIDE_HEADS, _HEADS = 470e9, 360e9
# Milliseconds of an H200 for 1e9 elements: of what layers read and write, by norms, activations and
# residuals; of what adapters read and write; of logits; of float32 Parameters that AdamW writes,
# that one GPU copies to bf16 and back, and that FSDP2 copies for each GPU, if it gathers bf16.
_NORMS, _ADAPTERS, _LOSS, _ADAMW, _COPIES, _SHARDS = 1.6, 2.6, 4.3, 8.5, 3.0, 10.0
_GIB = {"H100": 79, "H200": 139}  # that CUDA has of a card's 80 and 141 GB
_LINK = 300e6  # bytes per ms that a GPU gets from others: NVLink, or eight network cards of a host
# Of the CPU, to start the kernels of a layer in bf16 and in float8, compiled: of one GPU, and under
# FSDP2 with all that it does for a weight. Hosts differ by `HOST_ERROR`.
_HOST_MS, _FSDP_HOST_MS = (0.1, 0.4), (0.92, 1.31)
HOST_ERROR = 0.3
# Of whole sequences: classifiers, and modulations by adaptive norms.
_POOLED = r"(\w+\.)?(heads?|classifier|fc|pooler)(\.\w+)?|(.*\.)?(adaLN_\w+|norm\w*)\.(linear|\d+)"
_JOINT = "attn.add_q_proj"  # in blocks of two streams, image and text, which share the tokens
_LINEAR, _EXPERTS, _COPIED = "linear layers", "experts", "copies of weights"


@dataclass(frozen=True)
class Setup:
    """How a model is trained; `tokens` are those of a forward on one device."""

    tokens: int
    sequence: int
    data_parallel: int = 1
    expert_parallel: int = 1
    checkpointing: bool = False
    cuda_graphs: bool = False
    head: bool = False  # whether the head may be in float8, too

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for numbers that do not divide each other."""
        for name, part, of, whole in (
            ("sequence", self.sequence, "--tokens", self.tokens),
            ("expert-parallel", self.expert_parallel, "--data-parallel", self.data_parallel),
        ):
            if part < 1 or whole < 1 or whole % part:
                do = "; give --data-parallel, too" * (of == "--data-parallel" and whole == 1)
                raise ConfigError(f"{name}: got {part}, expected a divisor of {of} {whole}{do}")


def keep_experts_of_a_rank(model: nn.Module, ranks: int) -> None:
    """Leave the experts, on the meta device, that one of `ranks` has."""
    for module in [each for each in model.modules() if kind_of(each) is not None]:
        for name, experts, *_ in weights_of(module):
            if experts % ranks:
                raise ConfigError(f"expert-parallel: got {ranks}, expected a divisor of {experts}")
            w: Any = module._parameters[name]
            module._parameters[name] = nn.Parameter(w.detach()[: experts // ranks], w.requires_grad)


class Step:
    """Milliseconds of a step of a converted model on `gpu`, in bf16 and in float8, by part."""

    def __init__(self, model: nn.Module, gpu: str, config: Float8LinearConfig, run: Setup) -> None:
        self._model, self.gpu, self.config, self.run = model, gpu, config, run
        self._sent, self.host_ms, self.gpu_ms = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        self.gib, self.gib_of_gpu = 0.0, _GIB[gpu]  # Parameters, gradients, AdamW's state; of a GPU
        self.gains: dict[str, float] = {}  # of each layer, whether in float8 or not
        self.of_experts = defaultdict[str, list[float]](lambda: [0.0, 0.0])  # ms in bf16, float8
        self.pooled = dict[str, None]()  # names of layers that see one row of each sequence
        each = [*model.named_modules()]
        self._text = any(isinstance(mod, nn.Embedding) and "pos" not in name for name, mod in each)
        self._joint = tuple(x.removesuffix(_JOINT) for x, _ in each if x.endswith(_JOINT))
        self.ms, own = {_LINEAR: [0.0, 0.0]}, run.data_parallel // run.expert_parallel
        experts = [mod for mod in model.modules() if kind_of(mod) is not None]
        self._ranks: dict[int, int] = defaultdict(lambda: run.data_parallel)
        self._ranks |= {id(weight): own for mod in experts for weight in mod.parameters()}
        self._saved_ms = dict[int, float]()  # by id, of weights that are gathered in float8
        self.report = report = conversion_report(model)
        for row in (*report.layers, *report.experts):
            self._add_layer(model, row)
        for other in report.others:
            if len(other.shape) == 2:
                self._add(_LINEAR, speed.layer_ms(gpu, "bf16", run.tokens, *other.shape))
        self.attention = find_attention(model)
        for module, width, head in self.attention:
            flop = 14 * run.sequence * run.tokens * width
            rate, causal = _WIDE_HEADS if head > 64 else _HEADS, getattr(module, "is_causal", None)
            halved = self._text if causal is None else bool(causal)
            self._add("attention", flop / rate / (2 if halved else 1))
        if run.checkpointing:  # forward once more, of what makes two to two and a half backward
            for part, sums in self.ms.items():
                more = {"attention": 9 / 7, "head and loss": 1.0}.get(part, 4 / 3)
                self.ms[part] = [more * ms for ms in sums]
            self.host_ms = [4 / 3 * ms for ms in self.host_ms]
        for weight in model.parameters():
            if not is_lazy(weight):
                self._add_weight(weight)
        self._add_waits("waiting for gathers", [sent / _LINK for sent in self._sent])
        self.gpu_ms = self._sums()
        self.host_ms = [0.0, 0.0] if run.cuda_graphs else self.host_ms
        self.host_decides = self.host_ms[1] > self.gpu_ms[1]
        self._add_waits("waiting for the CPU", self.host_ms)
        self.speedup = float(self.rows[-1]["speedup"] or 1)
        self.error = speed.EXPERTS_ERROR if _EXPERTS in self.ms else speed.ERROR  # of the speed-up

    @property
    def unmeasured(self) -> list[str]:
        """What was never measured, so that the error is not known."""
        weights = [x for x in self._model.parameters() if x.requires_grad and not is_lazy(x)]
        recipes = (*speed.COSTS, "rowwise_with_gw_hp")
        cases = {
            "on more than 4 GPUs": self.run.data_parallel > 4,
            "under expert parallel": self.run.expert_parallel > 1,
            "of trained Parameters in 16 bits": any(x.element_size() == 2 for x in weights),
            "of models that read no tokens": not self._text,
            "of such a configuration": self.config.short_str().split(",")[0] not in recipes,
            "where the host decides": self.host_decides,
        }
        return [case for case, there in cases.items() if there]

    @property
    def rows(self) -> list[Row]:
        """All parts, and their sum, as rows of a table."""
        return [
            {"what": what, "bf16_ms": a, "float8_ms": b, "speedup": a / b if b else None}
            for what, (a, b) in (*self.ms.items(), ("step", self._sums()))
        ]

    def __str__(self) -> str:
        found = {row["what"]: row["speedup"] for row in self.rows}
        each = [f"its {part} {found[part]:.2f}x" for part in (_LINEAR, _EXPERTS) if found.get(part)]
        return ", ".join([f"a step {self.speedup:.2f}x as fast", *each])

    def _sums(self) -> list[float]:
        return [sum(ms) for ms in zip(*self.ms.values(), strict=True)]

    def _add(self, part: str, high: float, low: float | None = None) -> None:
        sums = self.ms.setdefault(part, [0.0, 0.0])
        sums[0] += high
        sums[1] += high if low is None else low

    def _elements(self, part: str, count: float, ms: float, saved_ms: float = 0.0) -> None:
        """Add `ms` for 1e9 elements, less `saved_ms` for all of them in float8."""
        ms *= 1e-9 * count * speed.MEMORY[self.gpu]
        self._add(part, ms, ms - saved_ms)

    def _add_layer(self, model: nn.Module, row: LayerReport) -> None:
        run, K, N = self.run, row.in_features, row.out_features
        experts, tokens, fqn = getattr(row, "experts", 0), run.tokens, row.fqn.replace("(root)", "")
        path, _, name = fqn.rpartition(".")
        module: Any = model.get_submodule(path if experts else fqn)
        weight = getattr(module, name if experts else "weight")  # also one that is computed
        if experts:
            tokens *= experts_per_token(module, model.get_submodule(path.rpartition(".")[0]))
        elif not self._text and re.fullmatch(_POOLED, fqn):
            tokens //= run.sequence
            self.pooled[re.sub(r"\b\d+\b", "N", fqn)] = None
        elif fqn.startswith(self._joint):
            tokens //= 2
        ranks = self._ranks[id(weight)] if self.config.enable_fsdp_float8_all_gather else 1
        if experts:
            ranks = ranks_that_cast(module, name, experts, ranks)
        of = {"trains": weight.requires_grad, "experts": experts}
        high, saved, low = speed.compared_ms(self.gpu, self.config, tokens, K, N, ranks, **of)
        self.gains[row.fqn], in_float8 = (high + saved) / low, row.skip_reason is None
        if experts:
            both = self.of_experts[path]
            both[:] = both[0] + high + saved, both[1] + low
        host = _FSDP_HOST_MS if run.data_parallel > 1 else _HOST_MS
        self.host_ms = [ms + host[i and in_float8] for i, ms in enumerate(self.host_ms)]
        low, ranks = (low, ranks) if in_float8 else (high, 1)
        self._sent[1] -= 2 * K * N * (experts or 1) * (1 - 1 / ranks)
        if ranks > 1:
            self._saved_ms[id(weight)] = saved  # of copies
        if (reason_by_name(fqn) or "").startswith("the head"):
            self._add("head and loss", high, low)
            self._elements("head and loss", tokens * N, _LOSS)
        elif experts:
            self._add(_EXPERTS, high, low)
            if run.expert_parallel > 1 and weights_of(module)[0].name == name:
                sent = 8 * tokens * K * (1 - 1 / run.expert_parallel)  # there and back, twice
                self._add("exchange of tokens", sent / _LINK)
        else:
            self._add(_LINEAR, high, low)
            small = min(K, N) <= speed.NARROW
            part = "adapters and other small layers" if small else "norms, activations"
            self._elements(part, tokens * (K + N), _ADAPTERS if small else _NORMS)

    def _add_weight(self, weight: nn.Parameter) -> None:
        count, trains, size = weight.numel(), weight.requires_grad, weight.element_size()
        ranks = self._ranks[id(weight)]
        if isinstance(weight, Float8Tensor):  # in float8 only: each GPU has all of it
            size = ranks = 1
        self.gib += count * size * (4 if trains else 1) / ranks / 2**30
        if trains:
            self._elements("optimizer", count / ranks, _ADAMW * size / 4)
        if ranks > 1:
            self._elements(_COPIED, count, _SHARDS, self._saved_ms.get(id(weight), 0.0))
            both = (4 + trains * size) * count * (1 - 1 / ranks)  # gathered twice, and reduced
            self._sent = [sent + both for sent in self._sent]
        elif trains and size > 2:
            self._elements(_COPIED, count, _COPIES)

    def _add_waits(self, part: str, least: list[float]) -> None:
        """Add what a step takes less than `least`."""
        waits = [max(0.0, each - ms) for each, ms in zip(least, self._sums(), strict=True)]
        if any(waits):
            self._add(part, *waits)
