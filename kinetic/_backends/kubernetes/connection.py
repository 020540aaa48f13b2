"""The API server over HTTP: the implementation of `api.Api`, and the only place that sends.

In: an `Access`. Out: documents and streams. Bodies are plain JSON: the official client makes an
object of each field, which takes longer than the call, and does not know JobSets.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from kinetic._backends.kubernetes import answers
from kinetic._backends.kubernetes.answers import (
    ApiCall,
    Conflict,
    NotInstalled,
    error_of,
    explain_unreachable,
)
from kinetic._backends.kubernetes.api import (
    CallLimits,
    Document,
    ObjectList,
    Selector,
    Version,
    waits_s,
)
from kinetic._backends.kubernetes.credentials import Credentials, Proof
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.pools import pools_of
from kinetic._backends.kubernetes.resources import ACCESS_REVIEWS, JOBS, JOBSETS, Resource
from kinetic.errors import KineticError, NotFound, PreflightError
from kinetic.version import __version__

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
WATCH_S = 280
"""How long the server keeps a watch open."""
PAGE = 500
LONGEST_RETRY_AFTER_S = 60.0


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
        self._credentials = Credentials(access, variables, clock)
        self._sleep = sleep
        self._random = seed or random.Random()
        self._lock = threading.Lock()
        self._pools: tuple[Proof, PoolManager] | None = None

    def __repr__(self) -> str:
        return f"HttpApi({self.server!r}, namespace={self.namespace!r})"

    def now(self) -> float:
        """As in `Api`."""
        return self._clock() + self._ahead_s

    # --- verbs

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """As in `Api`."""
        name = str((document.get("metadata") or {}).get("name", ""))
        call = ApiCall("create", resource, self._namespace_of(resource), name)
        path = f"{resource.path(call.namespace)}?fieldValidation=Strict{'&dryRun=All' * dry_run}"
        unsure = False

        def post(tries: int) -> Document:
            nonlocal unsure
            unsure = tries > 0
            return self._document("POST", path, call, document)

        try:
            return self._repeat_call(call, post)
        except Conflict:
            # An earlier try may have created it, and its answer was lost.
            if unsure and name and (there := self._find_same(resource, document, name)) is not None:
                return there
            raise

    def _find_same(self, resource: Resource, document: Document, name: str) -> Document | None:
        if resource not in (JOBS, JOBSETS):
            return document  # Submitters may not read what goes with a workload; names are unique.
        try:
            there = self.get(resource, name)
        except NotFound:
            return None
        except answers.Forbidden:
            return document
        wanted = (document.get("metadata") or {}).get("labels") or {}
        found = (there.get("metadata") or {}).get("labels") or {}
        ours = bool(wanted) and wanted.items() <= found.items()
        return there if ours and "deletionTimestamp" not in there["metadata"] else None

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document:
        """As in `Api`."""
        call = ApiCall("get", resource, self._namespace_of(resource, namespace), name)
        path = resource.path(call.namespace, name)
        return self._repeat_call(call, lambda _: self._document("GET", path, call))

    def list(self, resource: Resource, selection: Selector = Selector()) -> ObjectList:  # noqa: B008
        """As in `Api`."""
        call = ApiCall("list", resource, self._namespace_of(resource, selection.namespace))
        items: list[Document] = []
        more = ""
        while True:
            query = {
                **_query(selection),
                "limit": str(PAGE),
                **({"continue": more} if more else {}),
            }
            path = f"{resource.path(call.namespace)}?{urlencode(query)}"
            try:
                page = self._repeat_call(call, partial(self._page, path, call))
            except answers.Expired:
                if not more:
                    raise
                items, more = [], ""  # reading all pages took too long: begin again
                continue
            items += page.get("items") or ()
            meta = page.get("metadata") or {}
            more = meta.get("continue") or ""
            if not more:
                return ObjectList(tuple(items), str(meta.get("resourceVersion", "")))

    def _page(self, path: str, call: ApiCall, _tries: int) -> Document:
        return self._document("GET", path, call)

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
        call = ApiCall("delete", resource, self._namespace_of(resource), name)
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
        path = resource.path(call.namespace, name)
        try:
            self._repeat_call(call, lambda _: self._document("DELETE", path, call, body))
        except NotFound:
            return False
        return True

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> Document:
        """As in `Api`."""
        call = ApiCall("patch", resource, self._namespace_of(resource), name)
        path = resource.path(call.namespace, name)
        return self._repeat_call(
            call, lambda _: self._document("PATCH", path, call, dict(change), MERGE_PATCH)
        )

    def watch(
        self,
        resource: Resource,
        selection: Selector = Selector(),  # noqa: B008
        *,
        resource_version: str = "",
    ) -> JsonStream:
        """As in `Api`. Not repeated: the watcher decides where to continue."""
        call = ApiCall("watch", resource, self._namespace_of(resource, selection.namespace))
        query = {
            **_query(selection),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            **({"resourceVersion": resource_version} if resource_version else {}),
        }
        path = f"{resource.path(call.namespace)}?{urlencode(query)}"
        return JsonStream(self._stream(path, call))

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
        call = ApiCall("create", ACCESS_REVIEWS)
        path = ACCESS_REVIEWS.path()
        review = self._repeat_call(call, lambda _: self._document("POST", path, call, body))
        return bool((review.get("status") or {}).get("allowed"))

    def knows(self, resource: Resource) -> bool:
        """As in `Api`."""
        call = ApiCall("get", resource)
        path = f"/apis/{resource.group}/{resource.version}" if resource.group else "/api/v1"
        try:
            found = self._repeat_call(call, lambda _: self._document("GET", path, call))
        except (NotInstalled, NotFound):
            return False
        return any(r.get("name") == resource.plural for r in found.get("resources") or ())

    def version(self) -> Version:
        """As in `Api`."""
        call = ApiCall("get", Resource("", "v1", "version", namespaced=False))
        found = self._repeat_call(call, lambda _: self._document("GET", "/version", call))
        numbers = [_leading_number(str(found.get(key, ""))) for key in ("major", "minor")]
        return Version(str(found.get("gitVersion", "")), *numbers)

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

    def _repeat_call(self, call: ApiCall, send: Callable[[int], Document]) -> Document:
        """Make a call, and repeat it if that may help."""
        tries = 0
        while True:
            try:
                return send(tries)
            except _MayPass as broken:
                tries += 1
                if tries >= self._patience.tries:
                    raise broken.error from broken.error.__cause__
                wait_s = broken.after_s
                if wait_s is None:
                    wait_s = waits_s(tries, self._patience, self._random)
            self._sleep(wait_s)

    def _document(
        self, method: str, path: str, call: ApiCall, body: Document | None = None, kind: str = JSON
    ) -> Document:
        response = self._send(method, path, call, body, kind, preload=True)
        if response.status >= 400:
            raise self._problem(call, response.status, response.headers, response.data)
        try:
            found = json.loads(response.data)
        except ValueError as error:
            raise _MayPass(explain_unreachable(call, self.server, error)) from error
        if not isinstance(found, dict):
            raise _MayPass(
                explain_unreachable(call, self.server, ValueError("no object in the answer"))
            )
        return found

    def _stream(self, path: str, call: ApiCall) -> HttpStream:
        try:
            response = self._send("GET", path, call, None, JSON, preload=False)
            if response.status >= 400:
                body = response.read(1 << 20)
                response.release_conn()
                raise self._problem(call, response.status, response.headers, body)
        except _MayPass as broken:
            raise broken.error from broken.error.__cause__
        return HttpStream(response, lambda error: explain_unreachable(call, self.server, error))

    def _problem(
        self, call: ApiCall, status: int, headers: Mapping[str, str], body: bytes
    ) -> Exception:
        error = error_of(call, status, body)
        if not answers.may_pass(status, body):
            return error
        return _MayPass(error, _retry_after(headers))

    def _send(
        self,
        method: str,
        path: str,
        call: ApiCall,
        body: Document | None,
        kind: str,
        *,
        preload: bool,
    ) -> BaseHTTPResponse:
        """Send a request, and again with fresh credentials if the first are refused."""
        import urllib3

        proof = self._credentials.proof()
        for attempt in range(2):
            headers = {"accept": JSON, "user-agent": f"kinetic/{__version__}"}
            if body is not None:
                headers["content-type"] = kind
            if proof.authorization:
                headers["authorization"] = proof.authorization
            try:
                response = self._pool(proof).request(
                    method,
                    self.server + path,
                    body=None if body is None else json.dumps(body).encode(),
                    headers=headers,
                    timeout=urllib3.Timeout(
                        connect=self._patience.connect_s,
                        read=self._patience.read_s if preload else self._patience.stream_s,
                    ),
                    retries=False,
                    preload_content=preload,
                )
            except urllib3.exceptions.SSLError as error:
                raise self._explain_untrusted(error) from error
            except urllib3.exceptions.HTTPError as error:
                raise _MayPass(explain_unreachable(call, self.server, error)) from error
            self._note_clock(response.headers)
            if response.status != 401 or attempt == 1:
                return response
            response.close()
            proof = self._credentials.renew_proof(proof)
        raise AssertionError("not reached")

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
            pools = pools_of(self._access, proof)
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


class HttpStream:
    """The bytes of an answer, as they arrive."""

    def __init__(
        self, response: BaseHTTPResponse, problem: Callable[[BaseException], KineticError]
    ) -> None:
        """Read an answer.

        Args:
            response: with its head already read.
            problem: makes the error for a connection that breaks.
        """
        self.status = response.status
        self._response = response
        self._problem = problem
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """As in `EventStream`, of bytes."""
        import urllib3

        try:
            while not self._closed and (data := self._response.read1(1 << 16)):
                yield data
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            if not self._closed:  # closing it from another thread makes reading fail
                raise self._problem(error) from error
        finally:
            self._response.close()

    def close(self) -> None:
        """As in `EventStream`, of bytes."""
        self._closed = True
        try:
            self._response.shutdown()  # wakes the reader
        except (ValueError, RuntimeError, OSError):
            self._response.close()  # it has been read to its end


class JsonStream:
    """The events of a watch: one JSON object in each line."""

    def __init__(self, stream: HttpStream) -> None:
        """Read a stream of lines."""
        self._stream = stream

    def __iter__(self) -> Iterator[Document]:
        """As in `EventStream`."""
        rest = b""
        for data in self._stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield self._event(line)

    def _event(self, line: bytes) -> Document:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._stream._problem(error) from error
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """As in `EventStream`."""
        self._stream.close()


class _MayPass(Exception):
    """A failure after which the same call may succeed."""

    def __init__(self, error: KineticError, after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return min(float(headers.get("Retry-After", "")), LONGEST_RETRY_AFTER_S)
    except ValueError:
        return None


def _query(selection: Selector) -> dict[str, str]:
    given = {"labelSelector": selection.labels, "fieldSelector": selection.fields}
    return {name: value for name, value in given.items() if value}


def _leading_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
