"""Exact versions of a project's packages, which uv reads from its uv.lock without a network.

In: the project, the lock, packages to leave out. Out: lines of a requirements.txt, each with its
version and markers.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

from kinetic._source import requirements_txt
from kinetic._source.editable import Package
from kinetic._source.pyproject import Pyproject
from kinetic.errors import UsageError

_MEMBERS = re.compile(r"\nmembers = \[\n([^\]]*)\]")
_ROOT = re.compile(
    r'\nname = "(.+)"\n(?:version = .+\n)?source = { (?:editable|virtual) = "\." }\n'
)
_EXPORT = (
    *("export", "--frozen", "--offline", "--no-cache", "--no-config", "--quiet"),
    *("--no-default-groups", "--no-emit-workspace", "--no-hashes", "--no-header"),
)


def find_uv() -> str:
    """Return the path of uv; "" if it is not installed."""
    return shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv") or ""


def has_project(lock: Path, name: str) -> bool:
    """True if the lock belongs to the named project, or to a workspace with it as a member."""
    content = requirements_txt.read_file(lock)
    members = _MEMBERS.search(content)
    return name in (re.findall(r'"(.+)"', members[1]) if members else _ROOT.findall(content))


def read_lines(
    lock: Path,
    project: Pyproject,
    *,
    without: Collection[str],
    editable: Collection[Package],
    uv: str,
) -> Iterator[str]:
    """Yield one line for each package that the project needs. Leave out the project itself and
    editable packages, whose files are sent with the job.

    Args:
        lock: the uv.lock of the project or of its workspace.
        project: the project, with the extras and groups to include.
        without: names of packages to leave out, with the packages that only they need.
        editable: packages that are installed editable on this machine.
        uv: path of the uv program; "" if it is not installed.

    Raises:
        UsageError: uv is not installed, or cannot read the lock; or hosts cannot install a package.
    """
    if not uv:
        raise UsageError(
            f"Hosts must install the versions in {lock}, and uv, which reads that file, is not "
            "installed. Install it: `pip install uv`."
        )
    import subprocess

    command = [uv, *_EXPORT, "--project", str(project.file.parent)]
    command += [f"--extra={each}" for each in project.extras]
    command += [f"--group={each}" for each in project.groups]
    command += [f"--prune={each}" for each in without]
    export = subprocess.run(
        command,
        check=False,
        cwd=lock.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if export.returncode:
        message = " ".join(export.stderr.split())
        raise UsageError(
            f"{uv} cannot read {lock}: {message.removeprefix('error: ').rstrip('.')}. If the file "
            "is damaged or out of date, write it again with `uv lock`."
        )
    for line in export.stdout.splitlines():
        if line and not line.lstrip().startswith(("#", "-e ")):
            yield from requirements_txt.check_requirement(str(lock), line, lock.parent, editable)
