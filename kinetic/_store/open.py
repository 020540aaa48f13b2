"""From the text that names a store to the store.

In: a path, a file:// URI or a gs:// URI. Out: a `Store`.
"""

from __future__ import annotations

from pathlib import Path

from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic.errors import UsageError


def open_store(uri: str | Path) -> Store:
    """Open the store with this address; creates nothing.

    Raises:
        UsageError: no store can have this address.
        StoreError: the folder belongs to somebody else, or others can write to it.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not text or "\0" in text:
        raise UsageError(
            f"{text!r} does not name a store. Give the path of a folder, or a gs:// URI."
        )
    if not separator:
        return _checked(Path(text))
    if scheme == "file":
        return _checked(_local_path(text, rest))
    if scheme == "gs":
        raise UsageError(
            f"The store {text!r} is in Google Cloud Storage, which comes with the [gcp] extra: use "
            "the path of a folder for now."
        )
    raise UsageError(
        f"No store is known for {scheme}:// in {text!r}. Give the path of a folder, file:///path, "
        "or a gs:// URI."
    )


def _checked(folder: Path) -> LocalStore:
    store = LocalStore(folder)
    store.check()
    return store


def _local_path(uri: str, rest: str) -> Path:
    from urllib.parse import unquote

    host, _, path = rest.partition("/")
    if host not in ("", "localhost") or not path:
        raise UsageError(
            f"{uri!r} names no folder of this machine. Write file:///path, with three slashes."
        )
    return Path("/" + unquote(path))
