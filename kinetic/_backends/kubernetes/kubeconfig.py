"""Which cluster, and which user: kubeconfig files and pods' own accounts, read and never written.

In: paths, a cluster's or context's name, variables of the environment. Out: `Access`: a server and
a user.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic.errors import PreflightError

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"
Document = dict[str, Any]
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class Access:
    """A server, and how to log in to it.

    Attributes:
        server: its address.
        context: the context; "" in a pod of the cluster.
        namespace: the context's.
        ca: certificates in PEM that the server is checked against; b"" for the system's.
        verify: whether the server is checked at all.
        server_name: the name in its certificate, if it differs from the address.
        proxy: the proxy that the kubeconfig names, or "".
        user, cluster: the entries in the file, with absolute paths.
        sources: the files that it was read from.
    """

    server: str
    context: str = ""
    namespace: str = DEFAULT_NAMESPACE
    ca: bytes = b""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""
    user: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cluster: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sources: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Kubeconfig:
    """The files together: of entries with the same name the first counts, as for kubectl.

    Attributes:
        current: the current context, or "".
        contexts, clusters, users: by name, with absolute paths.
        sources: the files that were read.
    """

    current: str = ""
    contexts: Mapping[str, Document] = field(default_factory=dict)
    clusters: Mapping[str, Document] = field(default_factory=dict)
    users: Mapping[str, Document] = field(default_factory=dict, repr=False)
    sources: tuple[Path, ...] = ()


def paths_of(variables: Mapping[str, str]) -> list[Path]:
    """Return the kubeconfig files that the environment names, else the usual one: as absolute
    paths, since they are read again later and programs may change their working directory."""
    named = [p for p in variables.get("KUBECONFIG", "").split(os.pathsep) if p]
    home = variables.get("HOME") or "~"
    return [_expand_path(Path(p)) for p in named or [f"{home}/.kube/config"]]


def _expand_path(path: Path) -> Path:
    with contextlib.suppress(RuntimeError):  # An account without a home, as in many pods.
        path = path.expanduser()
    return path.absolute()


def read(paths: Sequence[Path]) -> Kubeconfig:
    """Read kubeconfig files; missing ones count as empty.

    Raises:
        PreflightError: one of them cannot be read.
    """
    current, sources = "", []
    found: dict[str, dict[str, Document]] = {"contexts": {}, "clusters": {}, "users": {}}
    for path in paths:
        document = _load(path)
        if document is None:
            continue
        sources.append(path)
        current = current or str(document.get("current-context") or "")
        for kind, known in found.items():
            for name, value in _read_named(document, kind, path):
                known.setdefault(name, _resolve_paths(value, path.parent))
    return Kubeconfig(current, found["contexts"], found["clusters"], found["users"], tuple(sources))


def _read_named(document: Document, kind: str, path: Path) -> Iterator[tuple[str, Document]]:
    items = document.get(kind) or []
    for item in items if isinstance(items, list) else [items]:
        value = item.get(kind[:-1]) or {} if isinstance(item, dict) else None
        if not (isinstance(items, list) and isinstance(value, dict)):
            raise PreflightError(
                f"The {kind} of the kubeconfig {path} are no list of names with a {kind[:-1]} "
                "each. Mend the file, or get credentials for the cluster again."
            )
        yield str(item.get("name", "")), value


def _resolve_paths(entry: Document, folder: Path) -> Document:
    given = {key: entry[key] for key in _PATHS if entry.get(key) and isinstance(entry[key], str)}
    found: Document = {key: str(folder / path) for key, path in given.items()}
    plugin = entry.get("exec")
    if isinstance(plugin, dict) and "/" in str(plugin.get("command")):
        found["exec"] = {**plugin, "command": str(folder / str(plugin["command"]))}
    return {**entry, **found}


def _load(path: Path) -> Document | None:
    import yaml

    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightError(f"The kubeconfig {path} cannot be read: {error}.") from error
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        cause = " ".join(str(error).split())
        raise PreflightError(f"The kubeconfig {path} is no YAML: {cause}. Mend it.") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise PreflightError(f"The kubeconfig {path} holds no mapping.")
    return document


def choose(config: Kubeconfig, *, cluster: str = "", project: str = "", zone: str = "") -> str:
    """Return the context that a cluster's name refers to.

    Args:
        config: all contexts.
        cluster: the name of a context, of a GKE cluster, or of a cluster's entry; "" for the
            current context.
        project, zone: narrow down a GKE cluster's name.

    Raises:
        PreflightError: none matches, or several do.
    """
    files = ", ".join(map(str, config.sources)) or "your kubeconfig"
    if not cluster:
        if config.current in config.contexts:
            return config.current
        problem = (
            f"names {config.current}, which it does not have" if config.current else "has none"
        )
        raise PreflightError(
            f"No cluster is named, and the current context of {files} {problem}. Name one: "
            f"{_list_contexts(config)}."
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
            f"Several contexts of {files} are of a cluster {cluster}: {names}. Name one of them "
            "as cluster=, or give project= and zone=."
        )
    where = f" --zone {zone}" if zone else ""
    of = f" --project {project}" if project else ""
    raise PreflightError(
        f"No context of {files} is of the cluster {cluster}: {_list_contexts(config)}. Get "
        "credentials for it, for example with `gcloud container clusters get-credentials "
        f"{cluster}{where}{of}`."
    )


def _is_gke(context: str, cluster: str, project: str, zone: str) -> bool:
    parts = context.split("_")
    if len(parts) != 4 or parts[0] != "gke":
        return False
    return parts[3] == cluster and project in ("", parts[1]) and zone in ("", parts[2])


def _list_contexts(config: Kubeconfig) -> str:
    names = sorted(config.contexts)
    return f"it has {', '.join(names)}" if names else "it has no contexts"


def access_of(config: Kubeconfig, context: str) -> Access:
    """Return the server of a context, and its user.

    Raises:
        PreflightError: the context is incomplete, or its certificates cannot be read.
    """
    found = config.contexts[context]
    name = str(found.get("cluster", ""))
    cluster = config.clusters.get(name) or {}
    if not cluster.get("server"):
        raise PreflightError(
            f"The context {context} names the cluster {name}, which has no server."
        )
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        context=context,
        namespace=found.get("namespace") or DEFAULT_NAMESPACE,
        ca=read_content(cluster, "certificate-authority"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        server_name=cluster.get("tls-server-name") or "",
        proxy=cluster.get("proxy-url") or "",
        user=config.users.get(str(found.get("user", "")), {}),
        cluster=cluster,
        sources=config.sources,
    )


def read_content(entry: Mapping[str, Any], key: str) -> bytes:
    """Return what an entry holds inline (`<key>-data`) or names as a file; b"" for neither.

    Raises:
        PreflightError: it cannot be read.
    """
    inline, path = entry.get(f"{key}-data"), entry.get(key)
    try:
        if inline:
            return base64.b64decode(inline)
        return Path(path).read_bytes() if path else b""
    except (OSError, TypeError, ValueError) as error:
        raise PreflightError(f"The {key} of the kubeconfig cannot be read: {error}.") from error


def in_cluster(variables: Mapping[str, str], folder: Path = ACCOUNT_FOLDER) -> Access | None:
    """Return a pod's access through its own account, or None outside a cluster."""
    host, port = (variables.get(f"KUBERNETES_SERVICE_{k}", "") for k in ("HOST", "PORT"))
    token, ca = folder / "token", folder / "ca.crt"
    if not (host and port and token.is_file() and ca.is_file()):
        return None
    named = folder / "namespace"
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=named.read_text().strip() if named.is_file() else DEFAULT_NAMESPACE,
        ca=ca.read_bytes(),
        user={"tokenFile": str(token)},
    )


def read_again(access: Access) -> Access:
    """Return an access as the files describe it now; the same one if they no longer do."""
    config = read(access.sources)
    if access.context not in config.contexts:
        return access
    return access_of(config, access.context)


def find(
    variables: Mapping[str, str], *, cluster: str = "", project: str = "", zone: str = ""
) -> Access:
    """Return the access to a cluster: from kubeconfig files, or in a pod from its account.

    Args:
        variables: of the environment.
        cluster, project, zone: the cluster, as for `choose`.

    Raises:
        PreflightError: there is none; says what to do.
    """
    config = read(paths_of(variables))
    if not cluster and not config.contexts and (own := in_cluster(variables)) is not None:
        return own
    if not config.sources or not (cluster or config.contexts):
        looked = ", ".join(str(path) for path in paths_of(variables))
        raise PreflightError(
            f"No kubeconfig was found ({looked}). Get one for your cluster, for example with "
            f"`gcloud container clusters get-credentials {cluster or 'NAME'}`, or set KUBECONFIG."
        )
    return access_of(config, choose(config, cluster=cluster, project=project, zone=zone))
