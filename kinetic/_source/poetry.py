"""Poetry's notation of dependencies, translated to the standard one.

In: tables of a pyproject.toml. Out: requirements as in PEP 508.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kinetic._source.requirements_txt import NOTHING_HERE, Here
from kinetic.errors import UsageError

_PARTS = re.compile(r"\s*,\s*|(?<=[\w.*])\s+(?=[<>=!~^])")


def requirements(
    where: str, table: Mapping[str, Any], here: Here = NOTHING_HERE
) -> Iterator[tuple[str, bool]]:
    """Yield the requirements of a table of dependencies, and whether each is optional.

    Raises:
        UsageError: one of them cannot be installed by a host.
    """
    for name, given in table.items():
        if name.lower() == "python":
            continue
        if here.has(name):
            continue
        for each in given if isinstance(given, list) else [given]:
            about = {"version": each} if isinstance(each, str) else dict(each)
            yield _requirement(where, name, about), bool(about.get("optional"))


def _requirement(where: str, name: str, about: Mapping[str, Any]) -> str:
    if "path" in about:
        raise UsageError(
            f"{where}: {name} is a folder of this machine ({about['path']}), where hosts cannot "
            "read it. Install it editable here, and it is sent with the job; or name a published "
            "version."
        )
    extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
    if "git" in about:
        revision = next((about[key] for key in ("rev", "tag", "branch") if key in about), "")
        text = f"{name}{extras} @ git+{about['git']}" + (f"@{revision}" if revision else "")
    elif "url" in about:
        text = f"{name}{extras} @ {about['url']}"
    else:
        text = name + extras + specifier(where, name, str(about.get("version", "*")))
    markers = [about["markers"]] if "markers" in about else []
    if "python" in about:
        wanted = specifier(where, "python", about["python"])
        markers += [_python_marker(each) for each in wanted.split(",") if each]
    if "platform" in about:
        markers.append(f"sys_platform == '{about['platform']}'")
    if not markers:
        return text
    joined = " and ".join(f"({each})" for each in markers) if len(markers) > 1 else markers[0]
    return f"{text} ; {joined}"


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
    return ",".join(filter(None, (_one(part) for part in _PARTS.split(text.strip()))))


def _one(part: str) -> str:
    if part in ("*", ""):
        return ""
    if part[0] not in "^~<>=!":
        return f"=={part}"
    if part[0] == "^":
        return _caret(part[1:].strip())
    if part[0] == "~" and part[1] != "=":
        version = part[1:].strip()
        release = _release(version)
        return f">={version},<{_next(release, min(1, len(release) - 1))}"
    return part.replace(" ", "")


def _caret(version: str) -> str:
    release = _release(version)
    first = next((i for i, part in enumerate(release) if part), len(release) - 1)
    return f">={version},<{_next(release, first)}"


def _release(version: str) -> list[int]:
    return [int(part) for part in re.match(r"v?([\d.]*\d)", version)[1].split(".")]  # type: ignore[index]


def _next(release: list[int], place: int) -> str:
    return ".".join(map(str, [*release[:place], release[place] + 1]))
