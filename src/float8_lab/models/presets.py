"""The shapes of the Llama models that the trainer knows by name."""

import math
from dataclasses import dataclass

from float8_lab.errors import ConfigError

LLAMA3_VOCAB = 128256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama."""

    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads; `dim` is divided among them
    n_kv_heads: int  # key/value heads, each shared by `n_heads / n_kv_heads` query heads
    ffn_dim: int  # hidden width of the SwiGLU feed-forward
    vocab_size: int = 256  # rows of embedding and head; bytes are 256, a multiple of 16, too
    tied_head: bool = False  # whether the head shares its weight with the embedding
    rope_theta: float = 500_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm

    def check_shares(self, ranks: int, tokens: int) -> None:
        """Raise a `ConfigError` unless so many ranks can share layers and `tokens` evenly."""
        if (common := math.gcd(self.n_kv_heads, self.ffn_dim, tokens)) % ranks:
            shared = f"{self.n_kv_heads} key/value heads, ffn width {self.ffn_dim}, {tokens} tokens"
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ConfigError(f"ranks: got {ranks} for {shared}, expected one of {fitting}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


@dataclass(frozen=True)
class Preset:
    """A named model with settings that train it sensibly."""

    model: ModelConfig
    seq_len: int  # tokens per sequence
    batch_size: int  # sequences per forward pass
    learning_rate: float  # peak of the schedule
    steps: int  # of the optimizer
    threads: int = 0  # of a CPU; 0: as many as PyTorch takes


# Width, blocks, query heads, key/value heads and feed-forward width of the model; then tokens per
# sequence, sequences, learning rate and steps.
PRESETS: dict[str, Preset] = {
    # The steps are for `make demo`: three runs in a minute or two on two CPU cores. Threads wait
    # for each other after each operation: on a busy machine two take ten times as long as one.
    "tiny": Preset(ModelConfig(96, 2, 4, 2, 288), 32, 16, 4e-3, 350, threads=1),
    "150m": Preset(ModelConfig(1024, 12, 16, 8, 3072), 2048, 16, 1e-3, 2000),
    "1b": Preset(ModelConfig(2048, 16, 32, 8, 8192, tied_head=True), 2048, 8, 4e-4, 5000),
    "llama3-1b": Preset(
        ModelConfig(2048, 16, 32, 8, 8192, LLAMA3_VOCAB, tied_head=True), 8192, 2, 4e-4, 5000
    ),
    "llama3-8b": Preset(ModelConfig(4096, 32, 32, 8, 14336, LLAMA3_VOCAB), 8192, 1, 3e-4, 10_000),
    "llama3-70b": Preset(ModelConfig(8192, 80, 64, 8, 28672, LLAMA3_VOCAB), 8192, 1, 1.5e-4, 10000),
}


def preset(name: str) -> Preset:
    """The preset of that name; a `ConfigError` if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
