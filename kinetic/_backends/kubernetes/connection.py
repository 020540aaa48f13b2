"""The API server through the official client: the implementation of `api.Api`, and the only module
that sends requests.

It uses only the lowest layer of the client, `ApiClient.param_serialize` and `call_api`, with plain
documents: the typed APIs take seconds to import, and the dynamic client cannot pass
`fieldValidation`. The client handles login data, TLS and the connection. This module retries calls
itself: if a retried creation finds that the object exists, its first try may have created it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import ssl
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from kinetic._backends.kubernetes import credentials, kubeconfig
from kinetic._backends.kubernetes.api import (
    CallLimits,
    Document,
    ObjectList,
    Selector,
    Version,
    waits_s,
)
from kinetic._backends.kubernetes.errors import (
    ApiCall,
    Busy,
    Conflict,
    Expired,
    Forbidden,
    NotInstalled,
    error_of,
    explain_unreachable,
    not_installed,
    read_retry_after,
)
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.resources import (
    ACCESS_REVIEWS,
    JOBS,
    JOBSETS,
    PODS,
    PORT_FORWARDS,
    Resource,
)
from kinetic._system import proxies
from kinetic.errors import NotFound, PreflightError
from kinetic.version import __version__

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration

METHODS = {"create": "POST", "delete": "DELETE", "patch": "PATCH"}
"""The HTTP methods of the verbs that change something. All other verbs are sent as GET."""
CONTENT = {"patch": "application/apply-patch+yaml"}
"""The type of a body that is not plain JSON: JSON is YAML, too."""
CONNECTIONS = 32
"""Most idle connections that are kept open; more are opened as needed."""
PAGE = 500
CLOSED_WITHIN_S = 5.0
"""Longest wait in seconds for a port-forward to close; the client itself waits up to three."""
MOST_RESTARTS = 2
"""Most times that a list of several pages is read anew because its next page has expired."""
SHARED_BY = ("KUBECONFIG", "HOME", "PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
"""The variables on which a connection depends; callers with equal values share one."""
_loading = threading.Lock()
"""Held while a configuration is loaded: the client has a global table of certificate files."""


@contextlib.contextmanager
def make_configuration(access: Access, variables: Mapping[str, str]) -> Iterator[Configuration]:
    """Log in and yield the client's configuration. The configuration's certificates and keys are
    files in a private folder, which is removed afterwards.

    Raises:
        PreflightError: the login failed, or the certificates cannot be used.
    """
    from kubernetes import client, config
    from kubernetes.config import ConfigException

    cluster = {k: v for k, v in access.cluster.items() if k != "proxy-url" and v}
    cluster["server"] = access.server
    entries: Document = {
        "current-context": "kinetic",
        "contexts": [{"name": "kinetic", "context": {"cluster": "kinetic", "user": "kinetic"}}],
        "clusters": [{"name": "kinetic", "cluster": cluster}],
        "users": [{"name": "kinetic", "user": credentials.log_in(access, variables)}],
    }
    configuration = client.Configuration()
    configuration.proxy = None  # `_system.proxies` chooses it.
    with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
        try:
            with _loading:
                config.load_kube_config_from_dict(
                    entries,
                    client_configuration=configuration,
                    persist_config=False,
                    temp_file_path=folder,
                )
        except (ConfigException, OSError, TypeError, ValueError) as error:
            raise PreflightError(
                f'The certificates of {access.origin} cannot be used: "{error}". Get credentials '
                "for the cluster again."
            ) from error
        yield configuration


def open_client(access: Access, variables: Mapping[str, str]) -> ApiClient:
    """Log in and return a client that has its certificates in memory and uses the proxy that
    `_system.proxies` chooses.

    Raises:
        PreflightError: the login failed; the certificates or the proxy cannot be used.
    """
    from kubernetes.client import ApiClient

    cluster = access.cluster
    pools: dict[str, Any] = {"maxsize": CONNECTIONS, "retries": False}
    with make_configuration(access, variables) as configuration:
        client = ApiClient(configuration)
        if access.server.startswith("https:"):
            pools["ssl_context"] = _make_context(access, configuration)
            if name := cluster.get("tls-server-name"):
                pools |= {"server_hostname": name, "assert_hostname": name}
            if not configuration.verify_ssl:
                pools["assert_hostname"] = False
    client.user_agent = f"kinetic/{__version__}"
    named_by = f"{access.origin} (proxy-url)"
    proxy = cluster.get("proxy-url") or ""
    client.rest_client.pool_manager = proxies.open_pools(access.server, proxy, named_by, **pools)
    return client


def _make_context(access: Access, configuration: Configuration) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        # Python 3.13 sets this flag, but certificates of old clusters do not satisfy it.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f'The certificates of {access.origin} cannot be used: "{error}". Get credentials for '
            "the cluster again."
        ) from error
    return context


class _ForwardedPort:
    """The local end of a port-forward. `close` closes the socket and the WebSocket: the client's
    thread leaves the WebSocket open if the server ends the port-forward first."""

    def __init__(self, forward: Any, port: int) -> None:
        self._socket, self._websocket = forward.socket(port), forward.websocket
        name = f"Kubernetes port forward proxy: {port}"
        self._threads = [thread for thread in threading.enumerate() if thread.name == name][-1:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def close(self) -> None:
        """Close the socket and the WebSocket; idempotent."""
        self._socket.close()
        for thread in self._threads:
            thread.join(CLOSED_WITHIN_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._websocket.shutdown()


class HttpApi:
    """The implementation of `Api`, over HTTP. Threads may share an instance."""

    def __init__(
        self,
        access: Access,
        variables: Mapping[str, str],
        *,
        namespace: str = "",
        patience: CallLimits | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        seed: random.Random | None = None,
    ) -> None:
        """Create the object without connecting.

        Args:
            access: the server and the user.
            variables: the environment, for programs that log in.
            namespace: the namespace of objects; "" for the context's.
            patience: the time limits of calls.
            sleep, clock, seed: replaced by tests.
        """
        self.server = access.server
        self.namespace = namespace or access.namespace
        self._access = access
        self._variables = variables
        self._patience = patience or CallLimits()
        self._clock = clock
        self._clock_offset_s = 0.0
        self._sleep = sleep
        self._random = seed or random.Random()
        self.forget_connections()

    def __repr__(self) -> str:
        return f"HttpApi({self.server!r}, namespace={self.namespace!r})"

    def now(self) -> float:
        """Return the time by the server's clock, as its last answer reported it."""
        return self._clock() + self._clock_offset_s

    # --- verbs

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """Create an object; see `Api.create`."""
        name = str((document.get("metadata") or {}).get("name", ""))
        call = self._call("create", resource, name)
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        try:
            return self._ask(call, document, query)
        except Conflict as conflict:
            # An earlier try may have created the object, and its answer was lost.
            may_be_own = conflict.was_repeated and name
            if may_be_own and (existing := self._find_same(resource, document, name)) is not None:
                return existing
            raise

    def _find_same(self, resource: Resource, document: Document, name: str) -> Document | None:
        if resource not in (JOBS, JOBSETS):
            return document  # Names are unique, so it is this call's. Reading may be forbidden.
        try:
            existing = self.get(resource, name)
        except NotFound:
            return None
        except Forbidden:
            return document
        wanted = (document.get("metadata") or {}).get("labels") or {}
        labels = (existing.get("metadata") or {}).get("labels") or {}
        ours = bool(wanted) and wanted.items() <= labels.items()
        return existing if ours and "deletionTimestamp" not in existing["metadata"] else None

    def apply(self, resource: Resource, document: Document, part: str = "") -> Document:
        """Create an object, or set its fields (those of a subresource such as "status" if `part`
        names one), by server-side apply. kinetic then owns these fields."""
        meta = document["metadata"]
        name = f"{meta['name']}/{part}" if part else meta["name"]
        call = self._call("patch", resource, name, meta.get("namespace"))
        # The client would send a dict with null fields removed, but a text as it is.
        return self._ask(call, json.dumps(document), {"fieldManager": "kinetic", "force": "true"})

    def find_resource(self, api_version: str, kind: str) -> Resource:
        """Return the kind of object that the server knows by this `apiVersion` and `kind`.

        Raises:
            NotInstalled: the server does not know the kind.
        """
        group, _, version = api_version.rpartition("/")
        path = f"/apis/{api_version}" if group else f"/api/{version}"
        kind_of = Resource(group, version, kind.lower())
        answer = self._ask(ApiCall("get", kind_of), path=path)
        for row in answer.get("resources") or ():
            if row.get("kind") == kind and "/" not in row["name"]:
                return Resource(group, version, row["name"], bool(row.get("namespaced")))
        raise NotInstalled(not_installed(kind_of))

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document:
        """Return an object."""
        return self._ask(self._call("get", resource, name, namespace))

    def list(self, resource: Resource, selection: Selector = Selector()) -> ObjectList:  # noqa: B008
        """Return all selected objects, read page by page."""
        call = self._call("list", resource, namespace=selection.namespace)
        selectors = {"labelSelector": selection.labels, "fieldSelector": selection.fields}
        query = {name: value for name, value in selectors.items() if value} | {"limit": str(PAGE)}
        items: list[Document] = []
        more: dict[str, str] = {}
        restarts = pages = 0
        while True:
            try:
                pages += 1
                page = self._ask(call, query={**query, **more})
            except Expired:
                if not more or restarts == MOST_RESTARTS:
                    raise
                items, more = [], {}  # Later pages have expired: start again.
                restarts += 1
                continue
            items += page.get("items") or ()
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return ObjectList(tuple(items), pages)
            more = {"continue": meta["continue"]}

    def delete(
        self,
        resource: Resource,
        name: str,
        *,
        propagation: str = "Background",
        uid: str = "",
        grace_s: int | None = None,
    ) -> bool:
        """Delete an object and the objects that it owns; see `Api.delete`."""
        # A Job deleted without a policy leaves its pods behind.
        body: Document = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._ask(self._call("delete", resource, name), body)
        except NotFound:
            return False
        return True

    def open_port(self, pod: str, port: int) -> socket.socket:
        """Connect to a port of a pod through a WebSocket. Requires certificates in files."""
        from kubernetes.stream.ws_client import PortForward, create_websocket, get_websocket_url

        class Forward(PortForward):  # type: ignore[misc]
            def _proxy(self) -> None:
                try:
                    super()._proxy()
                except OSError:  # The connection is lost, for example because the laptop slept.
                    self.local_ports[port].python.close()

        call = self._call("create", PORT_FORWARDS, pod)
        path = PODS.path(call.namespace, pod)
        with make_configuration(self._access, self._variables) as configuration:
            named = self._access.cluster.get("proxy-url") or ""
            parts = urlsplit(self.server)
            configuration.proxy = named or proxies.find_proxy(parts.scheme, parts.hostname or "")
            login = configuration.get_api_key_with_prefix("BearerToken")
            url = get_websocket_url(f"{self.server}{path}/portforward", [("ports", str(port))])
            headers = {"authorization": login} if login else {}
            try:
                websocket = create_websocket(configuration, url, headers)
            except Exception as error:
                if (status := getattr(error, "status_code", 0)) >= 400:  # of the handshake
                    body = getattr(error, "resp_body", b"") or b""
                    verb = "get" if b"cannot get" in body else "create"  # from Kubernetes 1.35 on
                    call = self._call(verb, PORT_FORWARDS, pod)
                    raise error_of(call, status, body) from error
                raise explain_unreachable(call, self.server, error) from error
        return cast("socket.socket", _ForwardedPort(Forward(websocket, [port]), port))

    def may(self, verb: str, resource: Resource, *, namespace: str | None = None) -> bool:
        """True if the caller has a permission, according to the server's access review."""
        plural, _, subresource = resource.plural.partition("/")
        attributes = {
            "verb": verb,
            "group": resource.group,
            "resource": plural,
            "subresource": subresource,
            "namespace": self._namespace_of(resource, namespace),
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {k: v for k, v in attributes.items() if v}},
        }
        review = self._ask(ApiCall("create", ACCESS_REVIEWS), body)
        return bool((review.get("status") or {}).get("allowed"))

    def knows(self, resource: Resource) -> bool:
        """True if the server knows this kind of object."""
        path = f"/apis/{resource.group}/{resource.version}" if resource.group else "/api/v1"
        try:
            answer = self._ask(ApiCall("get", resource), path=path)
        except (NotInstalled, NotFound):
            return False
        return any(r.get("name") == resource.plural for r in answer.get("resources") or ())

    def version(self) -> Version:
        """Return the server's version."""
        call = ApiCall("get", Resource("", "v1", "version", namespaced=False))
        answer = self._ask(call, path="/version")
        numbers = [_leading_number(str(answer.get(key, ""))) for key in ("major", "minor")]
        return Version(str(answer.get("gitVersion", "")), *numbers)

    def forget_connections(self) -> None:
        """Drop the connections and replace the lock in a forked process: the connections belong to
        the parent, and a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._client: ApiClient | None = None

    def close(self) -> None:
        """Close idle connections. The object can still be used."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # --- sending

    def _namespace_of(self, resource: Resource, namespace: str | None = None) -> str:
        if not resource.namespaced:
            return ""
        return self.namespace if namespace is None else namespace

    def _call(
        self, verb: str, resource: Resource, name: str = "", namespace: str | None = None
    ) -> ApiCall:
        return ApiCall(verb, resource, self._namespace_of(resource, namespace), name)

    def _ask(
        self,
        call: ApiCall,
        body: Mapping[str, Any] | str | None = None,
        query: Mapping[str, str] | None = None,
        *,
        path: str = "",
    ) -> Document:
        """Make a call, and repeat it after temporary failures."""
        tries = 0
        while True:
            try:
                return self._send(call, body, path or call.path, query or {})
            except Busy as error:
                tries += 1
                if tries >= self._patience.tries:
                    raise
                wait_s = error.after_s
                if wait_s is None:
                    wait_s = waits_s(tries, self._patience, self._random)
            except Conflict as conflict:
                conflict.was_repeated = tries > 0
                raise
            self._sleep(wait_s)

    def _send(
        self,
        call: ApiCall,
        body: Mapping[str, Any] | str | None,
        path: str,
        query: Mapping[str, str],
    ) -> Document:
        """Make a call without retries, except for one after a new login if the login is refused."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        method, limits = METHODS.get(call.verb, "GET"), self._patience
        client = self._log_in(None)
        for may_renew in (True, False):
            headers = {"Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = CONTENT.get(call.verb, "application/json")
            request = client.param_serialize(
                method,
                path,
                None,
                list(query.items()),
                headers,
                body,
                auth_settings=["BearerToken"],
            )
            try:
                response = client.call_api(
                    *request, _request_timeout=(limits.connect_s, limits.read_s)
                )
                data = response.read()
            except ApiException as error:  # raised for TLS errors only
                why = " ".join(str(error.reason).split())
                raise PreflightError(
                    f'The certificate of {self.server} is not trusted: "{why}". It may have '
                    "changed: get credentials for the cluster again."
                ) from error
            except HTTPError as error:
                raise explain_unreachable(call, self.server, error) from error
            # Some answers have no date.
            with contextlib.suppress(KeyError, TypeError, ValueError):
                date = parsedate_to_datetime(response.headers["Date"])
                self._clock_offset_s = date.timestamp() - self._clock()
            if response.status < 400:
                try:
                    return dict(json.loads(data))
                except (TypeError, ValueError) as error:
                    raise explain_unreachable(call, self.server, error) from error
            if response.status != 401 or not may_renew:
                break
            client = self._log_in(client)
        problem = error_of(call, response.status, data)
        if isinstance(problem, Busy):
            problem.after_s = read_retry_after(response.headers.get("Retry-After"))
        raise problem

    def _log_in(self, refused: ApiClient | None) -> ApiClient:
        """Return the current client. If that is the one whose login was `refused`, log in anew from
        the kubeconfig and return a new client."""
        with self._lock:
            if self._client is None or self._client is refused:
                if refused is not None:
                    self._access = kubeconfig.reread(self._access)
                self._client = client = open_client(self._access, self._variables)
                pools = client.rest_client.pool_manager
                weakref.finalize(self, pools.clear).atexit = False
            return self._client


_shared: weakref.WeakSet[HttpApi] = weakref.WeakSet()
_sharing = threading.Lock()


def share_connection(
    access: Access, variables: Mapping[str, str], *, namespace: str = ""
) -> HttpApi:
    """Return this process's connection to a server; open one if there is none. All jobs on the
    server share the connection and its login."""
    wanted = (access, _shared_variables(variables), namespace or access.namespace)
    with _sharing:
        for api in _shared:
            if (api._access, _shared_variables(api._variables), api.namespace) == wanted:
                return api
        new = HttpApi(access, variables, namespace=namespace)
        _shared.add(new)
        return new


def _shared_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.upper() in SHARED_BY}


def _forget_all_connections() -> None:
    global _sharing
    _sharing = threading.Lock()
    for api in list(_shared):
        api.forget_connections()


os.register_at_fork(after_in_child=_forget_all_connections)


def _leading_number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0
