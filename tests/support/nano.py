"""The smallest Llamas, known to the trainer as `nano` and `nano-tied`."""

from dataclasses import replace

from float8_lab.models.presets import PRESETS, ModelConfig, Preset

NANO = Preset(
    ModelConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, init_std=0.1),
    seq_len=16,
    batch_size=4,
    learning_rate=5e-3,
    steps=6,
)
NANO_TIED = replace(NANO, model=replace(NANO.model, tied_head=True, vocab_size=259, n_layers=2))
PRESETS |= {"nano": NANO, "nano-tied": NANO_TIED}
