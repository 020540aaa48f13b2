"""Files that git leaves out of a folder: the only door to git.

git itself says which files belong to a project, so its rules hold as they do for `git add`: nested
`.gitignore` files, `.git/info/exclude`, what the user ignores everywhere. A file that git tracks
belongs to the project although a rule matches it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

from kinetic._core.values import dataclass

_PROGRAM = (
    # A hook of git that starts Python sets these, for a repository that need not be this one.
    *("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_PREFIX"),
    # A checkout in a container often belongs to another user. Nothing of it is run.
    *("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false"),
)
_LIST = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
_PATHS = ("rev-parse", "--git-path", "index", "--git-path", "info/exclude", "--git-path", "config")
_EXCLUDES = ("config", "--type=path", "--get", "core.excludesFile")
_NOT_FOUND = 127
SLOW_S = 5.0  # Then a line says what a submission waits for.


@dataclass(frozen=True)
class Answer:
    """An answer of git about a folder.

    Attributes:
        ignored: real paths that git ignores; what lies in them is ignored as well.
        watched: files on which that depends, besides those in the folder.
        error: why git could not say it; "" if it could.
        is_missing: whether git is not installed.
    """

    ignored: frozenset[str] = frozenset()
    watched: tuple[str, ...] = ()
    error: str = ""
    is_missing: bool = False


def find_repository(folder: str) -> str | None:
    """Return the nearest folder with a `.git`, the folder itself or one around it."""
    path = Path(folder)
    return next((str(top) for top in (path, *path.parents) if os.path.lexists(top / ".git")), None)


def ask(folder: str, repository: str) -> Answer:
    """Ask git what it ignores in a folder of a repository; both are real paths."""
    try:
        listed = _run(folder, *_LIST)
    except OSError:
        return Answer(is_missing=True)
    if listed.returncode:
        lines = os.fsdecode(listed.stderr).strip().splitlines() or ["it ended without a word"]
        return Answer(error=lines[0], is_missing=listed.returncode == _NOT_FOUND)
    names = [os.fsdecode(name).rstrip("/") for name in listed.stdout.split(b"\0") if name]
    if "." in names:  # The repository ignores the whole project: its rules are not meant for it.
        names = []
    own = _run(folder, *_PATHS).stdout.splitlines()
    of_user = _run(folder, *_EXCLUDES).stdout.splitlines()
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    usual = (f"{home}/.gitconfig", f"{home}/.config/git/config", f"{home}/.config/git/ignore")
    above = [top for top in Path(folder).parents if top.is_relative_to(repository)]
    watched = (
        *(os.path.join(folder, os.fsdecode(path)) for path in own + of_user),  # noqa: PTH118
        *(f"{top}/.gitignore" for top in above),
        *usual,
    )
    return Answer(frozenset(f"{folder.rstrip('/')}/{name}" for name in names), watched)


def _run(folder: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*_PROGRAM, "-C", folder, *words]
    notice = f"kinetic: git has not answered for {SLOW_S:g} s: does `git -C {folder} status` end?"
    timer = threading.Timer(SLOW_S, logging.getLogger("kinetic").warning, [notice])
    timer.daemon = True
    timer.start()
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    finally:
        timer.cancel()
