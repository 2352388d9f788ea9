"""Registration of optional features (wings) in tables that the core reads.

Each feature here is a folder that imports the core, which imports only mixins of features, in
`linear/base.py` and `linear/module.py`. To remove one, delete its folder, its lines here, its names
in `float8/__init__.py`, its mixin, and for `fsdp` `experts/gather.py`: see `tests/test_wings.py`.
"""

from float8.checkpoints.loaded import LoadedInFloat8, Quantizers
from float8.config import CONFIG_CHECKS
from float8.convert.conversion import CONVERSIONS, FEATURES
from float8.convert.linears import Linears
from float8.delayed.sync import DelayedScaling
from float8.experts.conversion import Experts
from float8.fsdp.weights import Float8Gathers, refuse_shards
from float8.linear import Float8Module
from float8.linear.source import REFUSALS
from float8.parallel.ddp import DataParallel
from float8.parallel.sharded import Shards
from float8.weights.only import refuse_only
from float8.weights.update import HeldWeights

Float8Module._float8_shards = Shards()

REFUSALS[:] = [
    refuse_shards,
    refuse_only,
]
CONVERSIONS[:] = [
    Experts(),
    LoadedInFloat8(),
    Linears(),
]
FEATURES[:] = [
    DelayedScaling(),
    HeldWeights(),
    Float8Gathers(),
    Quantizers(),
    DataParallel(),
]
CONFIG_CHECKS[:] = [feature.check_config for feature in FEATURES]
