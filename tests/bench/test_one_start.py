"""`benchmarks/one_start.py`: recipes that go on from the same weights and moments."""

import copy
from pathlib import Path
from threading import Event

import torch

from float8_lab.trainer import data
from float8_lab.trainer.config import HIGH_PRECISION, TrainConfig
from float8_lab.trainer.loop import Trainer
from support.scripts import ROOT, load_script


def test_runs_go_on_from_one_start_and_leave_it_alone() -> None:
    script = load_script("one_start")
    config = TrainConfig.create(
        model="tiny", steps=5, batch_size=2, seq_len=64, eval_batches=1, eval_interval=0,
        data=str(ROOT / "src" / "float8"), checkpoint_interval=0, final_checkpoint=False,
        tensorboard=False, device="cpu",
    )  # fmt: skip
    corpus = data.load_corpus(Path(config.data))
    start = script.started(config, corpus, 2)
    before = copy.deepcopy(start)
    runs = {}
    for name in (HIGH_PRECISION, "delayed", "again"):
        recipe = HIGH_PRECISION if name == "again" else name
        runs[name] = script.continued(config.replace(recipe=recipe), corpus, start, 2)
        assert len(runs[name].train) == 3
    assert runs["again"].train == runs[HIGH_PRECISION].train != runs["delayed"].train
    whole = script.Losses()
    Trainer(config.replace(recipe=HIGH_PRECISION), corpus, [whole]).run(Event())
    assert runs[HIGH_PRECISION].train == whole.train[2:]  # as if it had not stopped
    assert runs[HIGH_PRECISION].validation == whole.validation
    assert all(torch.equal(before["model"][n], x) for n, x in start["model"].items())


def test_gaps_are_to_the_mean_of_the_runs_in_high_precision() -> None:
    script, rows = load_script("one_start"), []
    for name, last in ((HIGH_PRECISION, 3.0), (script.AGAIN, 5.0), ("tensorwise", 6.0)):
        losses = script.Losses()
        losses.train, losses.validation = [9.0, 7.0, last - 1, last + 1], last
        rows.append(script.row(name, losses, last=2, window=2))
    script.gaps(rows)
    assert rows[2]["train_loss"] == [8.0, 6.0]
    for column in ("mean", "val_loss"):
        assert [row[column] for row in rows] == [3.0, 5.0, 6.0]
        assert [row[f"{column}_gap_percent"] for row in rows] == [-25.0, 25.0, 50.0]
