"""Weights of a training for vLLM's engines of weight transfer."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from float8.checkpoints import float8_metadata, float8_weights
from float8.checkpoints.schemes import COMPRESSED, FINE_GRAINED, scheme_named


class Float8WeightSource(WeightSource):
    """A `WeightSource` over a converted model: float8 data and scales, as a checkpoint has them.

    Give it to a trainer engine of vLLM, whose server has loaded a checkpoint of the same format and
    strategy:

        source = Float8WeightSource(model, "compressed-tensors")
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
        ...
        engine.send_weights()  # after each step, on all ranks

    Names, order and bytes are those of `save_float8_checkpoint`, with the same arguments. Each pass
    casts the weights of the model as they are then. Ranks that share a model iterate in lockstep,
    each to the end, and each gets full tensors. Shard the model before the first use: `metadata`
    does not change later. Of vLLM 0.26 to 0.32 it is a method, and engines call `iter`.

    Raises:
        ValueError: format or strategy is unknown, or one that vLLM does not read. The other errors
            of `float8_weights` are raised when metadata or weights are read.
    """

    def __init__(self, model: nn.Module, format: str = FINE_GRAINED, **more: Any) -> None:
        scheme = scheme_named(format, more.get("strategy"))
        if scheme.format == FINE_GRAINED and scheme.granularity.one_scale:
            got = f"got 'tensor' of {format!r}, whose scales have another name in vLLM"
            raise ValueError(f"strategy: {got}; expected 'tensor' of {COMPRESSED!r}")
        self._model, self._format, self._more = model, format, more

    def metadata(self) -> Any:
        """Return name, dtype and shape of each tensor, in the order in which they are sent."""
        found = float8_metadata(self._model, self._format, **self._more)
        return [ParamMeta(*each) for each in found]

    if hasattr(WeightSource, "iter_full"):  # from 0.33 it is read often, and must not change
        metadata = cached_property(metadata)  # type: ignore[assignment]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of each; a new pass over the model as it is now."""
        return float8_weights(self._model, self._format, **self._more)

    __iter__ = iter_full
