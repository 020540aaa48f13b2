"""The requirements of a pyproject.toml: standard, from dependency groups, of Poetry, or locked.

In: its parsed content, that of a uv.lock, and the choices in `[tool.kinetic]`. Out: `Lines`, or
None if it declares no dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._source import poetry, requirements_txt, uv_lock
from kinetic._source.requirements_txt import NOTHING_HERE, Here, Line, Lines, Read, normalize_name
from kinetic.errors import UsageError

_NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[([^\]]*)\])?\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Chosen:
    """What hosts need besides the project's dependencies.

    Attributes:
        extras: of `[project.optional-dependencies]`.
        groups: of `[dependency-groups]`.
    """

    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def read_choice(where: str, content: Mapping[str, Any]) -> Chosen:
    """Return what `[tool.kinetic]` chooses.

    Raises:
        UsageError: it is not as documented.
    """
    table = _table(content, "tool", "kinetic")
    unknown = sorted(set(table) - {"extras", "groups"})
    if unknown:
        raise UsageError(
            f"{where}: [tool.kinetic] has {unknown[0]!r}; it takes extras and groups, lists of "
            "names."
        )
    for key, value in table.items():
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise UsageError(
                f'{where}: {key} of [tool.kinetic] must be a list of names, such as ["train"].'
            )
    return Chosen(tuple(table.get("extras", ())), tuple(table.get("groups", ())))


def parse(
    file: Path,
    content: Mapping[str, Any],
    lock: Mapping[str, Any] | None,
    read: Read,
    *,
    unlocked: Collection[str],
    here: Here = NOTHING_HERE,
) -> Lines | None:
    """Return the project's requirements, in the versions of the lock if there is one.

    Args:
        file: the pyproject.toml.
        content: its content.
        lock: content of the uv.lock that belongs to it.
        read: reads the other files that it names.
        here: what is installed editable, and travels with the job.
        unlocked: names of packages that are not taken from the lock, nor what only they need.

    Raises:
        UsageError: it requires what hosts cannot install.
    """
    wanted = read_choice(str(file), content)
    project, of_poetry = _table(content, "project"), _table(content, "tool", "poetry")
    declared = {"dependencies", "optional-dependencies"} & project.keys()
    if not (declared or of_poetry.get("dependencies") or wanted.extras or wanted.groups) and (
        "dependencies" not in project.get("dynamic", ())
    ):
        return None
    parts = _Parts(file, content, read, here)
    lines = parts.dependencies()
    for extra in wanted.extras:
        lines += parts.extra(extra)
    for group in wanted.groups:
        lines += parts.group(group)
    if lock is None:
        return lines
    pins = uv_lock.pins(
        str(file.with_name("uv.lock")),
        lock,
        normalize_name(project.get("name", "")),
        extras=tuple(map(normalize_name, wanted.extras)),
        groups=tuple(map(normalize_name, wanted.groups)),
        without=unlocked,
    )
    if pins is None:
        return lines
    # Only the accelerator's packages, as written: their version is read from them.
    named = [each for each in lines.requirements if _name(each.text) in unlocked]
    return Lines((*named, *map(Line, pins)), lines.options)


@dataclass(frozen=True)
class _Parts:
    file: Path
    content: Mapping[str, Any]
    read: Read
    here: Here

    @property
    def _project(self) -> Mapping[str, Any]:
        return _table(self.content, "project")

    @property
    def _poetry(self) -> Mapping[str, Any]:
        return _table(self.content, "tool", "poetry")

    def dependencies(self) -> Lines:
        if "dependencies" in self._project:
            return self._lines(self._project["dependencies"])
        if "dependencies" in self._project.get("dynamic", ()):
            return self._dynamic()
        where = f"{self.file}, [tool.poetry.dependencies]"
        found = poetry.requirements(where, self._poetry.get("dependencies", {}), self.here)
        return Lines(tuple(Line(text) for text, optional in found if not optional))

    def _dynamic(self) -> Lines:
        about = _table(self.content, "tool", "setuptools", "dynamic").get("dependencies", {})
        files = about.get("file", ())
        if not files:
            raise UsageError(
                f"{self.file}: its dependencies are dynamic, which only its build backend "
                "understands. Write a requirements.txt beside it."
            )
        found = Lines()
        for each in [files] if isinstance(files, str) else files:
            found += requirements_txt.parse(self.file.parent / each, self.read, self.here)
        return found

    def extra(self, name: str, around: tuple[str, ...] = ()) -> Lines:
        """An extra, with those of the project itself that it names."""
        known = self._project.get("optional-dependencies", {})
        of_poetry = self._poetry.get("extras", {}) if not known else {}
        key = self._find_key(name, {**known, **of_poetry}, "extra")
        if key in around:
            return Lines()
        if key in of_poetry:
            return self._extra_of_poetry(of_poetry[key])
        found, own = Lines(), normalize_name(self._project.get("name", ""))
        for text in known[key]:
            parts = _NAME.match(text)
            if parts and own and normalize_name(parts[1]) == own:
                for other in filter(None, re.split(r"\s*,\s*", (parts[2] or "").strip())):
                    found += self.extra(other, (*around, key))
            else:
                found += self._lines([text])
        return found

    def _extra_of_poetry(self, names: Sequence[str]) -> Lines:
        table = self._poetry.get("dependencies", {})
        wanted = set(map(normalize_name, names))
        part = {name: about for name, about in table.items() if normalize_name(name) in wanted}
        where = f"{self.file}, [tool.poetry.dependencies]"
        return Lines(tuple(Line(text) for text, _ in poetry.requirements(where, part, self.here)))

    def group(self, name: str, around: tuple[str, ...] = ()) -> Lines:
        """A dependency group, with those that it includes."""
        known: Mapping[str, Any] = _table(self.content, "dependency-groups")
        of_poetry: Mapping[str, Any] = self._poetry.get("group", {})
        key = self._find_key(name, {**of_poetry, **known}, "group")
        if key in around:
            raise UsageError(f"{self.file}: the group {key!r} includes itself.")
        if key not in known:
            where = f"{self.file}, group {key}"
            found = poetry.requirements(where, of_poetry[key].get("dependencies", {}), self.here)
            return Lines(tuple(Line(text) for text, _ in found))
        lines = Lines()
        for each in known[key]:
            if isinstance(each, str):
                lines += self._lines([each])
            elif isinstance(each, dict) and set(each) == {"include-group"}:
                lines += self.group(each["include-group"], (*around, key))
            else:
                raise UsageError(
                    f"{self.file}: the group {key!r} holds {each!r}, which is neither a "
                    "requirement nor {include-group = ...}."
                )
        return lines

    def _find_key(self, name: str, table: Mapping[str, Any], kind: str) -> str:
        for key in table:
            if normalize_name(key) == normalize_name(name):
                return key
        listed = f"It has {', '.join(sorted(table))}." if table else "It has none."
        raise UsageError(f"{self.file}: there is no {kind} {name!r}. {listed}")

    def _lines(self, texts: Sequence[str]) -> Lines:
        found = Lines()
        for text in texts:
            checked = requirements_txt.check_requirement(str(self.file), text)
            found += Lines((Line(checked),)) if "@" in text else self._add_source(checked)
        return found

    def _add_source(self, text: str) -> Lines:
        """A requirement, with its source from `[tool.uv.sources]`."""
        parts = _NAME.match(text)
        assert parts is not None
        if self.here.has(parts[1]):
            return Lines()
        sources = _table(self.content, "tool", "uv", "sources").items()
        source = next(
            (s for n, s in sources if normalize_name(n) == normalize_name(parts[1])), None
        )
        if not isinstance(source, dict):
            return Lines((Line(text),))
        extras = f"[{parts[2]}]" if parts[2] else ""
        marker = f" ;{parts[3].partition(';')[2]}" if ";" in parts[3] else ""
        if "git" in source:
            revision = next((source[k] for k in ("rev", "tag", "branch") if k in source), "")
            place = f"git+{source['git']}" + (f"@{revision}" if revision else "")
        elif "url" in source:
            place = source["url"]
        elif "index" in source:
            return Lines((Line(text),), tuple(self._index(source["index"])))
        else:
            where = source.get("path", "a member of the workspace")
            raise UsageError(
                f"{self.file}: {parts[1]} is {where} on this machine, where hosts cannot read it. "
                "Install it editable here, and it is sent with the job; or name a published "
                "version."
            )
        return Lines((Line(f"{parts[1]}{extras} @ {place}{marker}"),))

    def _index(self, name: str) -> Iterator[str]:
        for each in _table(self.content, "tool", "uv").get("index", ()):
            if each.get("name") == name:
                requirements_txt.check_index(str(self.file), each["url"])
                yield f"--extra-index-url {each['url']}"


def _name(text: str) -> str:
    found = _NAME.match(text)
    return normalize_name(found[1]) if found else ""


def _table(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        content = content.get(key, {})
        if not isinstance(content, dict):
            return {}
    return dict(content)
