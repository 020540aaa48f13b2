"""The requirements of a pyproject.toml: standard, from dependency groups, or of Poetry.

In: the file, with the choices in its `[tool.kinetic]`. Out: lines as of a requirements.txt.
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
from kinetic._source.requirements_txt import find_name, is_for_hosts, normalize_name
from kinetic.errors import UsageError

_PARTS = re.compile(r"\s*,\s*|(?<=[\w.*])\s+(?=[<>=!~^])")


@dataclass(frozen=True)
class Pyproject:
    """A pyproject.toml.

    Attributes:
        file: its path.
        content: as parsed.
        extras: of `[project.optional-dependencies]`, which hosts need as well.
        groups: of `[dependency-groups]`, which hosts need as well.
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
        """Whether it says that it counts, and not a requirements.txt beside it."""
        return "kinetic" in self._table("tool")

    @property
    def has_dependencies(self) -> bool:
        """Whether it says what it depends on."""
        project, of_poetry = self._table("project"), self._table("tool", "poetry")
        declared = {"dependencies", "optional-dependencies"} & project.keys()
        dynamic = "dependencies" in project.get("dynamic", ())
        return bool(
            declared or dynamic or of_poetry.get("dependencies") or self.extras or self.groups
        )

    def read_lines(self, editable: Collection[Package]) -> Iterator[str]:
        """Yield what the project asks for.

        Raises:
            UsageError: hosts cannot install it.
        """
        project = self._table("project")
        if "dependencies" in project:
            yield from self._check_lines(project["dependencies"], editable)
        elif "dependencies" in project.get("dynamic", ()):
            yield from self._read_dynamic(editable)
        else:
            yield from self._check_lines(self._list_poetry(None), editable)
        for extra in self.extras:
            yield from self._check_lines(self._list_extra(extra), editable)
        for group in self.groups:
            yield from self._check_lines(self._list_group(group), editable)

    def list_pins(self, names: Collection[str]) -> Iterator[str]:
        """Yield the names of the indexes from which hosts take these packages."""
        for name in names:
            index = self._find_source(name).get("index")
            if index:
                yield index
        of_poetry = self._table("tool", "poetry")
        groups = self._table("tool", "poetry", "group").values()
        for table in (of_poetry, *groups):
            for name, given in table.get("dependencies", {}).items():
                if normalize_name(name) in names:
                    yield from _list_poetry_sources(given)

    def _check_lines(self, texts: Iterable[str], editable: Collection[Package]) -> Iterator[str]:
        """Yield requirements with their sources of `[tool.uv.sources]`."""
        for text in texts:
            about = {} if "@" in text else self._find_source(find_name(text))
            line = _add_source(text, _find_source(about))
            yield from requirements_txt.check_requirement(
                str(self.file), line, self.file.parent, editable
            )

    def _find_source(self, name: str) -> Mapping[str, Any]:
        """Return what `[tool.uv.sources]` says of a package, for hosts and what is chosen."""
        for key, given in self._table("tool", "uv", "sources").items():
            if normalize_name(key) == name:
                sources = [given] if isinstance(given, dict) else given
                return next((each for each in sources if self._is_met(each)), {})
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
                f"{self.file}: its dependencies are dynamic, which only its build backend "
                "understands. Write a requirements.txt beside it."
            )
        for each in [files] if isinstance(files, str) else files:
            yield from requirements_txt.read_lines(self.file.parent / each, editable)

    def _list_poetry(self, names: Collection[str] | None) -> Iterator[str]:
        where = f"{self.file}, [tool.poetry.dependencies]"
        table = self._table("tool", "poetry", "dependencies")
        return _list_poetry(where, table, names)

    def _list_extra(self, name: str, around: tuple[str, ...] = ()) -> Iterator[str]:
        """An extra, with those of the project itself that it names."""
        known = self._table("project", "optional-dependencies")
        of_poetry = {} if known else self._table("tool", "poetry", "extras")
        key = self._find_key(name, known or of_poetry, "extra")
        if key in of_poetry:
            yield from self._list_poetry(of_poetry[key])
        for text in known.get(key, ()) if key not in around else ():
            if self.name and find_name(text) == self.name:
                asked = requirements_txt.read_requirement(str(self.file), text)
                for other in sorted(asked.extras):
                    yield from self._list_extra(other, (*around, key))
            else:
                yield text

    def _list_group(self, name: str, around: tuple[str, ...] = ()) -> Iterator[str]:
        """A dependency group, with those that it includes."""
        known = {**self._table("tool", "poetry", "group"), **self._table("dependency-groups")}
        key = self._find_key(name, known, "group")
        if key in around:
            raise UsageError(f"{self.file}: the group {key!r} includes itself.")
        if isinstance(known[key], dict):
            table = known[key].get("dependencies", {})
            yield from _list_poetry(f"{self.file}, group {key}", table, table)
            return
        for each in known[key]:
            if isinstance(each, str):
                yield each
            elif isinstance(each, dict) and set(each) == {"include-group"}:
                yield from self._list_group(each["include-group"], (*around, key))
            else:
                raise UsageError(
                    f"{self.file}: the group {key!r} holds {each!r}, which is neither a "
                    "requirement nor {include-group = ...}."
                )

    def _find_key(self, name: str, table: Mapping[str, Any], kind: str) -> str:
        for key in table:
            if normalize_name(key) == normalize_name(name):
                return key
        listed = f"It has {', '.join(sorted(table))}." if table else "It has none."
        raise UsageError(f"{self.file}: there is no {kind} {name!r}. {listed}")

    def _table(self, *keys: str) -> Mapping[str, Any]:
        return find_table(self.content, *keys)


def read_project(file: Path) -> Pyproject:
    """Return what a pyproject.toml says; nothing, if there is none.

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
                f"{file}: [tool.kinetic] has {key!r}; it takes extras and groups, lists of names."
            )
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(
                f'{file}: {key} of [tool.kinetic] must be a list of names, such as ["train"].'
            )
    return Pyproject(file, content, **{key: tuple(names) for key, names in chosen.items()})


def _add_source(text: str, source: str) -> str:
    if not source:
        return text
    asked, _, marker = text.partition(";")
    name = re.split(r"[<>=!~(]", asked)[0].strip()
    return f"{name}{source} ;{marker}" if marker else name + source


def find_table(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a table inside another one; an empty one if there is none."""
    for key in keys:
        content = content.get(key, {})
        if not isinstance(content, dict):
            return {}
    return content


def _list_poetry(
    where: str, table: Mapping[str, Any], names: Collection[str] | None = None
) -> Iterator[str]:
    """Yield the requirements of a table of Poetry's, in standard notation.

    Those of these names, or else those that are not optional.

    Raises:
        UsageError: there is no standard notation for one of them.
    """
    wanted = None if names is None else set(map(normalize_name, names))
    for name, given in table.items():
        for each in given if isinstance(given, list) else [given]:
            about = {"version": each} if isinstance(each, str) else each
            is_wanted = (
                normalize_name(name) in wanted if wanted is not None else not about.get("optional")
            )
            if is_wanted and name.lower() != "python":
                yield _translate_requirement(where, name, about)


def _list_poetry_sources(given: Any) -> Iterator[str]:
    """Yield the names of the sources that a dependency has on hosts."""
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, dict) and "source" in each:
            is_elsewhere = each.get("platform", "linux") != "linux"
            if not is_elsewhere and is_for_hosts(each.get("markers", "")):
                yield each["source"]


def _find_source(about: Mapping[str, Any]) -> str:
    """Return where a package comes from, as a requirement ends, if not from an index. uv's tables
    of sources have the same keys."""
    if "git" in about:
        revision = next((about[key] for key in ("rev", "tag", "branch") if key in about), "")
        return f" @ git+{about['git']}" + (f"@{revision}" if revision else "")
    if "url" in about:
        return f" @ {about['url']}"
    return f" @ file:{about.get('path', '.')}" if {"path", "workspace"} & about.keys() else ""


def _translate_requirement(where: str, name: str, about: Mapping[str, Any]) -> str:
    extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
    versions = translate_versions(where, name, str(about.get("version", "*")))
    text = f"{name}{extras}{_find_source(about) or versions}"
    markers = [about["markers"]] if "markers" in about else []
    if "python" in about:
        wanted = translate_versions(where, "python", about["python"])
        markers += [_python_marker(each) for each in wanted.split(",") if each]
    if "platform" in about:
        markers.append(f"sys_platform == '{about['platform']}'")
    if len(markers) > 1:
        markers = [" and ".join(f"({each})" for each in markers)]
    return " ; ".join([text, *markers])


def _python_marker(wanted: str) -> str:
    operator, version = re.match(r"([<>=!~]+)(.+)", wanted).groups()  # type: ignore[union-attr]
    variable = "python_full_version" if version.count(".") > 1 else "python_version"
    return f"{variable} {operator} '{version}'"


def translate_versions(where: str, name: str, text: str) -> str:
    """Return a version constraint of Poetry as a specifier of PEP 440: "^1.2" as ">=1.2,<2".

    Raises:
        UsageError: there is no such specifier.
    """
    if "|" in text:
        raise UsageError(
            f"{where}: the versions of {name} are alternatives ({text}), which installers on hosts "
            "do not know. Write one range."
        )
    return ",".join(filter(None, (_translate_clause(part) for part in _PARTS.split(text.strip()))))


def _translate_clause(part: str) -> str:
    operator, version = re.match(r"([\^~<>=!]*)\s*(.*)", part).groups()  # type: ignore[union-attr]
    if version in ("*", ""):
        return ""
    if operator not in ("^", "~"):
        return f"{operator or '=='}{version}"
    release = [int(each) for each in re.match(r"v?([\d.]*\d)", version)[1].split(".")]  # type: ignore[index]
    last = len(release) - 1
    place = next((i for i, each in enumerate(release) if each), last)
    if operator == "~":
        place = min(1, last)
    return f">={version},<{'.'.join(map(str, [*release[:place], release[place] + 1]))}"
