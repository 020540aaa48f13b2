"""The folder in which a host works: the job's source tree, unpacked and verified, and the paths
that the function will see."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kinetic._core import layout
from kinetic._core.place import MULTI_TIER
from kinetic._core.plan import Blob, Plan
from kinetic._core.preemption import SAVING
from kinetic._core.values import dataclass
from kinetic._host.agent import datasets
from kinetic._host.agent.datasets import Datasets
from kinetic._host.identity import Identity
from kinetic._host.worker.home import Home
from kinetic._source import download, ignore, manifest, renewal
from kinetic._source.renewal import UnpackedTree
from kinetic._store import files
from kinetic._store.base import Store, check_key, folder_of
from kinetic._store.many import at_once
from kinetic._system import memory_folder
from kinetic.errors import KineticError, SetupFailed, StoreError, name_some

REFORM_FILE = "reform-requested"
"""A file in the host's folder that asks the function of an elastic job to end its attempt."""
KEPT_BYTES, MOST_KEPT = 1 << 30, 10_000
"""Limits on the bytes and files that a host keeps from its work folder."""
_NEVER_KEPT = ignore.ALWAYS | ignore.DEFAULTS
_NAMED = 3
_MOST_LEVELS = 100
"""Depth to which nested folders are read: a program that nests deeper has a bug."""
_LOCAL_FOLDER = "KINETIC_LOCAL_DIR"


@dataclass(frozen=True)
class Workspace:
    """The paths with which the function runs.

    Attributes:
        root: the host's own folder; removed at the end.
        tree: the unpacked source tree, below root.
        cwd: working directory.
        sys_path: entries that go first on the import path.
        editable: entries that come before the installed packages.
        payload: file with the pickled call.
        function: file with the pickled function, if the payload holds only arguments; else None.
        output_dir: value of KINETIC_OUTPUT_DIR.
        data: paths and mounts of the declared data.
        home: the host's local folder, or None.
        programs: folder for the programs that JAX compiles; "" keeps none.
        sent: size of each file of the tree, by path.
        ready_ns: time when the workspace was complete, since the epoch.
        unpacked: the tree, for the next call of a session; None for any other job.
    """

    root: Path
    tree: Path
    cwd: Path
    sys_path: tuple[str, ...]
    editable: tuple[str, ...]
    payload: Path
    function: Path | None
    output_dir: str
    data: Datasets
    home: Home | None
    programs: str
    sent: Mapping[str, int]
    ready_ns: int
    unpacked: UnpackedTree | None = None


def prepare(
    identity: Identity,
    plan: Plan,
    store: Store,
    before: UnpackedTree | None = None,
    *,
    is_kept: bool = False,
) -> Workspace:
    """Make the host's folder: fetch, verify and unpack everything that the job has sent. In a
    session, `before` is the tree of the last call, or None; with `is_kept`, the worker of the last
    call runs this one, too, and has its local folder already.

    Raises:
        SetupFailed: the stored content is damaged or missing, or this host's disk is full.
    """
    root = Path(identity.scratch) / f"host-{identity.index}"
    tree = root / "tree"
    cwd = tree / (plan.cwd_rel if plan.cwd_rel is not None else plan.entry_rel)
    try:
        if (plan.tree is None or before is None) and root.exists():
            remove(root)  # A killed agent has left it, or the last call, which had another tree.
        root.mkdir(mode=0o700, exist_ok=True)  # Without parents: the job may have been removed.
        unpacked = None
        if plan.tree is None or before is None:
            tree.mkdir(mode=0o700, exist_ok=True)
            entries = [] if plan.tree is None else download.unpack(store, plan.tree, tree)
            if plan.tree is not None and identity.session:
                unpacked = renewal.note(plan.tree, tree, entries)
        else:
            unpacked = renewal.renew(store, plan.tree, before)
            entries = unpacked.entries
        files.make_below(cwd, tree)
        payload = _file_of(store, plan.payload, root / "payload.pkl")
        function = (
            None if plan.function is None else _file_of(store, plan.function, root / "function.pkl")
        )
        home = None if is_kept else prepare_home(identity, plan)
    except (StoreError, LookupError, OSError) as error:
        raise SetupFailed(
            f"The files of the job could not be unpacked on this host: {error}", job_id=plan.job_id
        ) from error
    try:
        output_dir = _output_dir(store, plan)
    except (StoreError, OSError) as error:
        raise SetupFailed(
            f"The output folder {plan.output_dir or 'of the job'} cannot be created on this host. "
            f"Set output_dir= to a folder that the host can write to. The error: {error}",
            job_id=plan.job_id,
        ) from error
    try:
        data = datasets.prepare(identity, plan, store, root)
    except (StoreError, LookupError, OSError) as error:
        raise SetupFailed(
            f"The data of the job could not be fetched: {error}", job_id=plan.job_id
        ) from error
    places = dict.fromkeys(
        [str(tree / p) for p in plan.sys_path_rel] + [str(tree / plan.entry_rel)]
    )
    editable = tuple(str(tree / p) for p in plan.editable_rel if (tree / p).is_dir())
    sent = {entry.path: entry.size_bytes for entry in entries if isinstance(entry, manifest.File)}
    return Workspace(
        *(root, tree, cwd, tuple(places), editable, payload, function, output_dir, data, home),
        _programs_dir(identity, store, plan),
        sent,
        time.time_ns(),
        unpacked,
    )


def clear(space: Workspace) -> UnpackedTree | None:
    """Remove everything from the host's folder except the source tree. Return the tree, which the
    next call of the session updates; None if there is no tree (the function may have removed it),
    or if something could not be removed."""
    if space.unpacked is None or space.tree.is_symlink() or not space.tree.is_dir():
        return None
    with contextlib.suppress(OSError):
        for path in space.root.iterdir():
            if path.is_dir() and not path.is_symlink() and path != space.tree:
                remove(path)
            elif path != space.tree:
                path.unlink()
        return space.unpacked
    return None


def request_reform(space: Workspace) -> None:
    """Ask the function to end its attempt, because a lost slice is back."""
    (space.root / REFORM_FILE).touch()


def read_saving_step(root: Path) -> int | None:
    """Return the step whose checkpoint the function is saving; None if it saves none."""
    for name in SAVING.values():
        with contextlib.suppress(OSError, ValueError):
            return int((root / name).read_text())
    return None


def keep_written(
    space: Workspace, store: Store, prefix: str, stored: dict[str, tuple[int, int]]
) -> str:
    """Store the files that the function made or changed in its folder, smallest first, up to
    `KEPT_BYTES` and `MOST_KEPT`. Return a text with the names of stored and of lost files; "" for
    none.

    Args:
        space: the function's workspace.
        store: store of the job.
        prefix: prefix of the files' keys.
        stored: size and time of each file that is already stored, by name: the path from the
            working directory, or "project/" and the path in the tree. Such a file is stored again
            only if it has changed. Files that this call stores are added.
    """
    start, cwd = len(str(space.tree)) + 1, f"{space.cwd}/"
    written = sorted(
        (info.st_size, path, info.st_mtime_ns)
        for path, info in _files(str(space.tree))
        if info.st_size != space.sent.get(path[start:]) or info.st_mtime_ns > space.ready_ns
    )

    def name(path: str) -> str:
        return path.removeprefix(cwd) if path.startswith(cwd) else f"project/{path[start:]}"

    sizes = itertools.accumulate(size for size, *_ in written)
    fitting = min(bisect.bisect([*sizes], KEPT_BYTES), MOST_KEPT)

    def keep(file: tuple[int, str, int]) -> str:
        """Store a file; return the error, or ""."""
        size, path, changed = file
        try:
            if stored.get(name(path)) != (size, changed):
                _keep_file(store, Path(path), f"{prefix}/{name(path)}")
            stored[name(path)] = size, changed
        except (KineticError, OSError, ValueError) as error:  # ValueError: a name without UTF-8
            return str(error)
        return ""

    problems = at_once(keep, written[:fitting], store.calls_at_once)
    lost = [*itertools.compress(written, problems), *written[fitting:]]
    bound = f"a host keeps {_in_words(KEPT_BYTES)} in {MOST_KEPT:,} files"
    why = next(filter(None, problems), f"{bound}. Write more below $KINETIC_OUTPUT_DIR.")
    words = [_describe((size, each) for each, (size, _) in stored.items())] if stored else []
    if lost:
        words += [f"Not kept: {_describe((size, name(path)) for size, path, _ in lost)}: {why}"]
    return ". ".join(words)


def has_new_entries(space: Workspace) -> bool:
    """True if entries of the working directory itself were made or removed; says nothing about its
    subfolders."""
    with contextlib.suppress(OSError):  # The function may have removed it.
        return space.cwd.stat().st_mtime_ns > space.ready_ns
    return False


def _describe(sized: Iterable[tuple[int, str]]) -> str:
    """Return the names of the largest files, and the size of all."""
    largest = sorted(sized, key=lambda file: (-file[0], file[1]))
    names = [name if name.isprintable() else ascii(name) for _, name in largest]
    return f"{name_some(names, _NAMED)} ({_in_words(sum(size for size, _ in largest))})"


def _keep_file(store: Store, path: Path, key: str) -> None:
    """Put a file into the store: into a folder as a hard link, which takes no time or space."""
    check_key(key)
    if (root := folder_of(store)) is not None:
        with contextlib.suppress(OSError):  # The file system has no links, or the job was removed.
            target = root / key
            files.make_below(target.parent, root / layout.JobKeys(layout.job_of(key)).prefix)
            target.unlink(missing_ok=True)
            os.link(path, target)
            return
    store.put(key, path)


def as_client_names(text: str, tree: Path | None, plan: Plan) -> str:
    """Return a text with the tree's files and the notebook cells named as on the client."""
    if tree is not None and plan.client_root:
        text = text.replace(f"{tree}/", f"{plan.client_root.rstrip('/')}/")
    for cell in plan.cells:
        text = text.replace(f'"{cell.file}"', f'"{cell.title}"')
    return text


def _in_words(size_bytes: int) -> str:
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _files(folder: str, levels: int = _MOST_LEVELS) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files below the folder, except caches and environments."""
    with contextlib.suppress(OSError), os.scandir(folder) as scan:
        entries = [each for each in scan if each.name not in _NEVER_KEPT]
        if ignore.is_not_source({entry.name for entry in entries}, default_excludes=True):
            return
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    yield entry.path, entry.stat()
            elif levels and entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, levels - 1)


def _file_of(store: Store, blob: Blob, target: Path) -> Path:
    """Return the path of a file with the content: in the store's folder, or fetched to `target`.
    The worker verifies the digest before it unpickles the content."""
    key = layout.blob(blob.digest)
    if (folder := folder_of(store)) is not None:
        return folder / key
    store.fetch(key, target)
    return target


def _output_dir(store: Store, plan: Plan) -> str:
    if plan.output_dir:
        if "://" not in plan.output_dir:
            Path(plan.output_dir).mkdir(parents=True, exist_ok=True)
        return plan.output_dir
    if (root := folder_of(store)) is None:
        return f"{store.uri.rstrip('/')}/{layout.JobKeys(plan.job_id).outputs}"
    folder = root / layout.JobKeys(plan.job_id).outputs
    files.make_below(folder, root)
    return str(folder)


def _programs_dir(identity: Identity, store: Store, plan: Plan) -> str:
    """Return the folder for compiled programs: only for host 0 of a simulated slice, else ""."""
    root = folder_of(store)
    if root is None or not (plan.options.compile_check and identity.simulated) or identity.host:
        return ""
    return str(root / layout.AttemptKeys(plan.job_id, identity.attempt).programs)


def remove(workspace_root: Path) -> None:
    """Remove a host's folder as far as possible."""
    import shutil  # keeps the start of an agent quick

    shutil.rmtree(workspace_root, ignore_errors=True)


def prepare_home(identity: Identity, plan: Plan) -> Home | None:
    """Return the local folder of a host, which lasts from attempt to attempt: a pod's volume, or
    for a simulated host a folder in its machine's memory.

    Return None if the host has no such volume or memory. Also return None with GKE's multi-tier
    checkpointing in a JobSet of slices only: there a service of the cluster manages the volume and
    tells each host its index among JAX's processes.

    Raises:
        OSError: the folder that the user named in `env=` cannot be made.
    """
    if identity.is_pod:
        folder = identity.base_env.get(_LOCAL_FOLDER, "")
        is_multi_tier = plan.options.local_storage == MULTI_TIER and not identity.simulated
        is_managed = is_multi_tier and plan.hosts > 1 and not plan.has_head
        return Home(folder, folder, identity.index, 1) if folder and not is_managed else None
    if not identity.simulated:
        return None
    hosts = plan.hosts
    name = f"host-{identity.index}"
    if named := plan.options.env.get(_LOCAL_FOLDER):
        own = Path(named, name)
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Home(str(own), str(Path(named)), identity.index, hosts)
    own_folder = memory_folder.make(plan.job_id, name)
    shared = memory_folder.make(plan.job_id, "local") if hosts > 1 else own_folder
    if own_folder is None or shared is None:
        return None
    return Home(str(own_folder), str(shared), identity.index, hosts)
