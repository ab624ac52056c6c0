"""Makes a site of this repository's pages: mkdocs calls these functions, mkdocs.yaml has the settings.

Pages are written for the forge: their links are relative and lead to any file of the repository. Here a link to a page
of the site leads there, and a link to another file to its source where the repository is published (`repo_url`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FENCE_OR_LINK = re.compile(r"```.*?```|\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", re.DOTALL)
ITEM = re.compile(r"(?:[*+-]|\d+\.) ")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside docs/, and one page of the API for each public module."""
    from mkdocs.structure.files import File

    for source, place in config.extra["files"].items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for module, names in public_names(config):
        text = "\n\n".join(
            [
                f"# `{module}`",
                f"::: {module}\n    options: {{members: [], show_root_heading: false, show_root_toc_entry: false}}",
            ]
        )
        parts = [f"::: {module}.{name}" for name in names]
        files.append(File.generated(config, f"reference/{module}.md", content="\n\n".join([text, *parts])))
    return files


def public_names(config: MkDocsConfig) -> Iterator[tuple[str, list[str]]]:
    """Each public module and what it offers."""
    listed = (ROOT / config.extra["public_names"]).read_text(encoding="utf-8").split()
    modules = sorted({name.rpartition(".")[0] for name in listed})
    for module in modules:
        yield module, [name.rpartition(".")[2] for name in listed if name.rpartition(".")[0] == module]


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site needs them."""
    source = page.file.abs_src_path
    if source is None:
        return markdown  # a page of the API
    folder = Path(source).relative_to(ROOT).parent

    def in_the_site(found: re.Match[str]) -> str:
        whole, text, link = found[0], found[1], found[2]
        if link is None or "://" in link or link.startswith("#"):
            return whole
        name, mark, section = link.partition("#")
        path = posixpath.normpath(str(folder / name))
        place = place_of(path, config, files)
        if place is not None:
            there = posixpath.relpath(place, posixpath.dirname(page.file.src_uri))
            return f"[{text}]({there}{mark}{section})"
        if not (ROOT / path).exists():
            return whole  # mkdocs says that the link is dead
        return f"[{text}]({source_address(path, config)}{mark}{section})" if config.repo_url else text

    return FENCE_OR_LINK.sub(in_the_site, indented(markdown))


def indented(markdown: str) -> str:
    """Lists as this Markdown reads them: what belongs to an item at four columns, an item of several blocks apart.

    The forge's Markdown takes the two or three columns of the item's mark.
    """
    lines: list[str] = []
    width, fenced, apart = 0, False, False
    for line in markdown.splitlines():
        begins = None if fenced else ITEM.match(line)
        if begins:
            lines += [""] if width and apart and lines[-1] else []
            width, apart = begins.end(), False
        elif line.startswith(("```", "~~~")):
            width, fenced = 0, not fenced
        elif line and not line.startswith(" " * width):
            width = 0
        apart = apart or not line
        inside = width and line and not begins
        lines.append(" " * (4 - width) + line if inside else line)
    return "\n".join(lines)


def place_of(path: str, config: MkDocsConfig, files: Files) -> str | None:
    """Where the site has a file of the repository; None: it does not."""
    outside: dict[str, Any] = config.extra["files"]
    if path in outside:
        return str(outside[path])
    inside = path.removeprefix("docs/")
    file = files.get_file_from_path(inside) if inside != path else None
    return inside if file is not None and not file.inclusion.is_excluded() else None


def source_address(path: str, config: MkDocsConfig) -> str:
    """Where the forge shows a file or folder."""
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.repo_url.rstrip('/')}/{kind}/{config.extra['revision']}/{path}"
