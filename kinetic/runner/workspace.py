"""The folder in which a host works: the job's source tree, unpacked and verified, and the paths that the function will see.

In: identity, plan, store. Out: `Workspace`, and a folder on disk. Called by the agent before it joins.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kinetic.errors import SetupFailed, StoreError
from kinetic.job import paths
from kinetic.job.plan import Blob, Plan
from kinetic.packaging import arrival
from kinetic.runner import datasets
from kinetic.runner.datasets import Datasets
from kinetic.runner.identity import Identity
from kinetic.storage.base import Store
from kinetic.storage.local import LocalStore


@dataclass(frozen=True)
class Workspace:
    """Where the function runs.

    Attributes:
        root: the host's own folder; removed at the end.
        tree: the unpacked source tree, below root.
        cwd: working directory.
        sys_path: entries that go first on the import path.
        payload: file with the pickled call.
        function: file with the pickled function, where the payload holds only arguments; else None.
        output_dir: value of KINETIC_OUTPUT_DIR.
        data: where the declared data is.
    """

    root: Path
    tree: Path
    cwd: Path
    sys_path: tuple[str, ...]
    payload: Path
    function: Path | None
    output_dir: str
    data: Datasets


def prepare(identity: Identity, plan: Plan, store: Store) -> Workspace:
    """Fetch, verify and unpack.

    Raises:
        SetupFailed: what was stored is damaged or missing, or this host's disk does not take it.
    """
    root = Path(identity.scratch) / f"host-{identity.host}"
    tree = root / "tree"
    try:
        tree.mkdir(parents=True, mode=0o700, exist_ok=True)
        if plan.tree is not None:
            _unpack(store, plan, tree)
        payload = _file_of(store, plan.payload, root / "payload.pkl")
        function = None if plan.function is None else _file_of(store, plan.function, root / "function.pkl")
        output_dir = _output_dir(store, plan)
        data = datasets.prepare(identity, plan, store, root)
    except (StoreError, LookupError, OSError) as error:
        raise SetupFailed(f"The source of the job could not be unpacked: {error}", job_id=plan.job_id) from error
    cwd = tree / (plan.cwd_rel if plan.cwd_rel is not None else plan.entry_rel)
    cwd.mkdir(parents=True, exist_ok=True)
    places = dict.fromkeys([str(tree / p) for p in plan.sys_path_rel] + [str(tree / plan.entry_rel)])
    return Workspace(root, tree, cwd, tuple(places), payload, function, output_dir, data)


def _unpack(store: Store, plan: Plan, tree: Path) -> None:
    assert plan.tree is not None
    arrival.unpack(store, plan.tree, tree)


def _file_of(store: Store, blob: Blob, target: Path) -> Path:
    """A file with the content; the worker verifies its digest before it unpickles."""
    key = paths.blob(blob.digest)
    if isinstance(store, LocalStore):
        return store.path(key)
    target.write_bytes(store.get(key))
    return target


def _output_dir(store: Store, plan: Plan) -> str:
    if plan.output_dir:
        if "://" not in plan.output_dir:
            Path(plan.output_dir).mkdir(parents=True, exist_ok=True)
        return plan.output_dir
    if not isinstance(store, LocalStore):
        return f"{store.uri.rstrip('/')}/{paths.outputs(plan.job_id)}"
    folder = store.path(paths.outputs(plan.job_id))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder)


def remove(workspace_root: Path) -> None:
    """Remove a host's folder; what cannot be removed stays."""
    shutil.rmtree(workspace_root, ignore_errors=True)
