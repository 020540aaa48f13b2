"""A cluster on a laptop, by kind's own command line: for trying manifests, queues and roles."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.resources import NODES
from kinetic._clusters import access
from kinetic._clusters.objects import count_chips, select_nodes
from kinetic._clusters.observed import Document
from kinetic._clusters.wanted import LABEL, Wanted
from kinetic._core.accelerators.topology import Topology
from kinetic.errors import PreflightError

MOST_NODES = 16
_POOL = "cloud.google.com/gke-nodepool"
_PAGE = "https://kind.sigs.k8s.io/docs/user/quick-start"


def check_installed(variables: Mapping[str, str]) -> None:
    """Check that Docker and kind, which a cluster on this machine needs, are installed.

    Raises:
        PreflightError: Docker or kind is missing.
    """
    for name in ("Docker", "kind"):
        if shutil.which(name.lower(), path=variables.get("PATH")) is None:
            raise PreflightError(
                f"A cluster on this machine needs {name}, which is not installed. Install Docker "
                f"and kind ({_PAGE}); without a cluster, `kinetic run` simulates slices here."
            )


def make_config(wanted: Wanted, store: Path) -> Document:
    """Return kind's configuration: one node for each machine of the slices, with the labels that
    GKE would give to it. Each node mounts the store's folder under the same path."""
    mounts = [{"hostPath": str(store), "containerPath": str(store)}]
    own = {LABEL: wanted.name}
    workers: list[Document] = []
    for number, topology in enumerate(wanted.slices):
        labels = own | {_POOL: _name_pool(topology, number)} | select_nodes(topology)
        worker = {"role": "worker", "labels": labels, "extraMounts": mounts}
        workers += [worker] * topology.hosts
    if len(workers) > MOST_NODES:
        raise PreflightError(
            f"The slices need {len(workers)} nodes, and a cluster on one machine has at most "
            f"{MOST_NODES} here. Choose smaller ones."
        )
    nodes = [{"role": "control-plane", "labels": own, "extraMounts": mounts}, *workers]
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}


def _name_pool(topology: Topology, number: int) -> str:
    return f"{topology.name.replace(':', '-')}-{number}"


def _run(variables: Mapping[str, str], *words: str, text: str = "") -> str:
    ended = subprocess.run(
        ["kind", *words], input=text, capture_output=True, text=True, check=False, env=variables
    )
    if ended.returncode:
        cause = " ".join(ended.stderr.split())[-500:]
        raise PreflightError(
            f"`kind {' '.join(words[:2])}` failed: {cause or 'it printed no error'}. Check that "
            "Docker runs (`docker ps`), then run the same command again."
        )
    return ended.stdout


def create(wanted: Wanted, store: Path, variables: Mapping[str, str]) -> kubeconfig.Access:
    """Return the access to a cluster on this machine; create the cluster unless one of this name
    exists. Its nodes pretend to have chips, so that pods which request chips are scheduled. The
    user's kubeconfig is not changed."""
    if wanted.name not in _run(variables, "get", "clusters").split():
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = json.dumps(make_config(wanted, store))
        with _write_elsewhere(wanted) as (_, named):
            _run(
                variables, "create", "cluster", *named, "--config", "-", "--wait", "5m", text=config
            )
    entry = _require_own(wanted, variables)
    access.write(entry, variables)
    api = HttpApi(entry, variables)
    chips = {_name_pool(t, number): count_chips(t) for number, t in enumerate(wanted.slices)}
    for node in api.list(NODES).items:
        if capacity := chips.get((node["metadata"].get("labels") or {}).get(_POOL, "")):
            meta = {"name": node["metadata"]["name"]}
            document = {"apiVersion": "v1", "kind": "Node", "metadata": meta}
            api.apply(NODES, document | {"status": {"capacity": capacity}}, "status")
    return entry


@contextmanager
def _write_elsewhere(wanted: Wanted) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the path of a temporary kubeconfig, to spare the user's, and kind's options for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kubeconfig")
        yield path, ("--name", wanted.name, "--kubeconfig", str(path))


def _require_own(wanted: Wanted, variables: Mapping[str, str]) -> kubeconfig.Access:
    """Return the access to a cluster that `up --kind` has made.

    Raises:
        PreflightError: `up --kind` has not made this cluster.
    """
    with _write_elsewhere(wanted) as (path, named):
        _run(variables, "export", "kubeconfig", *named)
        entry = kubeconfig.access_of(kubeconfig.read([path]), wanted.context)
    nodes = HttpApi(entry, variables).list(NODES).items
    if not any((n["metadata"].get("labels") or {}).get(LABEL) == wanted.name for n in nodes):
        raise PreflightError(
            f"The cluster {wanted.context} was not changed: kinetic did not create it (its nodes "
            f"lack the label {LABEL}={wanted.name}). Choose another name with --cluster, or "
            f"remove it with `kind delete cluster --name {wanted.name}`."
        )
    return entry


def remove(wanted: Wanted, variables: Mapping[str, str]) -> None:
    """Remove a cluster that `up --kind` has made."""
    if wanted.name in _run(variables, "get", "clusters").split():
        _require_own(wanted, variables)
        _run(variables, "delete", "cluster", "--name", wanted.name)
    access.remove(wanted.context, variables)
