"""Replace the line `<!-- options -->` of a page by a table of the decorator's options.

mkdocs calls it for every page.
"""

from __future__ import annotations

from typing import Any

PLACE = "<!-- options -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with the table, which has the texts of `kinetic._core.options`."""
    if PLACE not in markdown:
        return markdown
    from kinetic._core.options import TABLE

    lines = ["| Option | Default | On the command line | Meaning |", "|---|---|---|---|"]
    for row in TABLE.values():
        words = () if row.flag is None else (row.flag.names[0], row.flag.metavar)
        flag = f"`{' '.join(words[:1] if row.default is False else words)}`" if words else ""
        lines.append(f"| `{row.name}` | `{row.default!r}` | {flag} | {row.help} |")
    return markdown.replace(PLACE, "\n".join(lines))
