import shutil
from pathlib import Path

import pytest
import torch

from float8_lab.errors import ConfigError
from float8_lab.trainer.data import (
    Corpus,
    check_length,
    load_corpus,
    train_batch,
    validation_batches,
)


def files_of(text: torch.Tensor) -> list[bytes]:
    return bytes(text.tolist()).split(b"\0")


def test_split_is_by_file_disjoint_and_complete(text_folder: Path, corpus: Corpus) -> None:
    train, validation = files_of(corpus.train), files_of(corpus.validation)
    everything = {path.read_bytes() for path in text_folder.iterdir()}
    assert len(everything) == 12
    assert set(train) | set(validation) == everything
    assert not set(train) & set(validation)
    assert corpus.train_files == len(train)


def test_split_depends_on_names_only(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(text_folder, moved)
    again = load_corpus(moved)
    assert again.fingerprint == corpus.fingerprint
    assert torch.equal(again.train, corpus.train)

    file = moved / "a_new_file.txt"
    file.write_text("more")
    grown = load_corpus(moved)
    assert grown.fingerprint != corpus.fingerprint
    file.write_text("fewer")
    assert load_corpus(moved).fingerprint != grown.fingerprint
    stayed = set(files_of(grown.validation)) - {b"more"}
    assert stayed == set(files_of(corpus.validation))


def test_what_is_no_text_is_left_out(text_folder: Path, corpus: Corpus) -> None:
    (text_folder / "image.png").write_bytes(b"\x89PNG\x00\x01\x02")
    (text_folder / "latin1.txt").write_bytes(b"caf\xe9")
    (text_folder / "empty.txt").touch()
    (text_folder / "dangling").symlink_to(text_folder / "nowhere")
    (text_folder / ".git").mkdir()
    (text_folder / ".git" / "config").write_text("hidden")
    assert load_corpus(text_folder).fingerprint == corpus.fingerprint


def test_too_little_text_says_how_much_is_needed(corpus: Corpus) -> None:
    check_length(corpus, 100)
    with pytest.raises(ConfigError, match=r"validation split .* needs 1000001: lower --seq-len"):
        check_length(Corpus("x", torch.empty(2_000_000), corpus.validation, 1, ""), 1_000_000)
    with pytest.raises(ConfigError, match=r"train split .* 10000000000000: lower --batch-size"):
        check_length(corpus, 100, 10**11)


def test_sequences_are_addressed_by_seed_and_number_and_none_comes_twice_before_all(
    corpus: Corpus,
) -> None:
    def batch(first: int, size: int, seed: int = 0) -> torch.Tensor:
        return train_batch(corpus.train, seed=seed, first=first, batch_size=size, seq_len=16)

    whole = batch(40, 8)
    assert whole.shape == (8, 17)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, torch.cat((batch(40, 2), batch(42, 6))))
    assert torch.equal(whole, batch(40, 8))
    assert not torch.equal(whole, batch(48, 8))
    assert not torch.equal(whole, batch(40, 8, seed=1))
    text = (torch.arange(1000) // 4).to(torch.uint8)
    orders = [train_batch(text, seed=s, first=0, batch_size=372, seq_len=8) for s in (3, 4)]
    for epochs in orders:  # of 124 whole sequences in 1000 bytes: three times all of them
        first, second, third = (each[:, :-1].flatten() for each in epochs.split(124))
        assert torch.equal(first.sort()[0], text[:992])
        assert torch.equal(second.sort()[0], third.sort()[0])
        assert not torch.equal(first, second)
    assert not torch.equal(*orders)


def test_validation_is_spread_from_start_to_end_and_always_the_same() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batches, again, short = (
        [*validation_batches(each, batches=3, batch_size=2, seq_len=9)]
        for each in (text, text, text[:12])
    )
    assert [tuple(batch.shape) for batch in batches] == [(2, 10)] * 3
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    assert (batches[0][0, 0], batches[-1][-1, -1]) == (0, 199)
    assert len(short) == 3


def test_one_file_few_files_and_none(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("0123456789" * 100)
    corpus = load_corpus(file)
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)
    assert load_corpus(tmp_path).fingerprint == corpus.fingerprint
    (tmp_path / "other.txt").write_text("text")
    assert load_corpus(tmp_path).train_files == 1
    library = load_corpus()
    assert library.name == "Python standard library"
    assert len(library.train) > 5_000_000
    assert 0.02 < len(library.validation) / len(library.train) < 0.3


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data at .*missing"):
        load_corpus(tmp_path / "missing")
    for content in (b"\0\1\2", b""):
        (tmp_path / "file").write_bytes(content)
        for path in (tmp_path, tmp_path / "file"):
            with pytest.raises(ConfigError, match=r"no readable UTF-8 text"):
                load_corpus(path)
