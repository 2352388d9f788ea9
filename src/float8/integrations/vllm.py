"""Send the weights of a model in training to vLLM, in float8, by its weight transfer."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from float8.checkpoints import float8_metadata, float8_weights
from float8.checkpoints.schemes import COMPRESSED, FINE_GRAINED, scheme_named


@dataclass(eq=False, repr=False)
class Float8WeightSource(WeightSource):
    """A `WeightSource` of vLLM that yields float8 data and scales of a converted `model`.

    Pass it to vLLM's engine; the server must have loaded a checkpoint of this `format`, `strategy`:

        source = Float8WeightSource(model, "compressed-tensors")
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
        engine.send_weights()  # after each step, on all ranks

    Each iteration yields the current weights, as `float8_weights` does for the same arguments.
    Ranks that share a model must iterate together, each to the end. Shard the model before the
    first use: `metadata` (in vLLM 0.26 to 0.32 a method, later an attribute) must not change.

    Args:
        model: a model that `convert_to_float8_training` has converted, whole or sharded.
        format: `"fine-grained-fp8"` or `"compressed-tensors"`, the format that the server reads.
        strategy: the granularity of scales; None: `"block"`, or `"channel"` for the latter format.
        dtype: that of tensors not in float8. None: theirs, but bfloat16 if most weights to cast are
            float32, except for tensors that transformers keeps in float32.
        param_dtype: that of FSDP2's `MixedPrecisionPolicy`, to which weights are rounded first.

    Raises:
        ValueError: unknown `format` or `strategy`; or "tensor" of "fine-grained-fp8", which vLLM
            does not read. Reading metadata or weights raises the other errors of `float8_weights`.
    """

    model: nn.Module
    format: str = FINE_GRAINED
    _: KW_ONLY
    strategy: str | None = None
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        scheme = scheme_named(self.format, self.strategy)
        if scheme.format == FINE_GRAINED and scheme.granularity.one_scale:
            got = f"got 'tensor' of {self.format!r}, whose scales have another name in vLLM"
            raise ValueError(f"strategy: {got}; expected 'tensor' of {COMPRESSED!r}")

    @property
    def _arguments(self) -> dict[str, Any]:
        return {x.name: getattr(self, x.name) for x in fields(self)}

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each tensor that `iter_full` yields, in its order."""
        return [ParamMeta(*each) for each in float8_metadata(**self._arguments)]

    if hasattr(WeightSource, "iter_full"):  # from 0.33, vLLM wants an attribute that never changes
        metadata = cached_property(metadata)  # type: ignore[assignment]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for float8 data of weights, their scales, and other tensors."""
        return float8_weights(**self._arguments)

    __iter__ = iter_full
