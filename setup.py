"""Gives the package its long description: README.md, whose links also lead somewhere elsewhere.

All else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def _found(pattern: str, file: str) -> str:
    (only,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(only)


def long_description() -> str:
    """Return README.md with its relative links made links to this version in the repository."""
    address = _found(r'^Repository = "(.+)"', "pyproject.toml")
    version = _found(r'^__version__ = "(.+)"', "src/float8/__init__.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for start, kind in ((r"!\[[^]]*\]\(", "raw"), (r"(?<!!)\[[^][]*\]\(", "blob")):
        relative = rf"({start})(?![a-z]+:|#)"
        readme = re.sub(relative, rf"\1{address}/{kind}/v{version}/", readme)
    return readme


setup(long_description=long_description(), long_description_content_type="text/markdown")
