"""The API server over HTTP: the implementation of `api.Api`, and the only place that sends.

In: an `Access`. Out: documents and streams. Bodies are plain JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from kinetic._backends.kubernetes.api import (
    CallLimits,
    Document,
    ObjectList,
    Selector,
    Version,
    waits_s,
)
from kinetic._backends.kubernetes.credentials import Credentials, Proof
from kinetic._backends.kubernetes.errors import (
    ApiCall,
    Busy,
    Conflict,
    Expired,
    Forbidden,
    NotInstalled,
    error_of,
    explain_unreachable,
    read_retry_after,
)
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.resources import ACCESS_REVIEWS, JOBS, JOBSETS, Resource
from kinetic._backends.kubernetes.transport import open_pools
from kinetic.errors import NotFound, PreflightError
from kinetic.version import __version__

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

METHODS = {"create": "POST", "delete": "DELETE"}
"""Of the verbs that change something; the others are GET."""
PAGE = 500
MOST_RESTARTS = 2
"""Of a list whose pages the server forgets before they are read."""


class HttpApi:
    """Calls over HTTP. Threads may share it."""

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
        """Connect to nothing yet.

        Args:
            access: the server.
            variables: of the environment, for plugins that log in.
            namespace: the namespace of objects; "" for the context's.
            patience: how long calls wait.
            sleep, clock, seed: for tests.
        """
        self.server = access.server
        self.namespace = namespace or access.namespace
        self._access = access
        self._variables = variables
        self._patience = patience or CallLimits()
        self._clock = clock
        self._ahead_s = 0.0
        self._sleep = sleep
        self._random = seed or random.Random()
        self.start_anew()

    def __repr__(self) -> str:
        return f"HttpApi({self.server!r}, namespace={self.namespace!r})"

    def now(self) -> float:
        """As in `Api`."""
        return self._clock() + self._ahead_s

    # --- verbs

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """As in `Api`."""
        name = str((document.get("metadata") or {}).get("name", ""))
        call = self._call("create", resource, name)
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        try:
            return self._ask(call, document, query)
        except Conflict as conflict:
            # An earlier try may have created it, and its answer was lost.
            unsure = conflict.was_repeated and name
            if unsure and (there := self._find_same(resource, document, name)) is not None:
                return there
            raise

    def _find_same(self, resource: Resource, document: Document, name: str) -> Document | None:
        if resource not in (JOBS, JOBSETS):
            return document  # Submitters may not read what goes with a workload; names are unique.
        try:
            there = self.get(resource, name)
        except NotFound:
            return None
        except Forbidden:
            return document
        wanted = (document.get("metadata") or {}).get("labels") or {}
        found = (there.get("metadata") or {}).get("labels") or {}
        ours = bool(wanted) and wanted.items() <= found.items()
        return there if ours and "deletionTimestamp" not in there["metadata"] else None

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document:
        """As in `Api`."""
        return self._ask(self._call("get", resource, name, namespace))

    def list(self, resource: Resource, selection: Selector = Selector()) -> ObjectList:  # noqa: B008
        """As in `Api`."""
        call = self._call("list", resource, namespace=selection.namespace)
        query = {**_query(selection), "limit": str(PAGE)}
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
                items, more = [], {}  # reading all pages took too long: begin again
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
        """As in `Api`."""
        # a Job deleted without a policy leaves its pods behind
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

    def may(self, verb: str, resource: Resource, *, namespace: str | None = None) -> bool:
        """As in `Api`."""
        asked = {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "namespace": self._namespace_of(resource, namespace),
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {k: v for k, v in asked.items() if v}},
        }
        review = self._ask(ApiCall("create", ACCESS_REVIEWS), body)
        return bool((review.get("status") or {}).get("allowed"))

    def knows(self, resource: Resource) -> bool:
        """As in `Api`."""
        path = f"/apis/{resource.group}/{resource.version}" if resource.group else "/api/v1"
        try:
            found = self._ask(ApiCall("get", resource), path=path)
        except (NotInstalled, NotFound):
            return False
        return any(r.get("name") == resource.plural for r in found.get("resources") or ())

    def version(self) -> Version:
        """As in `Api`."""
        call = ApiCall("get", Resource("", "v1", "version", namespaced=False))
        found = self._ask(call, path="/version")
        numbers = [_leading_number(str(found.get(key, ""))) for key in ("major", "minor")]
        return Version(str(found.get("gitVersion", "")), *numbers)

    def start_anew(self) -> None:
        """Forget connections and login: in a process that was forked they are another's, and its
        threads may have held the locks."""
        self._credentials = Credentials(self._access, self._variables, self._clock)
        self._lock = threading.Lock()
        self._pools: tuple[Proof, PoolManager] | None = None

    def close(self) -> None:
        """Close idle connections. The object can still be used."""
        with self._lock:
            pools, self._pools = self._pools, None
        if pools is not None:
            pools[1].clear()

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
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        path: str = "",
    ) -> Document:
        """Make a call, and repeat it if that may help."""
        tries = 0
        while True:
            try:
                answer = self._send(call, body, path or call.path, query or {}, preload=True)
                return self._read_document(call, answer.data)
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

    def _read_document(self, call: ApiCall, data: bytes) -> Document:
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("no object in the answer")
        except ValueError as error:
            raise explain_unreachable(call, self.server, error) from error
        return found

    def _send(
        self,
        call: ApiCall,
        body: Mapping[str, Any] | None,
        path: str,
        query: Mapping[str, str],
        *,
        preload: bool,
    ) -> BaseHTTPResponse:
        """Send a request, and again with fresh credentials if the first are refused."""
        import urllib3

        url = f"{self.server}{path}?{urlencode(query)}" if query else self.server + path
        read_s = self._patience.read_s
        kind = {} if body is None else {"content-type": "application/json"}
        common = {"accept": "application/json", "user-agent": f"kinetic/{__version__}", **kind}
        proof = self._credentials.proof()
        for attempt in range(2):
            headers = urllib3.HTTPHeaderDict(common)
            headers.extend(proof.impersonated)
            if proof.authorization:
                headers["authorization"] = proof.authorization
            try:
                response = self._pool(proof).request(
                    METHODS.get(call.verb, "GET"),
                    url,
                    body=None if body is None else json.dumps(body).encode(),
                    headers=headers,
                    timeout=urllib3.Timeout(connect=self._patience.connect_s, read=read_s),
                    retries=False,
                    preload_content=preload,
                )
                refusal = response.data if response.status >= 400 else b""
            except urllib3.exceptions.SSLError as error:
                raise self._explain_untrusted(error) from error
            except urllib3.exceptions.HTTPError as error:
                raise explain_unreachable(call, self.server, error) from error
            self._note_clock(response.headers)
            if response.status < 400:
                return response
            if response.status != 401 or attempt == 1:
                break
            proof = self._credentials.renew_proof(proof)
        problem = error_of(call, response.status, refusal)
        if isinstance(problem, Busy):
            problem.after_s = read_retry_after(response.headers.get("Retry-After"))
        raise problem

    def _note_clock(self, headers: Mapping[str, str]) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # Not every answer has a date.
            self._ahead_s = parsedate_to_datetime(headers["Date"]).timestamp() - self._clock()

    def _explain_untrusted(self, error: Exception) -> PreflightError:
        return PreflightError(
            f"The certificate of {self.server} is not trusted ({error}). Get credentials for the "
            "cluster again: its certificate may have been replaced."
        )

    def _pool(self, proof: Proof) -> PoolManager:
        with self._lock:
            if self._pools is not None:
                known, pools = self._pools
                if (known.certificate, known.key) == (proof.certificate, proof.key):
                    return pools
            pools = open_pools(self._access, proof)
            self._pools = (proof, pools)
            return pools


_shared: weakref.WeakSet[HttpApi] = weakref.WeakSet()
_sharing = threading.Lock()


def share_connection(
    access: Access, variables: Mapping[str, str], *, namespace: str = ""
) -> HttpApi:
    """Return this process's existing connection, or a new one. Jobs that are followed at the same
    time share connections, logins and watches."""
    wanted = (access, dict(variables), namespace or access.namespace)
    with _sharing:
        for api in _shared:
            if (api._access, dict(api._variables), api.namespace) == wanted:
                return api
        made = HttpApi(access, variables, namespace=namespace)
        _shared.add(made)
        return made


def _start_all_anew() -> None:
    global _sharing
    _sharing = threading.Lock()
    for api in list(_shared):
        api.start_anew()


os.register_at_fork(after_in_child=_start_all_anew)


def _query(selection: Selector) -> dict[str, str]:
    given = {"labelSelector": selection.labels, "fieldSelector": selection.fields}
    return {name: value for name, value in given.items() if value}


def _leading_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
