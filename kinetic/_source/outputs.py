"""Folders in which jobs left files: results, not source, also for later jobs that write elsewhere.

In: the user's cache folder, a path. Out: a note there, and the paths noted.

One file, to which paths are appended, each ended by a NUL byte. If it is lost, old results may be
sent.
"""

# ruff: noqa: PTH118, PTH119

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from kinetic._store import files
from kinetic.errors import StoreError

_log = logging.getLogger("kinetic.packaging")
_NAME = "outputs"
_MOST = 2000
_TOLD = "?"
"""Before the path of a folder that holds what may be source: no other call leaves it out."""


def note(cache_dir: Path, output_dir: str | None) -> None:
    """Remember a job's output folder; of one that holds what may be source, only that its user was
    told. Failure to do so is ignored, as are None and URIs."""
    if output_dir is None or "://" in output_dir:
        return
    known = _read(cache_dir)
    if output_dir in known or f"{_TOLD}{output_dir}" in known:
        return
    entry = output_dir if find_source(output_dir, known) is None else f"{_TOLD}{output_dir}"
    file = os.path.join(cache_dir, _NAME)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The oldest half is dropped. A path that another process adds at the same time may be lost.
        if len(known) >= _MOST:
            kept = known[_MOST // 2 :]
            files.save(Path(file), [os.fsencode(path) + b"\0" for path in kept])
        with open(file, "ab") as notes:
            notes.write(os.fsencode(entry) + b"\0")
    except (OSError, StoreError) as error:
        _log.debug("the output folder %s could not be remembered: %s", output_dir, error)


def list_noted(cache_dir: Path) -> list[str]:
    """Return the output folders of earlier jobs, oldest first."""
    return [path for path in _read(cache_dir) if path.startswith("/")]


def warn_of_source(cache_dir: Path, output_dir: str) -> tuple[str, ...]:
    """Say, once, if an output folder holds what may be source."""
    known = _read(cache_dir)
    told = f"{_TOLD}{output_dir}" in known
    found = None if told else find_source(output_dir, known)
    if found is None:
        return ()
    name = os.path.basename(output_dir)
    return (
        f"The output folder {output_dir} holds files that no job is known to have left, such as "
        f"{os.path.relpath(found, output_dir)}. Calls that leave files there do not send them: if "
        f"the function needs them, choose another folder, or write !{name}/ in .kineticignore.",
    )


def find_source(output_dir: str, known: Collection[str]) -> str | None:
    """Return a file in an output folder that no job is known to have left; files whose names begin
    with a dot are none."""
    if output_dir in known:
        return None
    for folder, folders, names in os.walk(output_dir):
        folders[:] = [each for each in folders if os.path.join(folder, each) not in known]
        if found := next((each for each in names if not each.startswith(".")), None):
            return os.path.join(folder, found)
    return None


def _read(cache_dir: Path) -> list[str]:
    try:
        content = Path(cache_dir, _NAME).read_bytes()
    except OSError:
        return []
    paths = map(os.fsdecode, content.split(b"\0"))
    return list(dict.fromkeys(path for path in paths if path.startswith(("/", f"{_TOLD}/"))))
