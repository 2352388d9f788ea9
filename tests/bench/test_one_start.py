"""Recipes that go on from the same weights and moments."""

import copy
from pathlib import Path

import torch

from float8_lab.bench.one_start import AGAIN, bench_one_start, continued
from float8_lab.trainer import data
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.loop import Trainer

DATA = Path(__file__).resolve().parents[2] / "docs"


def test_runs_go_on_from_one_start_and_leave_it_alone() -> None:
    config = TrainConfig.create(
        model="tiny", steps=4, batch_size=2, seq_len=32, eval_batches=1, eval_interval=0,
        data=str(DATA), checkpoint_interval=0, final_checkpoint=False, tensorboard=False,
        device="cpu", recipe=HIGH_PRECISION,
    )  # fmt: skip
    corpus = data.load_corpus(config.data)
    *ready, rows = bench_one_start(config, corpus, ["delayed"], 2)
    assert ready == [[]] * 3
    assert [row["recipe"] for row in rows] == [HIGH_PRECISION, AGAIN, "delayed"]
    first, again, delayed = (row["val_loss"] for row in rows)
    assert first == again != delayed
    gaps = [row["gap_percent"] for row in rows]
    assert gaps == [0, 0, 100 * (delayed / first - 1)]
    whole = Trainer(config, corpus)
    for _ in range(2):
        whole.train_step()
    before = copy.deepcopy(whole.model.state_dict())
    continued(config, corpus, whole).train_step()
    assert all(torch.equal(before[n], x) for n, x in whole.model.state_dict().items())
    for _ in range(2):
        whole.train_step()
    assert whole.validate() == first  # as if it had not stopped
