"""Hooks of `make docs`: pages from outside of docs/, and links that lead out of it.

README.md is the first page. Links between pages stay as they are written, so that they work in the
repository as well; those to other files of the repository lead there.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that lie beside docs/, and what the site calls them."""

LINK = re.compile(r"(\]\()([^)\s:]*)(\))")


def on_config(config: MkDocsConfig) -> None:
    """Take the address of the repository from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (config.repo_url,) = re.findall(r'^Repository = "(.+)"', text, re.MULTILINE)
    config.repo_name = config.repo_url.partition("//")[2].partition("/")[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and plots from outside of docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn relative links, as the repository has them, into those of the site."""
    sources = {name: source for source, name in PAGES.items()}
    here = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def of_site(link: re.Match[str]) -> str:
        path, hash_, anchor = link[2].partition("#")
        if not path:
            return link[0]
        file = posixpath.normpath(posixpath.join(here, path))
        if not (ROOT / file).exists():
            return link[0]  # which mkdocs reports
        name = PAGES.get(file, file.removeprefix("docs/"))
        if file.endswith(".png"):
            name = name.replace("benchmarks/", "")
        if files.get_file_from_path(name) is None:
            name = f"{config.repo_url}/blob/main/{file}"
        return f"{link[1]}{name}{hash_}{anchor}{link[3]}"

    return LINK.sub(of_site, markdown)
