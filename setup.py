"""Gives the package its long description: README.md without the links into the repository.

All else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
LINK = r"!?\[([^][]*)\]\((?![a-z]+:)[^)]*\)"

setup(long_description=re.sub(LINK, r"\1", README), long_description_content_type="text/markdown")
