"""Requirements of a pyproject.toml: standard dependencies, extras and dependency groups.

In: the file, with the choices in its `[tool.kinetic]`. Out: lines of a requirements.txt.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._source import requirements_txt
from kinetic._source.editable import Package
from kinetic._source.requirements_txt import find_name, normalize_name
from kinetic.errors import UsageError


@dataclass(frozen=True)
class Pyproject:
    """A pyproject.toml.

    Attributes:
        file: its path.
        content: as parsed.
        extras: names in `[project.optional-dependencies]` that hosts also need.
        groups: names in `[dependency-groups]` that hosts also need.
    """

    file: Path
    content: Mapping[str, Any]
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The project's name, normalized; "" if it has none."""
        return normalize_name(self._table("project").get("name", ""))

    @property
    def is_chosen(self) -> bool:
        """True if the file has a `[tool.kinetic]` table, so that a requirements.txt next to it is
        ignored."""
        return "kinetic" in self._table("tool")

    @property
    def has_dependencies(self) -> bool:
        """True if the file declares dependencies."""
        project = self._table("project")
        declared = {"dependencies", "optional-dependencies"} & project.keys()
        dynamic = "dependencies" in project.get("dynamic", ())
        return bool(declared or dynamic or self._needs_poetry() or self.extras or self.groups)

    def read_lines(self, editable: Collection[Package]) -> Iterator[str]:
        """Yield the project's requirements.

        Raises:
            UsageError: hosts cannot install it.
        """
        project = self._table("project")
        if self._needs_poetry():
            raise UsageError(
                f"{self.file}: kinetic does not read dependencies and sources in [tool.poetry]. "
                "Write a requirements.txt next to it (`poetry export -o requirements.txt`), or "
                "move the dependencies to [project], as in Poetry 2, and the sources to "
                "[[tool.uv.index]]."
            )
        if "dependencies" in project:
            yield from self._check_lines(project["dependencies"], editable)
        elif "dependencies" in project.get("dynamic", ()):
            yield from self._read_dynamic(editable)
        for extra in self.extras:
            yield from self._check_lines(self._list_extra(extra), editable)
        for group in self.groups:
            yield from self._check_lines(self._list_group(group), editable)

    def _needs_poetry(self) -> bool:
        """True if dependencies or their sources are in tables that only Poetry reads."""
        poetry = self._table("tool", "poetry")
        named = set(poetry.get("dependencies", ())) - {"python"}
        is_standard = "dependencies" in self._table("project")
        sources = (source.get("name", "").lower() for source in poetry.get("source", ()))
        return bool(named and not is_standard) or any(name != "pypi" for name in sources)

    def list_pins(self, names: Collection[str]) -> Iterator[str]:
        """Yield the names of the indexes from which uv must take these packages."""
        for name in names:
            index = self._find_source(name).get("index")
            if index:
                yield index

    def _check_lines(self, texts: Iterable[str], editable: Collection[Package]) -> Iterator[str]:
        """Yield requirements, each with its source from `[tool.uv.sources]`, such as a git URL."""
        for text in texts:
            about = {} if "@" in text else self._find_source(find_name(text))
            line = _add_source(text, _find_source(about))
            yield from requirements_txt.check_requirement(
                str(self.file), line, self.file.parent, editable
            )

    def _find_source(self, name: str) -> Mapping[str, Any]:
        """Return the source of a package in `[tool.uv.sources]` that applies to hosts and to the
        chosen extras and groups."""
        for key, value in self._table("tool", "uv", "sources").items():
            if normalize_name(key) == name:
                sources = [value] if isinstance(value, dict) else value
                return next((source for source in sources if self._is_met(source)), {})
        return {}

    def _is_met(self, source: Mapping[str, Any]) -> bool:
        return (
            requirements_txt.is_for_hosts(source.get("marker", ""))
            and source.get("extra", "") in ("", *self.extras)
            and source.get("group", "") in ("", *self.groups)
        )

    def _read_dynamic(self, editable: Collection[Package]) -> Iterator[str]:
        about = self._table("tool", "setuptools", "dynamic").get("dependencies", {})
        files = about.get("file", ())
        if not files:
            raise UsageError(
                f"{self.file}: only the build backend can read dynamic dependencies. Write a "
                "requirements.txt next to the file."
            )
        for name in [files] if isinstance(files, str) else files:
            yield from requirements_txt.read_lines(self.file.parent / name, editable)

    def _list_extra(self, name: str, including: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the requirements of an extra and of the project's extras that it includes."""
        table = self._table("project", "optional-dependencies")
        key = self._find_key(name, table, "extra")
        for text in table.get(key, ()) if key not in including else ():
            if self.name and find_name(text) == self.name:
                requirement = requirements_txt.read_requirement(str(self.file), text)
                for other in sorted(requirement.extras):
                    yield from self._list_extra(other, (*including, key))
            else:
                yield text

    def _list_group(self, name: str, including: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the requirements of a dependency group, including the groups that it includes."""
        table = self._table("dependency-groups")
        key = self._find_key(name, table, "group")
        if key in including:
            raise UsageError(f"{self.file}: the dependency group {key!r} includes itself.")
        for entry in table[key]:
            if isinstance(entry, str):
                yield entry
            elif isinstance(entry, dict) and set(entry) == {"include-group"}:
                yield from self._list_group(entry["include-group"], (*including, key))
            else:
                raise UsageError(
                    f"{self.file}: the dependency group {key!r} contains {entry!r}, which is "
                    "neither a requirement nor {include-group = ...}."
                )

    def _find_key(self, name: str, table: Mapping[str, Any], kind: str) -> str:
        for key in table:
            if normalize_name(key) == normalize_name(name):
                return key
        listed = f"It has {', '.join(sorted(table))}." if table else "It has none."
        raise UsageError(f"{self.file} has no {kind} {name!r}. {listed}")

    def _table(self, *keys: str) -> Mapping[str, Any]:
        return find_table(self.content, *keys)


def read_project(file: Path) -> Pyproject:
    """Read a pyproject.toml; an empty one if the file does not exist.

    Raises:
        UsageError: it cannot be read, or `[tool.kinetic]` is not as documented.
    """
    try:
        content = tomllib.loads(requirements_txt.read_file(file)) if file.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not valid TOML: {error}.") from error
    chosen = find_table(content, "tool", "kinetic")
    for key, value in chosen.items():
        if key not in ("extras", "groups"):
            raise UsageError(
                f"{file}: [tool.kinetic] has an unknown key {key!r}. It takes `extras` and "
                "`groups`, which are lists of names."
            )
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UsageError(
                f'{file}: {key} of [tool.kinetic] must be a list of names, such as ["train"].'
            )
    return Pyproject(file, content, **{key: tuple(names) for key, names in chosen.items()})


def _add_source(text: str, source: str) -> str:
    if not source:
        return text
    requirement, _, marker = text.partition(";")
    name = re.split(r"[<>=!~(]", requirement)[0].strip()
    return f"{name}{source} ;{marker}" if marker else name + source


def find_table(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a nested table; an empty one if there is none."""
    for key in keys:
        content = content.get(key, {})
        if not isinstance(content, dict):
            return {}
    return content


def _find_source(about: Mapping[str, Any]) -> str:
    """Return " @ URL" for a requirement that takes its package from git, a URL or a path; "" if the
    package comes from an index."""
    if "git" in about:
        revision = next((about[key] for key in ("rev", "tag", "branch") if key in about), "")
        return f" @ git+{about['git']}" + (f"@{revision}" if revision else "")
    if "url" in about:
        return f" @ {about['url']}"
    return f" @ file:{about.get('path', '.')}" if {"path", "workspace"} & about.keys() else ""
