"""The declared data of a job on a host: fetches it, and decides which paths the function gets and
which mounts the worker needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kinetic._core import layout
from kinetic._core.plan import BUCKETS, HUB, Dataset, Plan
from kinetic._core.values import dataclass
from kinetic._datasets import cached_copy
from kinetic._host.identity import Identity
from kinetic._host.worker.mounts import Mount
from kinetic._store import files
from kinetic._store.base import Store, folder_of
from kinetic.errors import NotFound, SetupFailed, StoreError


@dataclass(frozen=True)
class Datasets:
    """Declared data that is ready for use.

    Attributes:
        places: path of each `kinetic.Data` of the call, in the plan's order; without volumes.
        mounts: the mounts that the worker makes.
    """

    places: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()


def root(identity: Identity, store: Store) -> Path:
    """Return the folder in which this host keeps copies of data. All jobs of the machine share this
    folder if the store is a folder, too."""
    folder = folder_of(store)
    return Path(identity.scratch) / "data" if folder is None else folder / layout.DATA


def prepare(identity: Identity, plan: Plan, store: Store, folder: Path) -> Datasets:
    """Make the plan's data available on this host, whose own folder is `folder`.

    Raises:
        SetupFailed: data that the host uses in place, or fetches, does not exist.
        StoreError: the content is damaged, or the disk is full.
    """
    mounts = plan.cluster_mounts()
    sources = [
        _by_cluster(data, mounts[n])
        if n in mounts
        else _prepare_data(data, identity, store, folder / "data" / str(n))
        for n, data in enumerate(plan.data)
    ]
    return Datasets(
        tuple(place for data, (place, _) in zip(plan.data, sources, strict=True) if not data.mount),
        tuple(dict.fromkeys(m for _, mounts in sources for m in mounts)),
    )


def _prepare_data(
    data: Dataset, identity: Identity, store: Store, own: Path
) -> tuple[str, list[Mount]]:
    name = Path(data.source).name
    if data.writable:
        place = _stand_in(data, store)
        return _mount_at(place, data.mount, writable=True) if data.mount else (place, [])
    if data.tree is None and not data.source.startswith((BUCKETS, HUB)):
        source = _source(data)
        return _mount_at(source, data.mount or _stub(own / name, data.is_dir))
    files = _copy_data(data, identity, store)
    guard = Mount(str(files), str(files), optional=True)  # Permissions do not stop root.
    place = str(files if data.is_dir else files / name)
    if not data.mount:
        return place, [guard]
    _, mounts = _mount_at(place, data.mount)
    return data.mount, [guard, *mounts]


def _stand_in(data: Dataset, store: Store) -> str:
    """Return the local folder that stands in for a writable folder of a bucket. All jobs of the
    machine share it."""
    root = folder_of(store)
    if root is None:
        raise SetupFailed(
            f"The function cannot write to {data.source}: hosts on this machine cannot mount "
            "buckets. Run the job on a cluster, or use a store in a folder of this machine."
        )
    folder = root / layout.bucket_folder(data.source)
    files.make_below(folder, root)
    return str(folder)


def _copy_data(data: Dataset, identity: Identity, store: Store) -> Path:
    """Return the folder of the data's copy on this host."""
    if data.tree is not None:
        return cached_copy.provide(store, data.tree, root(identity, store))
    with _note_fetch(data.source, identity, store):
        return _fetch_copy(data, root(identity, store), identity.secrets.get("HF_TOKEN", ""))


@contextlib.contextmanager
def _note_fetch(source: str, identity: Identity, store: Store) -> Iterator[None]:
    """Record in the store which data is being fetched, for the local backend's list of jobs."""
    folder, key = folder_of(store), layout.JobKeys(identity.job_id).fetch
    if folder is None or not (folder / key).parent.is_dir():
        yield
        return
    with contextlib.suppress(StoreError):
        store.put(key, source.encode())
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)


def _fetch_copy(data: Dataset, copies: Path, token: str) -> Path:
    from kinetic._datasets import cloud, hub

    try:
        if data.source.startswith(HUB):
            trusts = data.trusts_code
            return hub.provide(data.source, root=copies, token=token, trusts_code=trusts)
        return cloud.provide(data.source, is_dir=data.is_dir, root=copies)
    except NotFound as error:
        raise SetupFailed(f"kinetic.Data({data.source!r}): {error}") from error


def _by_cluster(data: Dataset, folder: str) -> tuple[str, list[Mount]]:
    """Return the path and the mounts of data that the cluster mounts in this host's pod."""
    source = folder if data.is_dir else f"{folder}/{Path(data.source).name}"
    if not Path(source).exists():
        raise SetupFailed(
            f"kinetic.Data({data.source!r}) is not mounted on this host, at {source}. Check that "
            f"{data.source} still exists, then submit the job again."
        )
    if data.mount in ("", source):
        return source, []
    return _mount_at(source, data.mount, writable=data.writable)


def _mount_at(source: str, target: str, *, writable: bool = False) -> tuple[str, list[Mount]]:
    return target, [Mount(source, target, writable=writable)]


def _source(data: Dataset) -> str:
    if not Path(data.source).exists():
        raise SetupFailed(
            f"kinetic.Data({data.source!r}) is not mounted on this host. Remove fuse=True to have "
            "the data copied."
        )
    return data.source


def _stub(path: Path, is_dir: bool) -> str:
    """Make an empty file or folder as a mount point; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if is_dir:
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    return str(path)
