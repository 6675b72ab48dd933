"""A hook of mkdocs: what the documents link to outside of docs/ becomes a page of the site that shows it.

The links lead somewhere in a checkout; so they lead somewhere in the site as well.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".js": "javascript"}


def on_files(files: Any, config: Any) -> Any:
    waiting = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    known = set(waiting)
    while waiting:
        document = waiting.pop()
        for link in _LINK.findall((ROOT / document).read_text(encoding="utf-8")):
            name = _named(document, link)
            if name in known or _is_the_sites(name) or not (ROOT / name).is_file():
                continue
            known.add(name)
            files.append(File.generated(config, _page(name), content=_shown(name)))
            if name.endswith(".md"):
                waiting.append(name)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    shown = page.file.src_uri.startswith("source/")
    return markdown if shown else _for_the_site(f"docs/{page.file.src_uri}", markdown)


def _for_the_site(document: str, text: str) -> str:
    """Its links to files outside of docs/, and into docs/ from outside, as links between pages."""

    def link(found: re.Match[str]) -> str:
        name = _named(document, found[1])
        return (
            posixpath.relpath(_page(name), posixpath.dirname(_page(document))) if (ROOT / name).is_file() else found[0]
        )

    return _LINK.sub(link, text)


def _named(document: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _is_the_sites(name: str) -> bool:
    return name.startswith("docs/") and not name.endswith(".py")


def _page(name: str) -> str:
    """Where it is in the site's sources."""
    if _is_the_sites(name):
        return name.removeprefix("docs/")
    return f"source/{name.removesuffix('.md').replace('README', 'readme')}.md"


def _shown(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8").rstrip()
    if name.endswith(".md"):
        return _for_the_site(name, text)
    return f"# {name}\n\n`````{_LANGUAGES.get(Path(name).suffix, 'text')}\n{text}\n`````\n"
