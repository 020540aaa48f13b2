"""The requirements of a requirements.txt.

In: a file, a function that reads those it includes. Out: `Lines`: options and requirements, with
the included ones in their place. Paths of this machine, which a host could not install, are
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kinetic._core.values import dataclass
from kinetic.errors import UsageError

KEEP = "kn:keep"
"""A comment that keeps a line that would be left out (see dependencies.OF_THE_ACCELERATOR)."""
_COMMENT = re.compile(r"(^|\s)#\s*(?P<text>.*)$")
_INCLUDE = re.compile(r"(-r|--requirement)(\s+|=)(?P<path>.+)|-r(?P<glued>\S.*)")
_WITH_URL = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f")
_PASSED_ON = (
    *(*_WITH_URL, "--pre", "--prefer-binary", "--no-index", "--no-binary", "--only-binary"),
    "--trusted-host",
)
_LEFT_OUT = ("--require-hashes", "--hash")
_PATH = re.compile(r"(?i)(\.{0,2}/|~/).*|.*\.(whl|tar\.gz|zip)")

Read = Callable[[Path], str]


@dataclass(frozen=True)
class Line:
    """One requirement: as written, and whether it is marked to be kept."""

    text: str
    keep: bool = False


@dataclass(frozen=True)
class Here:
    """What is installed editable: it travels with the job, so hosts need not install it.

    Attributes:
        names: of the packages, normalized.
        folders: real paths of their projects.
    """

    names: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Whether the package of this name is there."""
        return normalize_name(name) in self.names


NOTHING_HERE = Here()


def normalize_name(name: str) -> str:
    """Return the name as the package index has it: "Flax_Extra" is "flax-extra"."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Lines:
    """The requirements of a project.

    Attributes:
        requirements: in order.
        options: of the installer, such as another index.
    """

    requirements: tuple[Line, ...] = ()
    options: tuple[str, ...] = ()

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.requirements + other.requirements, self.options + other.options)


def parse(file: Path, read: Read, here: Here = NOTHING_HERE) -> Lines:
    """Return the requirements of the file and of those that it includes.

    Raises:
        UsageError: it names what hosts cannot install, or cannot be read.
    """
    return _parse(file, read, here, ())


def _parse(file: Path, read: Read, here: Here, around: tuple[Path, ...]) -> Lines:
    if file in around:
        raise UsageError(f"{file} includes itself. Take that line out.")
    found = Lines()
    for number, text, comment in _logical(read(file)):
        where = f"{file}, line {number}"
        include = _INCLUDE.fullmatch(text)
        if include:
            path = (include["path"] or include["glued"]).strip().strip("'\"")
            if "://" in path:
                raise UsageError(f"{where}: {path} is not on this machine. Download it.")
            found += _parse(file.parent / path, read, here, (*around, file))
        elif _folder(file, text) in here.folders:
            continue
        elif text.startswith("-"):
            found += Lines(options=_option(where, text))
        else:
            found += Lines((Line(_requirement(where, text), comment.startswith(KEEP)),))
    return found


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


def _folder(file: Path, text: str) -> str:
    """The folder that a line names ("-e ../lib[extra]", "./lib"), as a real path."""
    path = re.sub(r"^(-e|--editable)[\s=]*|\[.*$", "", text).strip().strip("'\"")
    return os.path.realpath(file.parent / path)


def _option(where: str, text: str) -> tuple[str, ...]:
    name, _, value = text.replace("=", " ", 1).partition(" ")
    value = value.strip()
    if name in _LEFT_OUT:
        return ()
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
            f"{where}: hosts do not know the option {name}. Take it out, or choose a "
            "container_image that has the requirements."
        )
    if name in _WITH_URL:
        check_index(where, value)
    return (f"{name} {value}".strip(),)


def check_index(where: str, url: str) -> None:
    """Refuse an index that hosts cannot reach, or whose address contains a password.

    Raises:
        UsageError: it is such an index.
    """
    if "://" not in url or url.startswith("file:"):
        raise UsageError(f"{where}: {url} is on this machine, where hosts cannot read it.")
    password = urlsplit(url).password
    if password and "${" not in password:
        raise UsageError(
            f"{where}: the address holds a password, which would be stored with the job. Write "
            "${NAME} in its place and set NAME in the image."
        )


def _requirement(where: str, text: str) -> str:
    bare, *options = re.split(r"\s+(?=--)", text)
    odd = next((each for each in options if not each.startswith("--hash")), None)
    if odd is not None:
        raise UsageError(f"{where}: hosts do not know the option {odd} of a requirement.")
    return check_requirement(where, bare)


def check_requirement(where: str, text: str) -> str:
    """Return the requirement.

    Raises:
        UsageError: it is not a requirement, or names a path of this machine.
    """
    place = text.partition("@")[2].strip() or text
    if "file:" in place or ("://" not in text and _PATH.fullmatch(place)):
        raise UsageError(
            f"{where}: {text} is on this machine, where hosts cannot read it. Files of the project "
            "travel with the job: take the line out and list what it requires, or name a "
            "published version."
        )
    if "://" in text and " @ " not in text:
        return text  # A bare URL is for the installer to understand.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(
            f"{where}: {text!r} is not a requirement: {str(error).splitlines()[0]}"
        ) from error
    return text
