"""One digest for the names and contents of a file or folder.

In: a local path. Out: 64 hex digits.

Two levels: each file's digest covers its path in the folder, a NUL and its content; the whole is
the digest of a word that tells a folder from a file and of the files' digests, sorted by path.
Times, owners and permissions do not count.
"""

# ruff: noqa: PTH118

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from kinetic._source.threads import in_threads
from kinetic.errors import UsageError

_THREADED_FROM = 17
_CHUNK_BYTES = 1 << 20


def content_hash(path: Path, *, is_dir: bool) -> str:
    """Return the digest.

    Raises:
        UsageError: a part of it cannot be read.
    """
    try:
        files = sorted(_files(str(path))) if is_dir else [(path.name, str(path))]
        digests = in_threads(_of_file, files, worth=len(files) >= _THREADED_FROM)
    except OSError as error:
        raise UsageError(f"The data {path} cannot be read: {error}.") from error
    whole = hashlib.sha256(b"dir:" if is_dir else b"file:")
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def _files(root: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the folder, path) of each file, following links but no circle of them."""
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        rel, way = todo.pop()
        folder = os.path.join(root, rel)
        info = os.stat(folder)  # noqa: PTH116
        if (info.st_dev, info.st_ino) in way:
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                inside = os.path.join(rel, entry.name)
                if entry.is_dir():
                    todo.append((inside, way | {(info.st_dev, info.st_ino)}))
                elif entry.is_file():
                    yield inside, entry.path


def _of_file(file: tuple[str, str]) -> bytes:
    digest = hashlib.sha256(os.fsencode(file[0]) + b"\0")
    with open(file[1], "rb", buffering=0) as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
