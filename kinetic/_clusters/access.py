"""The kubeconfig that `kinetic up` and `kinetic init` write, beside the profiles. The user's own
kubeconfig and its current context never change.

The file contains only addresses and certificates: if it is lost, `kinetic init` writes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._clusters.observed import Document
from kinetic._store import files
from kinetic.errors import PreflightError, StoreError

_LOGIN = {
    "apiVersion": "client.authentication.k8s.io/v1beta1",
    "command": "gke-gcloud-auth-plugin",
    "args": ["--use_application_default_credentials"],
    "provideClusterInfo": True,
    "interactiveMode": "IfAvailable",
}
"""The login to GKE, with the credentials that `kinetic up` uses. If the program is not installed,
kinetic asks google-auth for a token instead."""


def make_access(context: str, cluster: Document) -> Access:
    """Return the access to a cluster, made from GKE's document of the cluster."""
    authority = (cluster.get("masterAuth") or {}).get("clusterCaCertificate") or ""
    if not cluster.get("endpoint"):
        raise PreflightError(
            f"The cluster {cluster['name']} has no address now; its state is "
            f"{cluster.get('status')}. Try again when it runs."
        )
    server = f"https://{cluster['endpoint']}"
    entry = {"server": server, "certificate-authority-data": authority}
    return Access(server, context, user={"exec": _LOGIN}, cluster=entry)


def write(access: Access, variables: Mapping[str, str]) -> Path:
    """Add the access to a cluster to the file, in place of an older access with the same name.
    Return the file's path."""
    entry = {"cluster": access.context, "user": access.context}
    documents = {"contexts": entry, "clusters": access.cluster, "users": access.user}
    return _change(access.context, documents, variables)


def remove(context: str, variables: Mapping[str, str]) -> None:
    """Remove the access of a cluster from the file."""
    if kubeconfig.path_of_own(variables).is_file():
        _change(context, {}, variables)


def _change(context: str, documents: Mapping[str, object], variables: Mapping[str, str]) -> Path:
    path = kubeconfig.path_of_own(variables)
    content = kubeconfig.read_own(path)
    for kind in ("contexts", "clusters", "users"):
        others = [row for row in content.get(kind) or () if row.get("name") != context]
        new = [{"name": context, kind[:-1]: documents[kind]}] if documents else []
        content[kind] = others + new
    try:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        files.save(path, [json.dumps(content, indent=2).encode()])
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        raise StoreError(
            f"The access to the cluster cannot be written: {path}: "
            f"{getattr(cause, 'strerror', error)}. Change the folder's owner or mode, or set "
            "KINETIC_PROFILES_FILE to a file elsewhere."
        ) from error
    return path
