"""Read and write checkpoints with float8 weights in the formats of transformers and servers."""

from float8.checkpoints.reading import load_float8_checkpoint, read_float8_checkpoint
from float8.checkpoints.writing import (
    float8_metadata,
    float8_weights,
    quantization_config,
    save_float8_checkpoint,
)

__all__ = ["float8_metadata", "float8_weights", "load_float8_checkpoint"]
__all__ += ["quantization_config", "read_float8_checkpoint", "save_float8_checkpoint"]
