"""A delayed run that others saved goes on in a fresh process, bit by bit.

Those of trainers and of torchao's optimizers are in the tests of these.
"""

from pathlib import Path

import pytest

from sqnr import same_bits
from support import resumed
from support.fresh import ONE_WORKER, in_fresh_process

NEEDS = {"ema": "torch", "swa": "torch", "lora": "peft"}


@ONE_WORKER
@pytest.mark.parametrize("name", NEEDS)
def test_a_run_is_resumed_bit_by_bit_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    whole = resumed.run(name, tmp_path, range(4))
    rest = in_fresh_process(resumed.run, name, tmp_path, range(2, 4))
    assert whole.keys() == rest.keys()
    assert any("fp8_amax_history" in name for name in whole)
    for key, x in whole.items():
        assert same_bits(x, rest[key]), key
