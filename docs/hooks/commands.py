"""Replace the line `<!-- commands -->` of a page by the `--help` of each command.

mkdocs calls it for every page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PLACE = "<!-- commands -->"
WIDTH = 88


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with a section for each command."""
    if PLACE not in markdown:
        return markdown
    from kinetic.cli.root import root

    return markdown.replace(PLACE, "\n\n".join(_sections(root, "kinetic", None)))


def _sections(command: Any, name: str, parent: Any) -> Iterator[str]:
    ctx = command.make_context(
        name.rpartition(" ")[2], [], parent=parent, resilient_parsing=True, max_content_width=WIDTH
    )
    ctx.terminal_width = WIDTH
    yield f"## {name}\n\n```text\n{command.get_help(ctx)}\n```"
    for word in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        yield from _sections(command.get_command(ctx, word), f"{name} {word}", ctx)
