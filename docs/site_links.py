"""A hook of mkdocs for pages that link into the repository: such a link becomes the path of its file.

The pages are read in the repository too, where ``../../shardwise/technique/zero.py`` leads to the file. A site has no
such files, and its address is not known here. Pictures of benchmarks are taken into the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PICTURES = "pictures"
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """The pages, and the pictures of the benchmarks."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with links inside ``docs/`` alone."""
    return linked_inside(markdown, posixpath.dirname(page.file.src_uri))


def linked_inside(markdown: str, folder: str) -> str:
    """The text of a page in ``folder``, without links to files outside of ``docs/``."""

    def kept(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        place = posixpath.normpath(posixpath.join(folder or ".", target.partition("#")[0]))
        if not place.startswith("../"):
            return match[0]
        path = place.removeprefix("../")
        if picture:
            return f"![{text}]({posixpath.relpath(f'{PICTURES}/{posixpath.basename(path)}', folder or '.')})"
        named = text.strip("`")
        return f"`{path}`" if path.endswith(named) else f"{text} (`{path}`)"

    return _LINK.sub(kept, markdown)
