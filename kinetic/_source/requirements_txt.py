"""The requirements of a requirements.txt.

In: a file, the editable packages. Out: lines for an installer on hosts: options and requirements,
with the lines of included files in their place. Paths of this machine are refused, because a host
cannot install them.
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
"""Comment at the end of a line, so that hosts install it although it names a package of JAX."""
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
    """Return the normalized name of the package that a line requires; "" if the line does not begin
    with one."""
    named = _NAMED.match(text)
    return normalize_name(named[1]) if named and "://" not in text.partition("@")[0] else ""


def read_file(file: Path) -> str:
    """Return the content of a file that lists packages for hosts.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{file}, which lists the packages that hosts must install, cannot be read: {reason}."
        ) from error


def read_lines(
    file: Path, editable: Collection[Package], including: tuple[Path, ...] = ()
) -> Iterator[str]:
    """Yield the lines of a requirements.txt and of the files that it includes.

    Raises:
        UsageError: a file cannot be read, or requires something that hosts cannot install.
    """
    if file in including:
        raise UsageError(f"{file} includes itself (-r). Remove that line.")
    for number, text, comment in _join_lines(read_file(file)):
        where = f"{file}, line {number}"
        include = _INCLUDE.fullmatch(text)
        if include:
            path = (include["path"] or include["glued"]).strip().strip("'\"")
            if "://" in path:
                raise UsageError(f"{where}: {path} is not on this machine. Download the file.")
            yield from read_lines(file.parent / path, editable, (*including, file))
        else:
            mark = KEEP_MARK if comment.startswith(KEEP_MARK.strip(" #")) else ""
            for checked in _check_line(where, text, file.parent, editable):
                yield f"{checked}{mark}"


def _join_lines(content: str) -> Iterator[tuple[int, str, str]]:
    """Yield (number, text, comment) of each line that is not blank, with continuation lines
    joined."""
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
            f"{where}: hosts do not support the option {_hide_login(odd)} in a requirement. "
            "Remove the option."
        )
    yield from check_requirement(where, bare, folder, editable)


def check_requirement(
    where: str, text: str, folder: Path, editable: Collection[Package]
) -> Iterator[str]:
    """Yield a requirement for hosts, or nothing if the package's files are sent with the job.
    Relative paths begin in `folder`. `where` names the file in messages.

    Raises:
        UsageError: it is not a requirement, or names a path of this machine.
    """
    if _is_editable(text, folder, editable):
        return
    if is_kinetic(find_name(text)):  # The job brings kinetic: only extras are installed.
        extras = re.match(r"[^\[;@]*\[([^]]*)\]", text)
        yield from list_extra_requirements(re.split(r"\s*,\s*", extras[1]) if extras else ())
        return
    place = text.partition("@")[2].strip() or text
    if "file:" in place or ("://" not in text and _PATH.fullmatch(place)):
        raise UsageError(
            f"{where}: hosts cannot read {text}, which is on this machine. If it is part of the "
            "project, list what the package requires in place of this line. Otherwise remove the "
            "line and install the package with `pip install -e`, so that it is sent with the job, "
            "or name a published version."
        )
    if "://" not in text or " @ " in text:  # pip parses a bare URL.
        read_requirement(where, text)
    yield text


def _is_editable(text: str, folder: Path, editable: Collection[Package]) -> bool:
    """True if a line names a package that is installed editable: by its name, or as "-e
    ../lib[extra]" or "./lib"."""
    name, place = find_name(text), ""
    if editable and (text.startswith(("-", ".")) or "/" in text):
        path = re.sub(r"^(-e|--editable)[\s=]*|\[.*$", "", text).strip().strip("'\"")
        place = os.path.realpath(folder / path)
    return any(each.name == name or each.folder == place for each in editable)


def check_option(where: str, text: str) -> Iterator[str]:
    """Yield an option for the installer on hosts, or nothing if hosts do not need it.

    Raises:
        UsageError: it means something on this machine only, or holds a password.
    """
    name, _, value = text.replace("=", " ", 1).partition(" ")
    value = value.strip()
    if name in _LEFT_OUT:
        return
    if name in ("-e", "--editable") or text.startswith("-e"):
        raise UsageError(
            f"{where}: {text} names a folder of this machine, which hosts lack. If it is the "
            "project, remove the line and list what the project requires. Otherwise run `pip "
            f"install {text}` here, so that the package is sent with the job."
        )
    if name in ("-c", "--constraint"):
        raise UsageError(
            f"{where}: hosts do not support constraints ({text}). Write the versions into the "
            "requirements, as `uv pip compile` or `pip-compile` do."
        )
    if name not in _PASSED_ON:
        raise UsageError(
            f"{where}: hosts do not support the option {_hide_login(name)}. Remove it, or choose a "
            "container_image that has the requirements."
        )
    if name in _WITH_URL:
        _check_index(where, value)
    yield f"{name} {value}".strip()


def _check_index(where: str, url: str) -> None:
    """Refuse an index that hosts cannot reach or whose address contains a password."""
    if "://" not in url or url.startswith("file:"):
        raise UsageError(
            f"{where}: hosts cannot read {_hide_login(url)}, which is on this machine. Name an "
            "index that hosts can reach."
        )
    password = urlsplit(url).password
    if password and "${" not in password:
        raise UsageError(
            f"{where}: the address of the index {urlsplit(url).hostname} contains a password, "
            "which would be stored with the job. Write ${NAME} in place of the password and set "
            "NAME in the image."
        )


def _hide_login(text: str) -> str:
    """Return the text without user names and passwords in addresses."""
    return _LOGIN.sub("", text)


def is_for_hosts(marker: str) -> bool:
    """True if hosts meet the marker of a requirement. They run Linux, with this machine's version
    of Python. A marker that cannot be parsed counts as met."""
    from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName

    try:
        return not marker or Marker(marker).evaluate(dict(_HOSTS))
    except (InvalidMarker, UndefinedEnvironmentName):
        return True


def read_requirement(where: str, text: str) -> Requirement:
    """Parse a requirement; errors say `where` it is.

    Raises:
        UsageError: it is not a requirement.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{where}: {text!r} is not a requirement: {reason}") from error
