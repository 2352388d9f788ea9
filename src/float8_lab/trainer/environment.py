"""Where a result was made: versions, device and command, without private paths."""

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from float8 import __version__


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, commit and command of this process, JSON-ready."""
    about: dict[str, Any] = {"float8": __version__, "torch": torch.__version__}
    about |= {"python": platform.python_version(), "platform": platform.platform()}
    about |= {"device": device_name(device), "device_type": device.type}
    about |= {"cuda": torch.version.cuda, "cpu_threads": torch.get_num_threads()}
    libraries = {"triton", "transformers", "peft", "torchao"}
    about |= {x.name: x.version for x in metadata.distributions() if x.name in libraries}
    words = [Path(sys.argv[0]).name, *map(public_path, sys.argv[1:])]
    return about | {"git_commit": git_commit(), "command": shlex.join(words)}


def device_name(device: torch.device) -> str:
    """Name of the GPU or the CPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if name := re.search(r"(?m)^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text()):
            return name[1].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return FLOAT8_COMMIT, else the commit of these sources, "-dirty" if changed, else None."""
    if told := os.environ.get("FLOAT8_COMMIT"):
        return told
    source = Path(__file__).resolve().parents[2]  # of both packages

    def git(*words: str) -> str:
        command = ["git", "-C", str(source), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "float8_lab")
        commit = git("rev-parse", "HEAD")
        # Not `describe --dirty`, which does not see new files.
        return commit + "-dirty" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.CalledProcessError):
        return None


def public_path(text: str) -> str:
    """Text as it is; but of an absolute path only what is below the current folder, or its name."""
    path, here = Path(text), Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(Path("...", path.name)) if path.is_absolute() else text
