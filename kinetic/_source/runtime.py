"""kinetic itself as an archive: hosts of a cluster run exactly the version that submitted the job.

In: the package as it is installed on this machine (a wheel, an editable checkout). Out: `Archive`,
and the program that unpacks it in a pod.

The same files give the same bytes: names are sorted, and times, owners and modes are left out. The
archive has none of the package's dependencies (gRPC, cloudpickle, …), which hosts install (see
`dependencies`).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
import zipfile
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from kinetic._core.plan import Blob
from kinetic._core.values import dataclass
from kinetic._source import cache
from kinetic._source.walk import stamp_of
from kinetic.errors import StoreError, UsageError

_log = logging.getLogger("kinetic.packaging")

_PACKAGE = Path(__file__).parents[1]
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold."""
_MODE = 0o100644 << 16
_LEFT_OUT = ("__pycache__", ".")
_DASHBOARD = "_dashboard/"
"""The dashboard's folder, which hosts do not need."""
_SCHEMA = 1


@dataclass(frozen=True)
class Archive:
    """The package as a zip.

    Attributes:
        blob: its digest and size.
        data: its bytes.
    """

    blob: Blob
    data: bytes = field(repr=False)


def archive(cache_dir: Path, package: Path = _PACKAGE) -> Archive:
    """Return the package as a zip, from the cache unless one of its files has changed.

    Args:
        cache_dir: the user's cache folder.
        package: the folder of the package.

    Raises:
        UsageError: the package cannot be read.
    """
    began_ns = time.time_ns()
    note = cache_dir / "runtime" / hashlib.sha256(os.fsencode(package)).hexdigest()[:32]
    try:
        stamps, racy = _stamp_files(package, began_ns)
        cached = _read_note(note, stamps)
        if cached is not None:
            return cached
        packed = _pack(package)
    except OSError as error:
        raise UsageError(
            f"kinetic's own files in {package} cannot be read: {error}. Reinstall kinetic."
        ) from error
    if not racy:
        _remember(note, stamps, packed)
    return packed


def bootstrap(package: Path = _PACKAGE) -> str:
    """Return the source of the program that a pod runs first (`kinetic._host.bootstrap`)."""
    return (package / "_host/bootstrap.py").read_text("utf-8")


def _pack(package: Path) -> Archive:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        names = (entry.path[len(str(package)) + 1 :] for entry in _list_entries(str(package)))
        for rel in sorted(names):
            if rel.startswith(_DASHBOARD):
                continue
            about = zipfile.ZipInfo(f"kinetic/{rel}", _EPOCH)
            about.create_system, about.external_attr = 3, _MODE
            about.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(about, (package / rel).read_bytes())
    data = file.getvalue()
    return Archive(Blob(hashlib.sha256(data).hexdigest(), len(data)), data)


def _list_entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the package's files, in any order."""
    with os.scandir(folder) as listing:
        for entry in listing:
            if entry.name.startswith(_LEFT_OUT) or entry.name.endswith(".pyc"):
                continue
            if entry.is_dir():
                yield from _list_entries(entry.path)
            else:
                yield entry


def _stamp_files(package: Path, began_ns: int) -> tuple[str, bool]:
    """Return a text that changes when a file of the package changes, and True if a file is so new
    that its next change might not show."""
    stamps = {entry.path: stamp_of(entry.stat()) for entry in _list_entries(str(package))}
    if not stamps:
        raise FileNotFoundError(f"{package} is empty")
    text = json.dumps([_SCHEMA, sorted(stamps.items())])
    racy = not all(cache.is_trusted(stamp, began_ns) for stamp in stamps.values())
    return hashlib.sha256(text.encode()).hexdigest(), racy


def _read_note(note: Path, stamps: str) -> Archive | None:
    try:
        line, _, data = cache.read(note).partition(b"\n")
        head = json.loads(line)
        if head["stamps"] != stamps:
            return None
        return Archive(Blob(head["digest"], len(data)), data)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(note: Path, stamps: str, packed: Archive) -> None:
    head = {"stamps": stamps, "digest": packed.blob.digest}
    try:
        cache.write(note, json.dumps(head).encode() + b"\n" + packed.data)
    except (OSError, StoreError) as error:
        _log.debug("the archive of kinetic could not be cached in %s: %s", note, error)
