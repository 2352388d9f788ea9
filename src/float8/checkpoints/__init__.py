"""Checkpoints whose weights are float8, as others publish and serve them: in and out."""

from float8.checkpoints.reading import load_float8_checkpoint, read_float8_checkpoint
from float8.checkpoints.writing import float8_weights, quantization_config, save_float8_checkpoint

__all__ = [
    "float8_weights",
    "load_float8_checkpoint",
    "quantization_config",
    "read_float8_checkpoint",
    "save_float8_checkpoint",
]
