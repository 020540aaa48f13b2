"""Access to clusters, from kubeconfig files or a pod's own account. Files are never written.

The official client reads and merges the files. This module corrects the client's differences from
kubectl: the first file's current context counts, and paths are relative to their own file. It also
accepts the names that people use for clusters, and never chooses a cluster of another project.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from kinetic._config import settings
from kinetic._core.values import dataclass
from kinetic.errors import PreflightError, UsageError

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"
Document = dict[str, Any]
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class Access:
    """A server and the login to it.

    Attributes:
        server: the server's address.
        context: the name of the context; "" in a pod of the cluster.
        namespace: the context's namespace.
        user, cluster: the entries in the file, with absolute paths.
        sources: the files that the access was read from.
    """

    server: str
    context: str = ""
    namespace: str = DEFAULT_NAMESPACE
    user: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cluster: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sources: tuple[Path, ...] = ()

    @property
    def origin(self) -> str:
        """The source of the login, as messages name it."""
        return f"the kubeconfig's context {self.context!r}" if self.context else "this pod"


@dataclass(frozen=True)
class Kubeconfig:
    """The merged kubeconfig files. Of entries with the same name, the first counts, as in kubectl.

    Attributes:
        current: the current context, or "".
        contexts, clusters, users: the entries by name, with absolute paths.
        sources: the files that were read.
    """

    current: str = ""
    contexts: Mapping[str, Document] = field(default_factory=dict)
    clusters: Mapping[str, Document] = field(default_factory=dict)
    users: Mapping[str, Document] = field(default_factory=dict, repr=False)
    sources: tuple[Path, ...] = ()


def paths_of(variables: Mapping[str, str]) -> list[Path]:
    """Return the kubeconfig files that the environment names, or the default one, and the file of
    `kinetic up`. The paths are absolute: the files are read again later, and programs may change
    their working directory."""
    named = [p for p in variables.get("KUBECONFIG", "").split(os.pathsep) if p]
    home = variables.get("HOME") or "~"
    paths = [_expand_path(Path(p)) for p in named or [f"{home}/.kube/config"]]
    with contextlib.suppress(UsageError):
        own = path_of_own(variables)
        paths += [own] if _has_content(own) else []
    return paths


def path_of_own(variables: Mapping[str, str]) -> Path:
    """Return the path of the kubeconfig that `kinetic up` writes. The file lies beside kinetic's
    profiles, and the user's own file stays as it is.

    Raises:
        UsageError: there is no home folder.
    """
    return settings.profiles_file(variables).with_name("clusters.kubeconfig")


def read_own(path: Path) -> Document:
    """Return the content of the kubeconfig of `kinetic up`; an empty one if it is missing.

    Raises:
        PreflightError: the file is damaged.
    """
    import yaml

    empty: Document = {"apiVersion": "v1", "kind": "Config"}
    try:
        content = (yaml.safe_load(path.read_bytes()) if path.is_file() else None) or empty
        return dict(content)
    except (OSError, yaml.YAMLError, *_MALFORMED) as error:
        raise PreflightError(
            f"The kubeconfig {path} cannot be read: {type(error).__name__}. Remove it, and run "
            "`kinetic init` to write it again."
        ) from error


def _expand_path(path: Path) -> Path:
    with contextlib.suppress(RuntimeError):  # The account has no home, as in many pods.
        path = path.expanduser()
    return path.absolute()


def read(paths: Sequence[Path]) -> Kubeconfig:
    """Read kubeconfig files, without missing and empty ones.

    Raises:
        PreflightError: a file cannot be read.
    """
    import yaml
    from kubernetes.config import ConfigException
    from kubernetes.config.kube_config import KubeConfigMerger

    sources = tuple(path for path in paths if _has_content(path))
    if not sources:
        return Kubeconfig()
    files = ", ".join(map(str, sources))
    entries: dict[str, dict[str, Document]] = {}
    try:
        merger = KubeConfigMerger(os.pathsep.join(map(str, sources)))
        documents = list(merger.config_files.values())
        current = next((d["current-context"] for d in documents if d.get("current-context")), "")
        for kind in ("contexts", "clusters", "users"):
            for item in merger.config.value[kind]:
                entry = dict(item.value.get(kind[:-1]) or {})
                _resolve_paths(entry, Path(item.path).parent)
                entries.setdefault(kind, {})[str(item.value["name"])] = entry
    except (ConfigException, yaml.YAMLError, OSError, *_MALFORMED) as error:
        cause = " ".join(str(error).split())
        raise PreflightError(
            f'The kubeconfig {files} cannot be read: "{type(error).__name__}: {cause}". Repair the '
            "file, or get credentials for the cluster again."
        ) from error
    return Kubeconfig(str(current), **entries, sources=sources)


def _has_content(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:  # Other users' folders may be unreadable.
        return False


_MALFORMED = (AttributeError, KeyError, TypeError, ValueError)


def _resolve_paths(entry: Document, folder: Path) -> None:
    for key in _PATHS:
        if entry.get(key) and isinstance(entry[key], str):
            entry[key] = str(folder / entry[key])
    plugin = entry.get("exec")
    if isinstance(plugin, dict) and "/" in str(plugin.get("command")):
        entry["exec"] = {**plugin, "command": str(folder / str(plugin["command"]))}


def choose(config: Kubeconfig, *, cluster: str = "", project: str = "", zone: str = "") -> str:
    """Return the context that a cluster's name refers to.

    Args:
        config: all contexts.
        cluster: the name of a context, of a GKE cluster, or of a cluster's entry; "" for the
            current context.
        project, zone: choose between GKE clusters of the same name; a current context of GKE must
            match them.

    Raises:
        PreflightError: no context matches, or several do; or the current context belongs to another
            project or zone.
    """
    files = ", ".join(map(str, config.sources)) or "your kubeconfig"
    if not cluster:
        if config.current in config.contexts:
            _check_project(config.current, files, project, zone)
            return config.current
        problem = (
            f"the current context of {files}, {config.current!r}, does not exist"
            if config.current
            else f"{files} has no current context"
        )
        raise PreflightError(
            f"No cluster is named, and {problem}. Set cluster= or KINETIC_CLUSTER to one of the "
            f"contexts: {_list_contexts(config)}."
        )
    if cluster in config.contexts:
        return cluster
    fitting = [name for name in config.contexts if _is_gke(name, cluster, project, zone)]
    fitting = fitting or [
        name for name, context in config.contexts.items() if context.get("cluster") == cluster
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(sorted(fitting))
        raise PreflightError(
            f"Several contexts of {files} belong to a cluster {cluster!r}: {names}. Name one of "
            "them with cluster=, or set project= and zone=."
        )
    where = f" --zone {zone}" if zone else ""
    of = f" --project {project}" if project else ""
    raise PreflightError(
        f"No context of {files} belongs to the cluster {cluster!r} (contexts: "
        f"{_list_contexts(config)}). Get credentials for the cluster, for example with `gcloud "
        f"container clusters get-credentials {cluster}{where}{of}`."
    )


def _check_project(context: str, files: str, project: str, zone: str) -> None:
    """Refuse the current context if its name has another project or zone than the job's options.

    Raises:
        PreflightError: the project or the zone differs.
    """
    parts = context.split("_")
    if len(parts) != 4 or parts[0] != "gke":
        return
    for noun, wanted, actual in (("project", project, parts[1]), ("zone", zone, parts[2])):
        if wanted not in ("", actual):
            raise PreflightError(
                f"No cluster is named, and the current context of {files}, {context}, belongs to "
                f"the {noun} {actual!r}, but the job's {noun} is {wanted!r}. Name the cluster with "
                "cluster=, KINETIC_CLUSTER or a profile."
            )


def _is_gke(context: str, cluster: str, project: str, zone: str) -> bool:
    parts = context.split("_")
    if len(parts) != 4 or parts[0] != "gke":
        return False
    return parts[3] == cluster and project in ("", parts[1]) and zone in ("", parts[2])


def _list_contexts(config: Kubeconfig) -> str:
    return ", ".join(sorted(config.contexts)) or "none"


def access_of(config: Kubeconfig, context: str) -> Access:
    """Return the access that a context describes.

    Raises:
        PreflightError: the context is incomplete.
    """
    entry = config.contexts[context]
    name = str(entry.get("cluster", ""))
    cluster = config.clusters.get(name) or {}
    if not cluster.get("server"):
        raise PreflightError(
            f"The kubeconfig's context {context!r} names the cluster {name!r}, which has no "
            "server. Get credentials for the cluster again."
        )
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        context=context,
        namespace=entry.get("namespace") or DEFAULT_NAMESPACE,
        user=config.users.get(str(entry.get("user", "")), {}),
        cluster=cluster,
        sources=config.sources,
    )


def in_cluster(variables: Mapping[str, str], folder: Path = ACCOUNT_FOLDER) -> Access | None:
    """Return the access that a pod has through its own account; None outside a cluster."""
    host, port = (variables.get(f"KUBERNETES_SERVICE_{k}", "") for k in ("HOST", "PORT"))
    token, ca = folder / "token", folder / "ca.crt"
    if not (host and port and token.is_file() and ca.is_file()):
        return None
    named = folder / "namespace"
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=named.read_text().strip() if named.is_file() else DEFAULT_NAMESPACE,
        cluster={"certificate-authority": str(ca)},
        user={"tokenFile": str(token)},
    )


def reread(access: Access) -> Access:
    """Read the access again from its files. If its context was removed, return `access` itself."""
    config = read(access.sources)
    if access.context not in config.contexts:
        return access
    return access_of(config, access.context)


def find(
    variables: Mapping[str, str], *, cluster: str = "", project: str = "", zone: str = ""
) -> Access:
    """Return the access to a cluster, from kubeconfig files or a pod's own account.

    Args:
        variables: the environment.
        cluster, project, zone: the cluster, as for `choose`.

    Raises:
        PreflightError: there is no access; the message says how to get it.
    """
    config = read(paths_of(variables))
    if not cluster and not config.contexts and (own := in_cluster(variables)) is not None:
        return own
    if not config.sources or not (cluster or config.contexts):
        paths = ", ".join(str(path) for path in paths_of(variables))
        raise PreflightError(
            f"No kubeconfig was found at {paths}. Get one for your cluster, for example with "
            f"`gcloud container clusters get-credentials {cluster or 'NAME'}`, or set KUBECONFIG."
        )
    return access_of(config, choose(config, cluster=cluster, project=project, zone=zone))
