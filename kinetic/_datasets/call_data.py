"""Declared data of a call: what its pickle left out, and its volumes.

In: `Data`, volumes, the user's cache folder. Out: `CallData`: the plan's entries, what to send.
"""

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
"""The deepest nesting of containers; also ends circles."""
_RESERVED = ("/_kinetic", "/proc", "/sys", "/dev")


@dataclass(frozen=True)
class CallData:
    """The data that a call needs.

    Attributes:
        data: the plan's entries: volumes first, then what the call holds, by its numbers there.
        bundles: what has to be sent, with the `Data` it comes from.
    """

    data: tuple[Dataset, ...] = ()
    bundles: tuple[tuple[Data, Bundle], ...] = field(default=(), repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Facts that the caller should know before the data leaves the machine."""
        return tuple(
            f"{data!r}: {warning}" for data, bundle in self.bundles for warning in bundle.warnings
        )


def volumes(value: object) -> dict[str, Data]:
    """Check `volumes`: a dict of absolute path to `Data`, none inside another.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise UsageTypeError(
            f'volumes must be a dict such as {{"/data": kinetic.Data("./data")}}; it is {value!r}.'
        )
    checked: dict[str, Data] = {}
    for place, data in value.items():
        path = _mount_path(place)
        if not isinstance(data, Data):
            raise UsageTypeError(
                f"volumes[{place!r}] must be kinetic.Data; it is {data!r}. Write "
                f"kinetic.Data({data!r})."
            )
        for other in checked:
            if path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/"):
                raise UsageError(
                    f"volumes: {path!r} and {other!r} overlap. Give each data a path of its own."
                )
        checked[path] = data
    return checked


def _mount_path(place: object) -> str:
    if not isinstance(place, str) or not place.startswith("/") or "\0" in place:
        raise UsageError(f"volumes: {place!r} is not an absolute path.")
    path = "/" + posixpath.normpath(place).lstrip("/")
    if path == "/" or any(
        path == reserved or path.startswith(f"{reserved}/") for reserved in _RESERVED
    ):
        raise UsageError(
            f"volumes: data cannot be mounted at {place!r}: the system needs that path. Choose "
            "another one, such as /data."
        )
    return path


def load(
    held: Sequence[Data],
    mounted: Mapping[str, Data],
    *,
    cache_dir: Path,
    exclude: Sequence[Path] = (),
) -> CallData:
    """Pack the data of a call. Reads the local disk; content that was packed before and is
    unchanged is not read again.

    Args:
        held: the data that the call's pickle left out, by number.
        mounted: its volumes.
        cache_dir: the user's cache folder.
        exclude: folders that are never data: kinetic's own.

    Raises:
        UsageError: it cannot be read.
    """
    declared: list[tuple[Data, str]] = [(data, path) for path, data in mounted.items()]
    declared += [(data, "") for data in held]
    packed = [_bundle(data, cache_dir, exclude) for data, _ in declared]
    return CallData(
        data=tuple(
            _dataset(data, path, bundle)
            for (data, path), bundle in zip(declared, packed, strict=True)
        ),
        bundles=tuple(
            (data, bundle)
            for (data, _), bundle in zip(declared, packed, strict=True)
            if bundle is not None
        ),
    )


def _bundle(data: Data, cache_dir: Path, exclude: Sequence[Path]) -> Bundle | None:
    return (
        None
        if data.fuse or not data.is_local
        else data.pack(cache_dir=cache_dir, exclude=tuple(exclude))
    )


def _dataset(data: Data, mount: str, bundle: Bundle | None) -> Dataset:
    tree = None if bundle is None else bundle.tree
    trusts_code, writable = data.hf_trust_remote_code, data.writable
    if mount and not data.is_dir:
        # A file appears in a folder, unless the path's name is one for this file.
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
    """Return a value for a call in this process: each `Data` in lists, tuples, dicts and sets is
    replaced by its local path. Elsewhere a `Data` stays, and can be opened as a path.

    A value without `Data` is returned as is.
    """
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
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(new)
    return kind(new) if kind in (list, tuple, dict, set, frozenset) else value


def send(bundles: Sequence[tuple[Data, Bundle]], store: Store) -> tuple[int, dict[Tree, Tree]]:
    """Upload the data; content that the store has is not sent again.

    Returns:
        How many bytes that took, and for each tree that changed since it was packed, what was sent
        instead.

    Raises:
        SourceChanged: it has changed since it was first sent, and this store lacks the earlier
            content.
        UsageError: a part of it cannot be read any more.
        StoreError: the store cannot be written to.
    """
    size_bytes = 0
    changed: dict[Tree, Bundle] = {}
    for data, bundle in bundles:
        if bundle.tree not in changed:
            sent = upload(bundle, store, on_change=functools.partial(_check_changes, data))
            size_bytes += sent.size_bytes
            if sent.changed is not None:
                changed[bundle.tree] = sent.changed
        data.note_sent(changed.get(bundle.tree))
    return size_bytes, {tree: now.tree for tree, now in changed.items()}


def _check_changes(data: Data, changes: Changes) -> None:
    """Data may change until it is first sent; from then on it stands for what was sent. Parts that
    exist must be readable."""
    if data.was_sent:
        raise SourceChanged(
            f"{data!r} has changed since it was first used ({sorted(changes)[0]}), and this store "
            "does not have the earlier content: make a new Data to send the current one."
        )
    unreadable = [
        path
        for path, file in changes.items()
        if file is None and (not data.is_dir or Path(data.path, path).exists())
    ]
    if unreadable:
        raise UsageError(
            f"{data!r}: this part of it cannot be read any more: {unreadable[0]}. Make it "
            "readable, or make a new Data."
        )
