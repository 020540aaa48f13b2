"""Opening a store by its address: the only module that knows all kinds of stores."""

from __future__ import annotations

from pathlib import Path

from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic.errors import UsageError


def open_store(uri: str | Path, *, existing: bool = False) -> Store:
    """Open the store with this address, a path or a URI; create nothing.

    With `existing`, a folder that was removed is not created again (see `LocalStore`).

    Raises:
        UsageError: the address is not that of a store.
        StoreError: the folder belongs to another user, or others can write to it.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not text or "\0" in text:
        raise UsageError(
            f"{text!r} is not the address of a store. Use the path of a folder or a gs:// URI."
        )
    if not separator:
        return _open_folder(Path(text), existing=existing)
    if scheme == "file":
        return _open_folder(_local_path(text, rest))
    if scheme == "gs":
        from kinetic._store.gcs import GcsStore

        return GcsStore(text)
    if scheme in ("ray+http", "ray+https"):
        from kinetic._store.ray import RayStore

        return RayStore(text)
    raise UsageError(
        f"{text!r} is not the address of a store: the scheme {scheme}:// is unknown. Use the path "
        "of a folder, file:///path or a gs:// URI."
    )


def as_existing(store: Store) -> Store:
    """Return a view of a store that never creates its folder (`existing` of `open_store`)."""
    return store.as_existing() if isinstance(store, LocalStore) else store


def _open_folder(folder: Path, *, existing: bool = False) -> LocalStore:
    store = LocalStore(folder, existing=existing)
    store.check()
    return store


def _local_path(uri: str, rest: str) -> Path:
    from urllib.parse import unquote

    host, _, path = rest.partition("/")
    if host not in ("", "localhost") or not path:
        raise UsageError(
            f"{uri!r} does not name a folder of this machine. Write file:///path, with three "
            "slashes."
        )
    return Path("/" + unquote(path))
