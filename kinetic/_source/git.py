"""Paths that git ignores in a folder. Only this module runs git.

git itself decides what belongs to a project, so its rules hold as they do for `git add`: nested
`.gitignore` files, `.git/info/exclude`, and the user's global excludes. A file that git tracks
belongs to the project even if a rule matches it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

from kinetic._core.values import dataclass

_PROGRAM = (
    # If a git hook started Python, these variables are set, maybe for another repository.
    *("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_PREFIX"),
    # A checkout in a container often belongs to another user. It is safe to read, because git
    # runs no program of the repository with these options.
    *("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false"),
)
_LIST = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
_PATHS = ("rev-parse", "--git-path", "index", "--git-path", "info/exclude", "--git-path", "config")
_EXCLUDES = ("config", "--type=path", "--get", "core.excludesFile")
_NOT_FOUND = 127
SLOW_S = 5.0  # Seconds until a notice says that git is slow.


@dataclass(frozen=True)
class Answer:
    """Result of asking git about a folder.

    Attributes:
        ignored: real paths that git ignores, with all their contents.
        watched: files outside the folder on which the result depends.
        error: reason why git failed; "" if it succeeded.
        is_missing: whether git is not installed.
    """

    ignored: frozenset[str] = frozenset()
    watched: tuple[str, ...] = ()
    error: str = ""
    is_missing: bool = False


def find_repository(folder: str) -> str | None:
    """Return the nearest folder with a `.git`: the folder itself or one of its parents."""
    path = Path(folder)
    return next((str(top) for top in (path, *path.parents) if os.path.lexists(top / ".git")), None)


def ask(folder: str, repository: str) -> Answer:
    """Ask git which paths it ignores in a folder of a repository; both are real paths."""
    try:
        listed = _run(folder, *_LIST)
    except OSError:
        return Answer(is_missing=True)
    if listed.returncode:
        lines = os.fsdecode(listed.stderr).strip().splitlines() or ["it failed without a message"]
        return Answer(error=lines[0], is_missing=listed.returncode == _NOT_FOUND)
    names = [os.fsdecode(name).rstrip("/") for name in listed.stdout.split(b"\0") if name]
    if "." in names:  # The repository ignores the whole project, so its rules do not apply.
        names = []
    own = _run(folder, *_PATHS).stdout.splitlines()
    user_excludes = _run(folder, *_EXCLUDES).stdout.splitlines()
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    usual = (f"{home}/.gitconfig", f"{home}/.config/git/config", f"{home}/.config/git/ignore")
    above = [top for top in Path(folder).parents if top.is_relative_to(repository)]
    watched = (
        *(os.path.join(folder, os.fsdecode(path)) for path in own + user_excludes),  # noqa: PTH118
        *(f"{top}/.gitignore" for top in above),
        *usual,
    )
    return Answer(frozenset(f"{folder.rstrip('/')}/{name}" for name in names), watched)


def _run(folder: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*_PROGRAM, "-C", folder, *words]
    notice = (
        f"kinetic: Still waiting for git after {SLOW_S:g} s. Check that `git -C {folder} status` "
        "finishes."
    )
    timer = threading.Timer(SLOW_S, logging.getLogger("kinetic").warning, [notice])
    timer.daemon = True
    timer.start()
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    finally:
        timer.cancel()
