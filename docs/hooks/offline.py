"""Refuse a site that would fetch something from another host when it is read.

In: the built pages and style sheets. Out: an error that names what they would fetch. Called by
mkdocs when a build is done.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

FETCHING = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "link": "href",
    "object": "data", "script": "src", "source": "src", "track": "src", "use": "href",
    "video": "src",
}  # fmt: skip
"""Elements that make a browser fetch something, and the attribute that says from where. A link that
people click does not."""
NOT_FETCHED = {"alternate", "author", "canonical", "license", "next", "prev"}
IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


def on_post_build(config: Any, **_: Any) -> None:
    """Look at everything that was built."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    found = [
        f"{path.relative_to(site)}: {url}"
        for path in sorted(site.rglob("*"))
        for url in fetched(path)
    ]
    if found:
        raise PluginError(
            "the site must not fetch anything from other hosts:\n  " + "\n  ".join(found)
        )


def fetched(path: Path) -> list[str]:
    """Return what a browser would fetch from other hosts to show this file."""
    if path.suffix == ".css":
        return IN_CSS.findall(path.read_text(encoding="utf-8"))
    if path.suffix != ".html":
        return []
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page.found


class _Page(HTMLParser):
    """Collects the addresses that one page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        given = {name: value or "" for name, value in attrs}
        places = [given.get(FETCHING.get(tag, ""), ""), *given.get("srcset", "").split()]
        if tag == "link" and set(given.get("rel", "").split()) <= NOT_FETCHED:
            places = []
        self.found += [place for place in places if re.match(r"(https?:)?//", place)]
        self.found += IN_CSS.findall(given.get("style", ""))
        if "mermaid" in given.get("class", "").split():
            self.found.append("a mermaid diagram, for which the theme fetches a library")

    def handle_data(self, data: str) -> None:
        """Look at text: style sheets may lie between tags."""
        if self.get_starttag_text() and (self.get_starttag_text() or "").startswith("<style"):
            self.found += IN_CSS.findall(data)
