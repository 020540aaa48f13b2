"""Write the list of the decorator's options: the table of the code, in words.

In: the page with the line `<!-- options -->`. Out: the page with a line for each option.
Called by mkdocs for every page.
"""

from __future__ import annotations

from typing import Any

PLACE = "<!-- options -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the options in their place."""
    if PLACE not in markdown:
        return markdown
    from kinetic._core.options import TABLE

    lines = ["| Option | Default | On the command line | Meaning |", "|---|---|---|---|"]
    for row in TABLE.values():
        words = () if row.flag is None else (row.flag.names[0], row.flag.metavar)
        flag = f"`{' '.join(words[:1] if row.default is False else words)}`" if words else ""
        lines.append(f"| `{row.name}` | `{row.default!r}` | {flag} | {row.help} |")
    return markdown.replace(PLACE, "\n".join(lines))
