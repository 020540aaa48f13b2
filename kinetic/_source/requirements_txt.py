"""The requirements of a requirements.txt.

In: a file, what is installed editable. Out: lines for an installer on hosts: options and
requirements, with those of included files in their place. Paths of this machine, which a host could
not install, are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kinetic._source.editable import Package
from kinetic._system.distribution import is_kinetic, list_extra_requirements
from kinetic.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

KEEP_MARK = "  # kn:keep"
"""Ends a line that is kept where it would be left out (see dependencies.OF_THE_ACCELERATOR)."""
_COMMENT = re.compile(r"(^|\s)#\s*(?P<text>.*)$")
_INCLUDE = re.compile(r"(-r|--requirement)(\s+|=)(?P<path>.+)|-r(?P<glued>\S.*)")
_WITH_URL = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f")
_PASSED_ON = (
    *(*_WITH_URL, "--pre", "--prefer-binary", "--no-index", "--no-binary", "--only-binary"),
    "--trusted-host",
)
_LEFT_OUT = ("--require-hashes", "--hash")
_LOGIN = re.compile(r"(?<=//)[^/@]*@|^[^/@:]+:[^/@]*@")
_PATH = re.compile(r"(?i)(\.{0,2}/|~/).*|.*\.(whl|tar\.gz|zip)")
_HOSTS = {
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
_NAMED = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


def normalize_name(name: str) -> str:
    """Return the name as the package index has it: "Flax_Extra" is "flax-extra"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_name(text: str) -> str:
    """Return the normalized name of what a line requires; "" if it does not begin with one."""
    named = _NAMED.match(text)
    return normalize_name(named[1]) if named and "://" not in text.partition("@")[0] else ""


def read_file(file: Path) -> str:
    """Return the content of a file that says what hosts must install.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{file} cannot be read: {reason}. It lists what hosts must install."
        ) from error


def read_lines(
    file: Path, editable: Collection[Package], including: tuple[Path, ...] = ()
) -> Iterator[str]:
    """Yield the lines of the file and of those that it includes.

    Raises:
        UsageError: it names what hosts cannot install, or cannot be read.
    """
    if file in including:
        raise UsageError(f"{file} includes itself. Take that line out.")
    for number, text, comment in _logical(read_file(file)):
        where = f"{file}, line {number}"
        include = _INCLUDE.fullmatch(text)
        if include:
            path = (include["path"] or include["glued"]).strip().strip("'\"")
            if "://" in path:
                raise UsageError(f"{where}: {path} is not on this machine. Download it.")
            yield from read_lines(file.parent / path, editable, (*including, file))
        else:
            mark = KEEP_MARK if comment.startswith(KEEP_MARK.strip(" #")) else ""
            for checked in _check_line(where, text, file.parent, editable):
                yield f"{checked}{mark}"


def _logical(content: str) -> Iterator[tuple[int, str, str]]:
    """Yield (number, text, comment) of each line that is not blank, with continuations joined."""
    begun, parts = 0, ""
    for number, line in enumerate([*content.splitlines(), ""], 1):
        begun = begun if parts else number
        comment = _COMMENT.search(line)
        if line.endswith("\\") and not comment:
            parts += line[:-1] + " "
            continue
        text = (parts + _COMMENT.sub("", line)).strip()
        if text:
            yield begun, text, comment["text"] if comment else ""
        parts = ""


def _check_line(
    where: str, text: str, folder: Path, editable: Collection[Package]
) -> Iterator[str]:
    if text.startswith("-"):
        if not _is_editable(text, folder, editable):
            yield from check_option(where, text)
        return
    bare, *options = re.split(r"\s+(?=--)", text)
    odd = next((each for each in options if not each.startswith("--hash")), None)
    if odd is not None:
        raise UsageError(
            f"{where}: hosts do not know the option {_hide_login(odd)} of a requirement."
        )
    yield from check_requirement(where, bare, folder, editable)


def check_requirement(
    where: str, text: str, folder: Path, editable: Collection[Package]
) -> Iterator[str]:
    """Yield a requirement, whose paths begin in the folder, unless it travels with the job.

    Raises:
        UsageError: it is not a requirement, or names a path of this machine.
    """
    if _is_editable(text, folder, editable):
        return
    if is_kinetic(find_name(text)):  # It travels with the job: only its extras are installed.
        extras = re.match(r"[^\[;@]*\[([^]]*)\]", text)
        yield from list_extra_requirements(re.split(r"\s*,\s*", extras[1]) if extras else ())
        return
    place = text.partition("@")[2].strip() or text
    if "file:" in place or ("://" not in text and _PATH.fullmatch(place)):
        raise UsageError(
            f"{where}: {text} is on this machine, where hosts cannot read it. Files of the project "
            "travel with the job: take the line out and list what it requires. Or install it "
            "editable here, and it is sent as well; or name a published version."
        )
    if "://" not in text or " @ " in text:  # A bare URL is for the installer to understand.
        read_requirement(where, text)
    yield text


def _is_editable(text: str, folder: Path, editable: Collection[Package]) -> bool:
    """Return whether a line names what is installed editable: by name, or "-e ../lib[extra]",
    "./lib"."""
    name, place = find_name(text), ""
    if editable and (text.startswith(("-", ".")) or "/" in text):
        path = re.sub(r"^(-e|--editable)[\s=]*|\[.*$", "", text).strip().strip("'\"")
        place = os.path.realpath(folder / path)
    return any(each.name == name or each.folder == place for each in editable)


def check_option(where: str, text: str) -> Iterator[str]:
    """Yield an option of the installer, unless hosts do without it.

    Raises:
        UsageError: it means something on this machine only, or holds a password.
    """
    name, _, value = text.replace("=", " ", 1).partition(" ")
    value = value.strip()
    if name in _LEFT_OUT:
        return
    if name in ("-e", "--editable") or text.startswith("-e"):
        raise UsageError(
            f"{where}: {text} names a folder of this machine. Install it, and it is sent with the "
            "job; or, if it is the project itself, whose files are sent anyway, take the line out "
            "and list what it requires."
        )
    if name in ("-c", "--constraint"):
        raise UsageError(
            f"{where}: hosts get one list, without constraints ({text}). Write the versions into "
            "the requirements, as `uv pip compile` or `pip-compile` do."
        )
    if name not in _PASSED_ON:
        raise UsageError(
            f"{where}: hosts do not know the option {_hide_login(name)}. Take it out, or "
            "choose a container_image that has the requirements."
        )
    if name in _WITH_URL:
        _check_index(where, value)
    yield f"{name} {value}".strip()


def _check_index(where: str, url: str) -> None:
    """Refuse an index that hosts cannot reach, or whose address contains a password."""
    if "://" not in url or url.startswith("file:"):
        raise UsageError(
            f"{where}: {_hide_login(url)} is on this machine, where hosts cannot read it."
        )
    password = urlsplit(url).password
    if password and "${" not in password:
        raise UsageError(
            f"{where}: the address holds a password, which would be stored with the job. Write "
            "${NAME} in its place and set NAME in the image."
        )


def _hide_login(text: str) -> str:
    """Return the text without the names and passwords of addresses in it."""
    return _LOGIN.sub("", text)


def is_for_hosts(marker: str) -> bool:
    """Return whether hosts, which run Linux, meet the condition of a requirement; of what else it
    may ask, such as Python's version, hosts have what is here. One that cannot be read is met."""
    from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName

    try:
        return not marker or Marker(marker).evaluate(dict(_HOSTS))
    except (InvalidMarker, UndefinedEnvironmentName):
        return True


def read_requirement(where: str, text: str) -> Requirement:
    """Return a requirement's parts.

    Raises:
        UsageError: it is not a requirement.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{where}: {text!r} is not a requirement: {reason}") from error
