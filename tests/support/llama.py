"""The reference Llama, built and initialised."""

import torch

from float8_lab.models.llama import Llama
from float8_lab.models.presets import ModelConfig


def build_llama(config: ModelConfig, max_seq_len: int, *, seed: int) -> Llama:
    with torch.device("meta"):
        model = Llama(config, max_seq_len)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model
