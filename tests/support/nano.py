"""The smallest Llama."""

from float8_lab.models.presets import ModelConfig, Preset

NANO = Preset(
    ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, init_std=0.1),
    seq_len=16,
    batch_size=4,
    learning_rate=5e-3,
    steps=6,
)
