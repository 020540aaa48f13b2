"""Folders in which jobs left files: results, not source, also for later jobs that write elsewhere.


In: the user's cache folder, a path. Out: a note there, and the paths noted.

One file, to which paths are appended, each ended by a NUL byte. If it is lost, old results may be
sent.
"""

# ruff: noqa: PTH118

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger("kinetic.packaging")
_NAME = "outputs"
_MOST = 2000


def note(cache_dir: Path, output_dir: str | None) -> None:
    """Remember a job's output folder, if it is for results alone; failure to do so is ignored, as
    are None and URIs."""
    if output_dir is None or "://" in output_dir:
        return
    known = list_noted(cache_dir)
    if output_dir in known or not is_for_results(output_dir, known):
        return
    file = os.path.join(cache_dir, _NAME)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The oldest half is dropped. A path that another process adds at the same time may be lost.
        if len(known) >= _MOST:
            _replace(file, known[_MOST // 2 :])
        with open(file, "ab") as notes:
            notes.write(os.fsencode(output_dir) + b"\0")
    except OSError as error:
        _log.debug("the output folder %s could not be remembered: %s", output_dir, error)


def is_for_results(output_dir: str, noted: Collection[str]) -> bool:
    """Whether nothing is in an output folder that no job has left there: it was `noted`, or is
    missing, or empty but for files of git's."""
    if output_dir in noted:
        return True
    try:
        with os.scandir(output_dir) as entries:
            return all(entry.name.startswith(".git") for entry in entries)
    except OSError:
        return True


def list_noted(cache_dir: Path) -> list[str]:
    """Return the output folders of earlier jobs, oldest first."""
    try:
        content = Path(cache_dir, _NAME).read_bytes()
    except OSError:
        return []
    return list(
        dict.fromkeys(os.fsdecode(path) for path in content.split(b"\0") if path.startswith(b"/"))
    )


def _replace(file: str, paths: list[str]) -> None:
    temporary = Path(f"{file}.{os.getpid()}")
    temporary.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    temporary.replace(file)
