"""The installation of kinetic itself, and commands that install its extras.

No message may tell users to fetch kinetic from an index by its name. The name is not registered, so
an index may one day have somebody else's package under it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from importlib import metadata
from urllib.parse import unquote, urlsplit

NAME = "kinetic-run"
_NAMES = re.compile(r"(keras[-_.]+)?kinetic|kinetic[-_.]+(run|sdk)", re.IGNORECASE)
"""Distributions that install or once installed a package `kinetic`: this one and keras-team's."""
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")


def is_kinetic(name: str) -> bool:
    """True if a requirement of this name means kinetic itself, which is sent with the job."""
    return _NAMES.fullmatch(name) is not None


def make_install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation. It names the folder, archive or
    repository that kinetic was installed from, or else the extra's packages."""
    try:
        distribution = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return f"pip install the packages of kinetic's extra {extra!r} (see its pyproject.toml)"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin:
        return f"pip install {shlex.join(list_extra_requirements([extra]))}"
    url = origin["url"]
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        folder = unquote(urlsplit(url).path)
        return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    if repository := origin.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return f"pip install {shlex.quote(f'{NAME}[{extra}] @ {url}')}"


def list_extra_requirements(extras: Collection[str]) -> list[str]:
    """Return the requirements of extras of kinetic, without the marker `extra == …`; [] if kinetic
    was imported without having been installed."""
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return []
    requirements = []
    for line in lines:
        text, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        if extra and extra[1] in extras:
            rest = re.sub(r"^\s*and\s+|\s+and\s*$", "", _EXTRA.sub("", marker)).strip(" ()")
            requirements.append(f"{text.strip()}; {rest}" if rest else text.strip())
    return requirements
