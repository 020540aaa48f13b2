"""Poetry's notation of dependencies, translated to the standard one.

In: tables of a pyproject.toml. Out: requirements as in PEP 508.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kinetic._source.requirements_txt import is_for_hosts, normalize_name
from kinetic.errors import UsageError

_PARTS = re.compile(r"\s*,\s*|(?<=[\w.*])\s+(?=[<>=!~^])")


def list_requirements(
    where: str, table: Mapping[str, Any], names: Collection[str] | None = None
) -> Iterator[str]:
    """Yield the requirements of a table of dependencies: those of these names, or else those that
    are not optional.

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
                yield _requirement(where, name, about)


def list_sources(given: Any) -> Iterator[str]:
    """Yield the names of the sources that a dependency has on hosts."""
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, dict) and "source" in each:
            is_elsewhere = each.get("platform", "linux") != "linux"
            if not is_elsewhere and is_for_hosts(each.get("markers", "")):
                yield each["source"]


def find_source(about: Mapping[str, Any]) -> str:
    """Return where a package comes from, as a requirement ends, if not from an index. uv's tables
    of sources have the same keys."""
    if "git" in about:
        revision = next((about[key] for key in ("rev", "tag", "branch") if key in about), "")
        return f" @ git+{about['git']}" + (f"@{revision}" if revision else "")
    if "url" in about:
        return f" @ {about['url']}"
    return f" @ file:{about.get('path', '.')}" if {"path", "workspace"} & about.keys() else ""


def _requirement(where: str, name: str, about: Mapping[str, Any]) -> str:
    extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
    versions = specifier(where, name, str(about.get("version", "*")))
    text = f"{name}{extras}{find_source(about) or versions}"
    markers = [about["markers"]] if "markers" in about else []
    if "python" in about:
        wanted = specifier(where, "python", about["python"])
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


def specifier(where: str, name: str, text: str) -> str:
    """Return a version constraint as a specifier of PEP 440: "^1.2" as ">=1.2,<2".

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
