"""Declared data of a call: the `Data` that its pickle left out, and its volumes."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, cast

from kinetic._core.plan import Dataset, Tree
from kinetic._core.values import dataclass
from kinetic._datasets.data import Data
from kinetic._source.bundle import Bundle
from kinetic._source.upload import Changes, upload
from kinetic._store.base import Store
from kinetic.errors import SourceChanged, UsageError, UsageTypeError

_DEEPEST = 100
"""Deepest nesting of containers that is searched for `Data`; the limit also ends circles."""
_RESERVED = ("/_kinetic", "/proc", "/sys", "/dev")


@dataclass(frozen=True)
class CallData:
    """The data that a call needs.

    Attributes:
        data: Entries of the plan: volumes first, then the data in the call, in the order of their
            numbers in the pickle.
        bundles: Contents to send, with the `Data` that they come from.
    """

    data: tuple[Dataset, ...] = ()
    bundles: tuple[tuple[Data, Bundle], ...] = field(default=(), repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the caller, to show before the data is sent."""
        return tuple(
            f"{data!r}: {warning}" for data, bundle in self.bundles for warning in bundle.warnings
        )


def check_volumes(value: object) -> dict[str, Data]:
    """Check `volumes`: a dict of absolute path to `Data`, none inside another.

    Raises:
        UsageError: The paths are invalid or overlap, or a value is not `Data`.
    """
    if not isinstance(value, Mapping):
        raise UsageTypeError(
            f'volumes must be a dict such as {{"/data": kinetic.Data("./data")}}; got {value!r}.'
        )
    checked: dict[str, Data] = {}
    for mount, data in value.items():
        path = _check_mount(mount)
        if not isinstance(data, Data):
            raise UsageTypeError(
                f"volumes[{mount!r}] must be kinetic.Data; got {data!r}. Write kinetic.Data(PATH), "
                "with a path or a URI."
            )
        for other in checked:
            if path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/"):
                raise UsageError(
                    f"volumes: {path!r} and {other!r} overlap. Choose paths that do not contain "
                    "each other."
                )
        checked[path] = data
    return checked


def _check_mount(mount: object) -> str:
    if not isinstance(mount, str) or not mount.startswith("/") or "\0" in mount:
        raise UsageError(
            f"The keys of volumes must be absolute paths, such as '/data'; got {mount!r}."
        )
    path = "/" + posixpath.normpath(mount).lstrip("/")
    if path == "/" or any(
        path == reserved or path.startswith(f"{reserved}/") for reserved in _RESERVED
    ):
        raise UsageError(
            f"volumes: data cannot be mounted at {mount!r}: the system needs that path. Choose "
            "another path, such as /data."
        )
    return path


def load(
    held: Sequence[Data],
    mounted: Mapping[str, Data],
    *,
    cache_dir: Path,
    exclude: Sequence[Path] = (),
) -> CallData:
    """Pack the data of a call. Unchanged content that was packed before is not read again.

    Args:
        held: The data that the call's pickle refers to by number, in the order of the numbers.
        mounted: Its volumes.
        cache_dir: The user's cache folder.
        exclude: Folders that are never data: kinetic's own.

    Raises:
        UsageError: A part of the data cannot be read.
    """
    declared: list[tuple[Data, str]] = [(data, path) for path, data in mounted.items()]
    declared += [(data, "") for data in held]
    packed = [_pack_bundle(data, cache_dir, exclude) for data, _ in declared]
    return CallData(
        data=tuple(
            _make_dataset(data, path, bundle)
            for (data, path), bundle in zip(declared, packed, strict=True)
        ),
        bundles=tuple(
            (data, bundle)
            for (data, _), bundle in zip(declared, packed, strict=True)
            if bundle is not None
        ),
    )


def _pack_bundle(data: Data, cache_dir: Path, exclude: Sequence[Path]) -> Bundle | None:
    return (
        None
        if data.fuse or not data.is_local
        else data.pack(cache_dir=cache_dir, exclude=tuple(exclude))
    )


def _make_dataset(data: Data, mount: str, bundle: Bundle | None) -> Dataset:
    tree = None if bundle is None else bundle.tree
    trusts_code, writable = data.hf_trust_remote_code, data.writable
    if mount and not data.is_dir:
        # Without the file's name at its end, or an extension, `mount` is a folder for it.
        file, last = posixpath.basename(data.path), posixpath.basename(mount)
        if last != file and not posixpath.splitext(last)[1]:
            mount = f"{mount}/{file}"
    return Dataset(data.path, data.is_dir, tree, mount, data.fuse, trusts_code, writable)


def find_data(value: object) -> Iterator[Data]:
    """Yield the data in lists, tuples, dicts and sets, at any depth."""
    waiting, visited = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Data):
            yield item
        elif type(item) in (list, tuple, set, frozenset, dict) and id(item) not in visited:
            visited.add(id(item))
            waiting += cast("Iterable[object]", item)
            waiting += item.values() if isinstance(item, dict) else ()


def localize(value: Any) -> Any:
    """Replace each `Data` in lists, tuples, dicts and sets by its local path, to call the function
    in this process. Other objects keep their `Data`, which can be opened as a path. A value without
    `Data` is returned unchanged."""
    return _localize(value, set())


def _localize(value: Any, above: set[int]) -> Any:
    if isinstance(value, Data):
        return value.__fspath__()
    kind = type(value)
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return value
    if id(value) in above or len(above) > _DEEPEST:
        return value
    parts = list(value.items() if isinstance(value, dict) else value)
    new = [_localize(part, above | {id(value)}) for part in parts]
    if all(one is other for one, other in zip(parts, new, strict=True)):
        return value
    if hasattr(kind, "_make"):  # A named tuple.
        return kind._make(new)
    return kind(new) if kind in (list, tuple, dict, set, frozenset) else value


def send(bundles: Sequence[tuple[Data, Bundle]], store: Store) -> tuple[int, dict[Tree, Tree]]:
    """Upload the data; content that the store has is not sent again.

    Returns:
        The number of bytes sent; and for each tree that changed since it was packed, the tree that
            was sent instead.

    Raises:
        SourceChanged: The data has changed since it was first sent, and this store lacks the
            earlier content.
        UsageError: A part of the data is no longer readable.
        StoreError: The store cannot be written to.
    """
    size_bytes = 0
    changed: dict[Tree, Bundle] = {}
    for data, bundle in bundles:
        if bundle.tree not in changed:
            receipt = upload(bundle, store, on_change=functools.partial(_check_changes, data))
            size_bytes += receipt.size_bytes
            if receipt.changed is not None:
                changed[bundle.tree] = receipt.changed
        data.note_sent(changed.get(bundle.tree))
    return size_bytes, {tree: now.tree for tree, now in changed.items()}


def _check_changes(data: Data, changes: Changes) -> None:
    """Raise if the content has changed since the data was first sent, or if a part is not readable.
    Data that was never sent may change."""
    if data.was_sent:
        raise SourceChanged(
            f"{data!r} has changed since it was first used (file {sorted(changes)[0]!r}), and this "
            "store lacks the earlier content. Make a new Data to send the current content."
        )
    unreadable = [
        path
        for path, file in changes.items()
        if file is None and (not data.is_dir or Path(data.path, path).exists())
    ]
    if unreadable:
        raise UsageError(
            f"{data!r}: {unreadable[0]} can no longer be read. Make the file readable, or make a "
            "new Data."
        )
