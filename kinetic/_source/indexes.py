"""The package indexes that a project tells uv and Poetry of.

In: the project, the workspace around it, names of packages. Out: options as in a requirements.txt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kinetic._source import requirements_txt
from kinetic._source.pyproject import Pyproject, find_table

_PYPI = "pypi"


def list_options(project: Pyproject, workspace: Pyproject, names: Collection[str]) -> Iterator[str]:
    """Yield an option for each index from which hosts may need a package.

    uv and Poetry take from an explicit index only the packages that name it. Installers have no
    such option: if one of these packages is needed, the index is given for all of them, last.

    Args:
        project: with the sources of its packages.
        workspace: the project with the lock: of a member, uv reads only the indexes that the
            member's packages name.
        names: of the packages that hosts install.

    Raises:
        UsageError: an index is on this machine, or its address holds a password.
    """
    pinned = {*workspace.list_pins(names), *project.list_pins(names)}
    found = [
        *_list_uv(find_table(workspace.content, "tool", "uv"), pinned),
        *_list_poetry(find_table(workspace.content, "tool", "poetry"), pinned),
    ]
    if project.file != workspace.file:
        own = find_table(project.content, "tool", "uv").get("index", ())
        found += [_option(each) for each in own if each.get("name") in pinned]
    for option in dict.fromkeys(found):
        yield from requirements_txt.check_option(str(workspace.file), option)


def _list_uv(table: Mapping[str, Any], pinned: Collection[str]) -> Iterator[str]:
    """Yield the options of `[tool.uv]`; of several default indexes the first counts, as for uv."""
    indexes, tables = table.get("index", ()), (table, table.get("pip", {}))
    defaults = [each["url"] for each in indexes if each.get("default")]
    defaults += [each["index-url"] for each in tables if "index-url" in each]
    yield from (f"--index-url {url}" for url in defaults[:1])
    others = [each for each in indexes if not each.get("default")]
    yield from (_option(each) for each in others if not each.get("explicit"))
    for each in tables:
        yield from (f"--extra-index-url {url}" for url in each.get("extra-index-url", ()))
        # A folder of this machine only spares a download: the versions are the same.
        links = (place for place in each.get("find-links", ()) if "://" in place)
        yield from (f"--find-links {place}" for place in links)
    yield from (
        _option(each) for each in others if each.get("explicit") and each.get("name") in pinned
    )


def _list_poetry(table: Mapping[str, Any], pinned: Collection[str]) -> Iterator[str]:
    """Yield the options of `[[tool.poetry.source]]`. PyPI counts unless there is another default
    or primary source; https://python-poetry.org/docs/repositories/#package-sources."""
    by_rank: dict[str, list[str]] = {"default": [], "primary": [], "explicit": [], "": []}
    has_pypi = False
    for each in table.get("source", ()):
        rank = _find_rank(each)
        if each["name"].lower() == _PYPI:
            has_pypi = rank in ("default", "primary")
        elif rank != "explicit" or each["name"] in pinned:
            by_rank.get(rank, by_rank[""]).append(each["url"])
    main = [*by_rank["primary"], *by_rank["default"]]
    if main and not has_pypi:
        yield f"--index-url {main.pop()}"
    for url in (*main, *by_rank[""], *by_rank["explicit"]):
        yield f"--extra-index-url {url}"


def _find_rank(source: Mapping[str, Any]) -> str:
    older = "default" if source.get("default") else "secondary" if source.get("secondary") else ""
    return str(source.get("priority") or older or "primary").lower()


def _option(index: Mapping[str, Any]) -> str:
    flag = "--find-links" if index.get("format") == "flat" else "--extra-index-url"
    return f"{flag} {index['url']}"
