"""Write the documentation for programs that read.

In: the pages as mkdocs builds them. Out, in the site: each page as Markdown, all of them in
`llms-full.txt`, and `llms.txt`, an index as https://llmstxt.org describes it. A link in these files
that leads nowhere is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REFERENCE = re.compile(r"^::: (\S+)\n((?:^    .*\n|\n(?=    ))*)", re.MULTILINE)
"""A name that mkdocstrings replaces by its signature and docstring, and its options."""
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->\n+", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s]*?)(#[^)\s]*)?(?=\))")
HIDDEN = ["!^_"]

_pages: dict[str, str] = {}
_sections: dict[str, list[str]] = {}
_modules: list[Any] = []
"""The package, read once: that takes seconds."""


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the sections with their pages, in the order of the navigation."""
    _sections.clear()
    for page in nav.pages:
        section = page.parent.title if page.parent else "Start"
        _sections.setdefault(section, []).append(page.file.src_uri)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the page, with the reference written out."""
    text = "".join(
        part if part.startswith("```") else COMMENT.sub("", part) for part in FENCED.split(markdown)
    )
    _pages[page.file.src_uri] = REFERENCE.sub(lambda match: _describe(match[1], match[2]), text)
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Write the files, and check their links."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    index = [f"# {config['site_name']}", f"> {config['site_description']}"]
    index.append("All pages in one file: [llms-full.txt](llms-full.txt)")
    for section, names in _sections.items():
        lines = [
            f"- [{title_of(_pages[name])}]({name}): {summary_of(_pages[name])}" for name in names
        ]
        index.append(f"## {section}\n\n" + "\n".join(lines))
    names = [name for names in _sections.values() for name in names]
    files = {name: _pages[name] for name in names}
    files["llms.txt"] = "\n\n".join(index) + "\n"
    files["llms-full.txt"] = "\n\n".join(rebase(_pages[name], name) for name in names)
    for name, text in files.items():
        (site / name).write_text(text, encoding="utf-8")
    broken = [
        f"{name}: {link}"
        for name, text in files.items()
        for link in broken_links(text, site / name)
    ]
    if broken:
        raise PluginError("links of the Markdown files lead nowhere:\n  " + "\n  ".join(broken))


def title_of(page: str) -> str:
    """Return the first heading."""
    return page.partition("# ")[2].partition("\n")[0]


def summary_of(page: str) -> str:
    """Return the first sentence below the title, without links and line breaks."""
    prose = "".join(part for part in FENCED.split(page) if not part.startswith("```"))
    paragraph = prose.partition("# ")[2].partition("\n")[2].strip().partition("\n\n")[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.)\s", plain)[0].rstrip(":")


def rebase(page: str, name: str) -> str:
    """Return the page with links that hold for a file at the root of the site."""

    def from_root(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link[1]))
        return (path if link[1] else name) + (link[2] or "")

    return "".join(
        part if part.startswith("```") else LINK.sub(from_root, part) for part in FENCED.split(page)
    )


def broken_links(text: str, path: Path) -> Iterator[str]:
    """Yield the links of a written file whose page, file or heading does not exist."""
    prose = "".join(part for part in FENCED.split(text) if not part.startswith("```"))
    for target, anchor in set(LINK.findall(prose)):
        file = path.parent / target if target else path
        built = file.with_suffix(".html")
        if not file.exists():
            yield target
        elif anchor and f'id="{anchor[1:]}"' not in built.read_text(encoding="utf-8"):
            yield target + anchor


def _describe(name: str, options: str) -> str:
    import yaml

    chosen = (yaml.safe_load(options) or {}).get("options", {})
    level = chosen.get("heading_level", 2)
    heading = name.rpartition(".")[2] if "._" in name else name.removeprefix("kinetic.")
    return "\n\n".join(_parts(_find(name), heading, level, chosen)) + "\n\n"


def _find(name: str) -> Any:
    import griffe

    if not _modules:
        _modules.append(griffe.load("kinetic"))
    item = _modules[0][name.removeprefix("kinetic.")]
    return item.final_target if item.is_alias else item


def _parts(thing: Any, name: str, level: int, options: dict[str, Any]) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    function = thing
    if thing.is_class and options.get("merge_init_into_class"):
        function = thing.all_members["__init__"]
    if function.is_function:
        signature = function.signature().replace("__init__", thing.name, 1)
        yield f"```python\n{_break_lines(signature)}\n```"
    for documented in dict.fromkeys((thing, function)):
        if documented.docstring:
            yield documented.docstring.value
    if not thing.is_class:
        return
    members = thing.all_members if options.get("inherited_members") else thing.members
    for item in members.values():
        member = item.final_target if item.is_alias else item
        if member.docstring and _is_shown(member.name, options.get("filters", HIDDEN)):
            yield from _parts(member, f"{name}.{member.name}", level + 1, {})


def _is_shown(name: str, filters: list[str]) -> bool:
    """Apply filters as mkdocstrings does: the last one that matches decides."""
    is_shown = True
    for pattern in filters:
        if re.search(pattern.removeprefix("!"), name):
            is_shown = not pattern.startswith("!")
    return is_shown


def _break_lines(signature: str) -> str:
    """Put each parameter of a long signature on a line of its own."""
    if len(signature) <= 100:
        return signature
    depth, out = 0, ""
    for char in signature:
        depth += (char in "([{") - (char in ")]}")
        if char == ")" and depth == 0:
            out += ",\n"
        out += char
        if (char == "(" and depth == 1) or (char == "," and depth == 1):
            out += "\n   "
    return out.replace("(\n   ", "(\n    ")
