"""Output folders of jobs: they hold results, not source, so jobs do not send them to their hosts.

Each is marked as a cache (https://bford.info/cachedir/), which the source tree leaves out.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kinetic._source.ignore import CACHE_TAG

_log = logging.getLogger("kinetic.packaging")
_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Jobs of kinetic leave files here, so this folder is not sent with later jobs. Backups that\n"
    "# honour this tag leave it out, too. Remove this file to send and back up the folder.\n"
)


def mark(output_dir: str) -> None:
    """Mark a job's output folder as a cache, unless it has files that may be source. For a URI, do
    nothing; ignore errors."""
    if "://" in output_dir or holds_files(output_dir):
        return
    try:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CACHE_TAG).write_text(_TEXT)
    except OSError as error:
        _log.debug("the output folder %s could not be marked: %s", output_dir, error)


def holds_files(output_dir: str) -> bool:
    """True if a folder has files that may be source: their names do not begin with a dot, and their
    folder is not marked as a cache."""
    for _, folders, names in os.walk(output_dir):
        if CACHE_TAG in names:
            folders.clear()
        elif any(not name.startswith(".") for name in names):
            return True
    return False
