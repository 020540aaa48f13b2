"""Which file lists what git ignores in every repository of this user.

In: where git's settings lie, a function that reads them. Out: a path.

git itself is not run and need not be installed. Conditional settings (`includeIf`) are not read.
"""

# Paths are compared and joined as git does it: as text.
# ruff: noqa: PTH111, PTH113, PTH118, PTH120

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from kinetic._core.values import dataclass

_DEEPEST = 10
"""The deepest chain of includes, as in git."""
_BLANK = re.compile(r"(?:\s|[#;][^\n]*)+")
_SECTION = re.compile(r'\[\s*([\w.-]+)(?:\s+"((?:[^"\\\n]|\\.)*)")?\s*\]')
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9-]*)[ \t]*(=?)[ \t]*")
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b", '"': '"', "\\": "\\", "\n": "", "": ""}


@dataclass(frozen=True)
class GitFiles:
    """Where git looks on this machine.

    Attributes:
        configs: settings of the system and of the user; later ones win.
        excludes: the default file, where no setting names another; "" for none.
        home: the user's home folder, "" if unknown.
    """

    configs: tuple[str, ...] = ()
    excludes: str = ""
    home: str = ""


NO_FILES = GitFiles()


def folder(dot_git: str, read: Callable[[str], bytes]) -> str:
    """Return the folder with a repository's own settings: `.git`, or, in a linked working tree, the
    folder that the file `.git` names."""
    if not os.path.isfile(dot_git):
        return dot_git
    leads_to = read(dot_git).decode("utf-8", "surrogateescape").removeprefix("gitdir:").strip()
    found = os.path.join(os.path.dirname(dot_git), leads_to)
    common = read(f"{found}/commondir").decode("utf-8", "surrogateescape").strip()
    return os.path.normpath(os.path.join(found, common))


def excludes_file(files: GitFiles, top: str, own: str, read: Callable[[str], bytes]) -> str:
    """Return the path of the file, which need not exist; "" for none.

    Args:
        files: where git looks.
        top: the repository's top folder.
        own: the repository's own settings.
        read: returns the content of a file, empty if there is none.
    """
    found = files.excludes
    for config in (*files.configs, own):
        for key, value in _settings(config, files.home, read):
            if key == "core.excludesfile":
                found = _path(value, files.home, top) if value else ""
    return found


def _settings(
    config: str, home: str, read: Callable[[str], bytes], depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a file and of those it includes, in order."""
    for key, value in parse(read(config).decode("utf-8", "surrogateescape")):
        yield key, value
        if key == "include.path" and value and depth < _DEEPEST:
            included = _path(value, home, os.path.dirname(config))
            yield from _settings(included, home, read, depth + 1)


def _path(value: str, home: str, folder: str) -> str:
    if value == "~" or value.startswith("~/"):
        return os.path.normpath(home + value[1:]) if home else ""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(value)))


def parse(text: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of a file as ("section.key" in lower case, value). Stops at a syntax
    error; https://git-scm.com/docs/git-config#_syntax."""
    text, section, at = text.removeprefix("\ufeff").replace("\r\n", "\n"), "", 0
    while at < len(text):
        if found := _BLANK.match(text, at):
            at = found.end()
        elif found := _SECTION.match(text, at):
            name, sub = found.groups()
            section, at = name.lower() + ("" if sub is None else f".{sub}"), found.end()
        elif found := _KEY.match(text, at):
            value, at = _value(text, found.end()) if found[2] else ("", found.end())
            if value is None:
                return
            yield f"{section}.{found[1].lower()}".removeprefix("."), value
        else:
            return


def _value(text: str, at: int) -> tuple[str | None, int]:
    """Read a value to the end of its line; None for one that git refuses."""
    out, kept, quoted = "", 0, False
    while at < len(text) and (letter := text[at]) != "\n":
        if letter == "\\":
            escaped = text[at + 1 : at + 2]
            if escaped not in _ESCAPES:
                return None, at
            out += _ESCAPES[escaped]
            kept, at = len(out), at + 1
        elif letter == '"':
            quoted, kept = not quoted, len(out)
        elif letter in "#;" and not quoted:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            break
        else:
            out += letter
            kept = len(out) if quoted or not letter.isspace() else kept
        at += 1
    return (None if quoted else out[:kept]), at
