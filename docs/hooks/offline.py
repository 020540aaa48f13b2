"""Refuse a site whose pages or style sheets would fetch something from another host.

mkdocs calls it when a build is done.
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
"""Elements that make a browser fetch something, with the attribute that has the address. Links that
people click are not among them."""
NOT_FETCHED = {"alternate", "author", "canonical", "license", "next", "prev"}
IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


def on_post_build(config: Any, **_: Any) -> None:
    """Raise an error that names each file of the site and the address that it would fetch."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    addresses = [
        f"{path.relative_to(site)}: {url}"
        for path in sorted(site.rglob("*"))
        for url in fetched(path)
    ]
    if addresses:
        raise PluginError(
            "the site must not fetch anything from other hosts:\n  " + "\n  ".join(addresses)
        )


def fetched(path: Path) -> list[str]:
    """Return the addresses on other hosts that a browser would fetch to show this file."""
    if path.suffix == ".css":
        return IN_CSS.findall(path.read_text(encoding="utf-8"))
    if path.suffix != ".html":
        return []
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page.addresses


class _Page(HTMLParser):
    """Collects the addresses that one page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses in the attributes of an element."""
        attributes = {name: value or "" for name, value in attrs}
        places = [attributes.get(FETCHING.get(tag, ""), ""), *attributes.get("srcset", "").split()]
        if tag == "link" and set(attributes.get("rel", "").split()) <= NOT_FETCHED:
            places = []
        self.addresses += [place for place in places if re.match(r"(https?:)?//", place)]
        self.addresses += IN_CSS.findall(attributes.get("style", ""))
        if "mermaid" in attributes.get("class", "").split():
            self.addresses.append("a mermaid diagram, for which the theme fetches a library")

    def handle_data(self, data: str) -> None:
        """Collect the addresses in a style sheet between tags."""
        if self.get_starttag_text() and (self.get_starttag_text() or "").startswith("<style"):
            self.addresses += IN_CSS.findall(data)
