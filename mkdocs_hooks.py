"""Hooks of `make docs`: pages and files from outside of docs/.

README.md is the first page. Links stay as they are written, so that they work in the repository as
well; results, notes and examples, which pages link to, are copied into the site.
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
    "benchmarks/NOTES.md": "notes.md",
}
"""Pages that lie beside docs/, and what the site calls them."""

LINK = re.compile(r"(\]\()([^)\s:]*)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files they link to, from outside of docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    results, examples = ROOT.glob("benchmarks/results/*.*"), ROOT.glob("examples/*.*")
    for path in (*results, ROOT / "benchmarks/page.sh", *examples):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
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
        return f"{link[1]}{name}{hash_}{anchor}{link[3]}"

    return LINK.sub(of_site, markdown)
