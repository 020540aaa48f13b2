"""Calls to an API server over real sockets, with scripted answers."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kinetic._backends.kubernetes import connection, errors
from kinetic._backends.kubernetes.api import Api, CallLimits, Selector, waits_s
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, NODES, PODS, SECRETS
from kinetic._rpc import certificate
from kinetic.errors import BackendUnavailable, NotFound, PreflightError

JOB = {"metadata": {"name": "a", "labels": {"kinetic.dev/job-id": "job-1"}}}


@dataclass
class Reply:
    """One answer: a body at once, or chunks (an exception breaks the connection off there)."""

    status: int = 200
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes | type[Exception]] | None = None
    wait_for: threading.Event | None = None


class Break(Exception):
    """The connection breaks off here."""


@dataclass
class Script:
    """A server that gives its replies in order, and keeps what it was asked."""

    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[str, str, Any, str]] = field(default_factory=list)
    impersonated: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    date: str = "Thu, 01 Jan 1970 01:00:00 GMT"

    def asked(self) -> list[str]:
        return [f"{method} {path}" for method, path, _, _ in self.requests]


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp: float | None = None) -> str:
            return script.date

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            headers = self.headers.items()
            script.impersonated += [h for h in headers if h[0].startswith("Impersonate-")]
            script.requests.append(
                (
                    self.command,
                    self.path,
                    json.loads(body) if body else None,
                    self.headers.get("authorization") or "",
                )
            )
            reply = script.replies.pop(0) if script.replies else Reply(500, "no reply left")
            if reply.status == 0:
                self.close_connection = True
                return
            if reply.chunks is not None:
                self.send_chunks(reply)
                return
            data = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data.encode())

        def send_chunks(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for chunk in reply.chunks or ():
                if not isinstance(chunk, bytes):
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if reply.wait_for is not None:
                reply.wait_for.wait(100)
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = do_PATCH = answer

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def api(script: Script, slept: list[float]) -> Iterator[Api]:
    access = Access(script.url, namespace="ml", user={"token": "t"})
    made = HttpApi(access, {}, sleep=slept.append, patience=CallLimits(tries=3))
    yield made
    made.close()


def status(code: int, message: str, **more: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "message": message, **more}


def test_objects_are_plain_documents(api: Api, script: Script) -> None:
    script.replies = [Reply(201, {**JOB, "status": {}}), Reply(200, JOB)]
    assert api.create(JOBS, JOB)["status"] == {}
    assert api.get(JOBS, "a") == JOB
    assert script.asked() == [
        "POST /apis/batch/v1/namespaces/ml/jobs?fieldValidation=Strict",
        "GET /apis/batch/v1/namespaces/ml/jobs/a",
    ]
    assert {r[3] for r in script.requests} == {"Bearer t"}


def test_a_list_is_read_page_by_page(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, {"metadata": {"continue": "x", "resourceVersion": "7"}, "items": [JOB]}),
        Reply(200, {"metadata": {"resourceVersion": "7"}, "items": [JOB]}),
    ]
    found = api.list(PODS, Selector(labels="app=kinetic", namespace=""))
    assert (len(found.items), found.resource_version) == (2, "7")
    assert script.asked()[0] == "GET /api/v1/pods?labelSelector=app%3Dkinetic&limit=500"
    assert script.asked()[1].endswith("&continue=x")


def test_a_list_that_took_too_long_begins_again(api: Api, script: Script) -> None:
    page = {"metadata": {"continue": "x"}, "items": [JOB]}
    last = {"metadata": {"resourceVersion": "9"}, "items": [JOB]}
    script.replies = [Reply(200, page), Reply(410, status(410, "gone")), Reply(200, last)]
    assert len(api.list(JOBS).items) == 1


@pytest.mark.parametrize(
    "broken", [Reply(503, "no"), Reply(0), Reply(429, "slow down"), Reply(200, "{")]
)
def test_a_call_is_made_again_with_growing_pauses(
    api: Api, script: Script, slept: list[float], broken: Reply
) -> None:
    script.replies = [broken, broken, Reply(200, JOB)]
    assert api.get(JOBS, "a") == JOB
    assert len(slept) == 2
    assert 0 < slept[0] <= 0.25
    assert 0.2 < slept[1] <= 0.5


def test_the_server_says_when_to_come_again(api: Api, script: Script, slept: list[float]) -> None:
    script.replies = [Reply(429, "slow", {"Retry-After": "7"}), Reply(200, JOB)]
    api.get(JOBS, "a")
    assert slept == [7.0]


def test_what_does_not_pass_is_not_tried_again(api: Api, script: Script) -> None:
    script.replies = [Reply(422, status(422, "no"))]
    with pytest.raises(errors.Refused, match=r"refuses to create jobs\.batch a in namespace ml"):
        api.create(JOBS, JOB)
    assert len(script.requests) == 1


def test_a_server_that_stays_away(api: Api, script: Script, slept: list[float]) -> None:
    script.replies = [Reply(503, status(503, "etcd is down"))] * 3
    with pytest.raises(BackendUnavailable, match=r"etcd is down"):
        api.list(JOBS)
    assert len(slept) == 2
    nobody = HttpApi(
        Access("http://127.0.0.1:1"), {}, sleep=slept.append, patience=CallLimits(tries=2)
    )
    with pytest.raises(
        BackendUnavailable, match=r"Could not list nodes: http://127\.0\.0\.1:1 does"
    ):
        nobody.list(NODES)


def test_a_creation_whose_answer_was_lost_is_found_again(api: Api, script: Script) -> None:
    exists = Reply(409, status(409, 'jobs.batch "a" already exists', reason="AlreadyExists"))
    script.replies = [Reply(0), exists, Reply(200, JOB)]
    assert api.create(JOBS, JOB) == JOB


def test_a_creation_whose_answer_was_lost_is_ours_where_it_may_not_be_read(
    api: Api, script: Script
) -> None:
    exists = Reply(409, status(409, 'secrets "a" already exists', reason="AlreadyExists"))
    said = 'secrets "a" is forbidden: User "eve" cannot get resource "secrets"'
    script.replies = [Reply(0), exists, Reply(403, status(403, said, reason="Forbidden"))]
    assert api.create(SECRETS, JOB) == JOB


def test_a_name_that_another_job_has_is_a_conflict(api: Api, script: Script) -> None:
    exists = Reply(409, status(409, 'jobs.batch "a" already exists', reason="AlreadyExists"))
    other = {"metadata": {"name": "a", "labels": {"kinetic.dev/job-id": "job-2"}}}
    script.replies = [exists]
    with pytest.raises(errors.Conflict):
        api.create(JOBS, JOB)
    script.replies = [Reply(0), exists, Reply(200, other)]
    with pytest.raises(errors.Conflict):
        api.create(JOBS, JOB)


def test_deletion_takes_what_belongs_to_it_and_knows_what_is_gone(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, status(200, "")),
        Reply(404, status(404, "none", details={"kind": "jobs"})),
    ]
    assert api.delete(JOBS, "a", uid="u") is True
    assert api.delete(JOBS, "a", propagation="Foreground") is False
    assert script.requests[0][2]["propagationPolicy"] == "Background"
    assert script.requests[0][2]["preconditions"] == {"uid": "u"}
    assert script.requests[1][2]["propagationPolicy"] == "Foreground"


def test_a_kind_that_is_not_installed_is_not_a_missing_object(api: Api, script: Script) -> None:
    script.replies = [Reply(404, "404 page not found\n"), Reply(404, status(404, "no", details={}))]
    with pytest.raises(errors.NotInstalled):
        api.get(JOBSETS, "a")
    with pytest.raises(NotFound):
        api.get(JOBSETS, "a")


def test_discovery(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, {"resources": [{"name": "jobsets"}]}),
        Reply(404, "404 page not found\n"),
        Reply(200, {"major": "1", "minor": "33+", "gitVersion": "v1.33.4-gke.1"}),
    ]
    assert api.knows(JOBSETS)
    assert not api.knows(JOBSETS)
    found = api.version()
    assert (found.text, found.major, found.minor) == ("v1.33.4-gke.1", 1, 33)


def test_the_time_is_that_of_the_server(script: Script) -> None:
    access = Access(script.url, namespace="ml", user={"token": "t"})
    with contextlib.closing(HttpApi(access, {}, clock=lambda: 100.0)) as api:
        assert api.now() == 100.0
        script.replies = [Reply(404), Reply(404)]
        assert not api.knows(PODS)
        assert api.now() == 3600.0
        script.date = "noon"
        assert not api.knows(PODS)
        assert api.now() == 3600.0  # It stays what it was.


def test_rights_are_asked_for(api: Api, script: Script) -> None:
    script.replies = [
        Reply(201, {"status": {"allowed": True}}),
        Reply(201, {"status": {"allowed": False}}),
    ]
    assert api.may("watch", PODS)
    assert not api.may("list", NODES)
    assert script.requests[0][2]["spec"]["resourceAttributes"] == {
        "verb": "watch",
        "resource": "pods",
        "namespace": "ml",
    }
    assert script.requests[1][2]["spec"]["resourceAttributes"] == {
        "verb": "list",
        "resource": "nodes",
    }


def test_expired_credentials_are_renewed_once(script: Script, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    access = Access(script.url, namespace="ml", user={"tokenFile": str(token)})
    api = HttpApi(access, {}, sleep=lambda _: None)
    script.replies = [Reply(200, JOB), Reply(401, status(401, "no")), Reply(200, JOB)]
    api.get(JOBS, "a")
    token.write_text("new")
    api.get(JOBS, "a")
    assert [r[3] for r in script.requests] == ["Bearer old", "Bearer old", "Bearer new"]
    script.replies = [Reply(401, status(401, "no"))] * 2
    with pytest.raises(errors.Unauthorized):
        api.get(JOBS, "a")
    api.close()


def test_whoever_a_kubeconfig_names_is_impersonated(script: Script) -> None:
    user = {
        "token": "t",
        "as": "robot",
        "as-uid": "7",
        "as-groups": ["a", "b"],
        "as-user-extra": {"Reason/x": ["1", "2"]},
    }
    script.replies = [Reply(200, JOB)]
    with contextlib.closing(HttpApi(Access(script.url, user=user), {})) as api:
        api.get(JOBS, "a")
    assert script.impersonated == [
        ("Impersonate-User", "robot"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-reason%2Fx", "1"),
        ("Impersonate-Extra-reason%2Fx", "2"),
    ]
    assert script.requests[0][3] == "Bearer t"


@pytest.mark.parametrize(
    ("no_proxy", "is_direct"), [("10.0.0.0/8, 127.0.0.0/8", True), ("10.0.0.0/8,x/8", False)]
)
def test_networks_are_reached_without_a_proxy(
    script: Script, monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_direct: bool
) -> None:
    """As kubectl has it. The proxy here does not answer."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", no_proxy)
    script.replies = [Reply(200, JOB)]
    access = Access(script.url, user={"token": "t"})
    with contextlib.closing(HttpApi(access, {}, patience=CallLimits(tries=1))) as api:
        if is_direct:
            assert api.get(JOBS, "a") == JOB
        else:
            with pytest.raises(BackendUnavailable, match="NO_PROXY"):
                api.get(JOBS, "a")


def lines(*documents: Any) -> bytes:
    return b"".join(json.dumps(d).encode() + b"\n" for d in documents)


def test_a_watch_gives_events_as_they_come(api: Api, script: Script) -> None:
    whole = lines({"type": "ADDED", "object": JOB}, {"type": "DELETED", "object": JOB})
    script.replies = [Reply(200, chunks=[whole[:9], whole[9:40], whole[40:]])]
    stream = api.watch(JOBS, Selector(labels="a=b"), resource_version="7")
    assert [event["type"] for event in stream] == ["ADDED", "DELETED"]
    asked = script.asked()[0]
    for part in ("watch=true", "allowWatchBookmarks=true", "resourceVersion=7", "timeoutSeconds="):
        assert part in asked


def test_a_stream_that_breaks_off_is_told_from_one_that_ends(api: Api, script: Script) -> None:
    one = {"type": "ADDED", "object": JOB}
    replies = [[lines(one), Break], [lines(one)], [lines(one), b'{"type":']]
    script.replies = [Reply(200, chunks=chunks) for chunks in replies]
    got: list[Any] = []
    with pytest.raises(BackendUnavailable):
        got.extend(api.watch(JOBS))
    assert got == [one]
    assert list(api.watch(JOBS)) == [one]
    assert list(api.watch(JOBS)) == [one]


def test_a_watch_refused_or_unreachable_raises_at_once(api: Api, script: Script) -> None:
    script.replies = [Reply(410, status(410, "too old")), Reply(503, "no")]
    with pytest.raises(errors.Expired):
        api.watch(JOBS)
    with pytest.raises(BackendUnavailable):
        api.watch(JOBS)
    assert len(script.requests) == 2


@pytest.mark.timeout(200)
def test_a_stream_ends_when_told(api: Api, script: Script) -> None:
    release = threading.Event()
    one = {"type": "ADDED", "object": JOB}
    script.replies = [Reply(200, chunks=[lines(one)], wait_for=release)]
    stream = api.watch(JOBS)
    got: list[Any] = []
    first = threading.Event()

    def read() -> None:
        for data in stream:
            got.append(data)
            first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(100)
    stream.close()
    reader.join(100)
    assert not reader.is_alive()
    release.set()
    assert got == [one]
    stream.close()


def test_a_process_has_one_connection_to_a_server_for_each_user_and_namespace() -> None:
    access = Access("https://127.0.0.1:1", user={"token": "t"})
    first = connection.share_connection(access, {"A": "1"})
    assert connection.share_connection(replace(access), {"A": "1"}) is first
    others = [
        connection.share_connection(access, {"A": "2"}),
        connection.share_connection(access, {"A": "1"}, namespace="ml"),
        connection.share_connection(replace(access, user={"token": "new"}), {"A": "1"}),
    ]
    assert first not in others


def test_a_silent_connection_is_tried_by_the_kernel(script: Script) -> None:
    from kinetic._backends.kubernetes.credentials import Proof
    from kinetic._backends.kubernetes.transport import open_pools

    script.replies = [Reply(200, JOB)]
    pools = open_pools(Access(script.url), Proof())
    pools.request("GET", f"{script.url}/x")
    held = pools.connection_from_url(script.url).pool.get()
    assert held.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    held.close()
    pools.clear()


def test_certificates_that_are_none() -> None:
    api = HttpApi(Access("https://127.0.0.1:1", ca=b"no certificate"), {})
    with pytest.raises(PreflightError, match="certificates of the kubeconfig"):
        api.get(JOBS, "a")


@pytest.fixture
def tls(script: Script, tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """The same server behind TLS: its address and its certificate."""
    made = certificate.make("localhost")
    chain = tmp_path / "chain.pem"
    chain.write_text(made.certificate + made.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}", made.certificate.encode()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_is_trusted_by_its_certificate(script: Script, tls: tuple[str, bytes]) -> None:
    url, ca = tls
    once = CallLimits(tries=1)
    script.replies = [Reply(200, JOB), Reply(200, JOB)]
    api = HttpApi(Access(url, ca=ca, server_name="localhost"), {}, patience=once)
    assert api.get(JOBS, "a") == JOB
    api.close()
    api = HttpApi(Access(url, verify=False), {}, patience=once)
    with pytest.warns(Warning, match="Unverified"):
        assert api.get(JOBS, "a") == JOB
    api.close()
    stranger = HttpApi(Access(url), {}, patience=CallLimits(tries=1))
    with pytest.raises(PreflightError, match="is not trusted"):
        stranger.get(JOBS, "a")


def test_pauses_are_random_and_bounded() -> None:
    import random

    seed = random.Random(1)
    pauses = [waits_s(tries, CallLimits(), seed) for tries in range(1, 12)]
    assert all(0.1 < p <= 8 for p in pauses)
    assert len(set(pauses)) == len(pauses)


_: Callable[[HttpApi], Api] = lambda api: api  # noqa: E731 (mypy checks the protocol)
