"""torchrun as a program for `run_program`, so that neither it nor its ranks import torch again.

`HERE` is where it runs, `WORDS` its arguments, of which one is the script of each rank. With
`METRICS`, a file, Ctrl-C is pressed as soon as a step is in there.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch.distributed.run import main

import float8_lab.cli.train  # noqa: F401 - once for all ranks


def press_ctrl_c_at_a_step(metrics: Path) -> None:
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)  # to torchrun, as a terminal does


os.chdir(os.environ["HERE"])
torch.set_num_threads(1)
if "METRICS" in os.environ:
    metrics = Path(os.environ["METRICS"])
    threading.Thread(target=press_ctrl_c_at_a_step, args=(metrics,), daemon=True).start()
each = ["--standalone", "--nproc-per-node", "2", "--start-method", "fork", "--run-path"]
main([*each, *json.loads(os.environ["WORDS"])])
