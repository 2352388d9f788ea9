"""The picture at the top of README.md shows what the results files say."""

import json

import pytest

from float8_lab.bench import picture


def test_the_picture_is_up_to_date() -> None:
    image = pytest.importorskip("PIL.Image").open(picture.PICTURE)
    what = picture.shown(picture.RESULTS)
    assert min(len(what["points"]), len(what["curves"])) > 2
    remedy = "run python -m float8_lab.bench.picture"
    assert json.loads(image.text[picture.SHOWN]) == what, remedy
    assert all(
        f"[{name}]" in picture.ROOT.joinpath("README.md").read_text() for name in picture.FILES
    )
