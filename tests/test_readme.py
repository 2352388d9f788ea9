"""The README's code samples run, word for word."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Samples in a fence of `py` need several ranks: tests/distributed runs them.
README = Path(__file__).parent.parent / "README.md"
SAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_readme_has_its_samples() -> None:
    assert len(SAMPLES) == 5


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_sample_runs(index: int, tmp_path: Path) -> None:
    script = tmp_path / "sample.py"
    script.write_text(SAMPLES[index])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
