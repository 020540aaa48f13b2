"""The HTTP API of a Ray cluster's dashboard: a real cluster, and servers with faults."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import urllib3

from kinetic._ray.address import connect
from kinetic._ray.jobs_api import JobsApi, JobsApiLimits, Submission
from kinetic._ray.refusals import explain_silence
from kinetic.errors import BackendUnavailable, NotFound, PreflightError, SubmitError

ONE_TRY = JobsApiLimits(tries=1)
HURRIED = JobsApiLimits(read_s=0.2, tries=1)
SECRET = "a-token-that-nobody-sees"


@pytest.fixture
def api(any_ray) -> Iterator[JobsApi]:
    client = connect(any_ray.address)
    yield client
    client.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not is_so():
        pause.wait(0.05)


# --- a real one


def test_it_says_what_runs_there(common_ray, api):
    assert int(api.version().split(".")[0]) >= 2
    nodes = [node for node in api.nodes() if node.is_alive]
    assert [node.is_head for node in nodes].count(True) == 1
    hosts = [node for node in nodes if node.labels.get("ray.io/tpu-slice-name") == "slice-0"]
    assert [node.resources["TPU"] for node in hosts] == [4.0] * 4
    assert "v6e-16" in {node.labels["ray.io/tpu-pod-type"] for node in hosts}


def test_a_job_runs_and_ends(api):
    name = f"job-{os.urandom(4).hex()}"
    submission = Submission(name, "echo from the driver; exit 3", metadata={"kinetic": "1"})
    api.submit(submission)
    with pytest.raises(SubmitError, match=f"{name} already exists"):
        api.submit(submission)
    wait_until(lambda: api.find(name).has_ended)
    job = api.find(name)
    assert (job.status, job.exit_code, job.metadata) == ("FAILED", 3, {"kinetic": "1"})
    assert "from the driver" in api.logs(name)
    assert name in [job.job_id for job in api.list()]
    # `stop` returns False once Ray's supervisor of the job has ended, slightly after the job.
    wait_until(lambda: api.stop(name) is False)
    with pytest.raises(NotFound, match="job-nobody"):
        api.logs("job-nobody")


def test_packages_are_sent_once(api):
    name = f"kinetic-{os.urandom(8).hex()}.zip"
    assert api.has_package(name) is False
    assert api.send_package(name, b"content") is True
    assert api.send_package(name, b"content") is False


def test_files_of_the_logs_come_byte_by_byte(api, common_ray):
    (logs,) = (common_ray.folder / "ray").glob("session_2*/logs")
    folder = logs / "kinetic-test" / "a [b]"
    folder.mkdir(parents=True)
    content = os.urandom(200_000)
    (folder / "file").write_bytes(content)
    (head,) = (node.node_id for node in api.nodes() if node.is_head)
    assert b"".join(api.read_log(head, "kinetic-test/a [b]/file")) == content
    assert api.list_logs(head, "kinetic-test/*/*") == ["kinetic-test/a [b]/file"]
    with suppress(NotFound):  # Ray reports "not found" or, rarely, sends an empty file.
        assert list(api.read_log(head, "kinetic-test/none")) == []


@pytest.mark.parametrize("token", ["", "not-the-token-0123456789abcdef0123"])
def test_without_the_token_nobody_is_let_in(common_ray, api, token):
    stranger = JobsApi(api.address, token)
    with pytest.raises(PreflightError, match="RAY_AUTH_TOKEN") as raised:
        stranger.list()
    assert not token or token not in str(raised.value)
    stranger.close()


# --- others


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[JobsApi]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    api = JobsApi(f"http://127.0.0.1:{server.server_address[1]}", SECRET, limits=ONE_TRY)
    try:
        yield api
    finally:
        api.close()
        server.shutdown()
        server.server_close()
        thread.join()


def page(
    status: int, text: bytes, *, reads: bool = True, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("content-length") or 0) * reads)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (page(401, b"Unauthorized"), PreflightError, "asks for a token"),
        (page(403, b"Forbidden"), PreflightError, "does not accept your token"),
        (page(200, b"<html>", content_type="text/html"), PreflightError, "not a Ray dashboard"),
        (page(404, b"<html>", content_type="text/html"), PreflightError, "not a Ray dashboard"),
        (page(404, b"404: Not Found"), PreflightError, "not a Ray dashboard"),
        (page(302, b"", location="https://login"), PreflightError, "login page"),
        (page(200, b"[]"), PreflightError, "not a Ray dashboard"),
        (page(200, b"{}"), PreflightError, "not a Ray dashboard"),
        (page(500, b"Traceback\n  x\nOSError: full.\n.\n"), BackendUnavailable, "OSError: full"),
        (page(503, b""), BackendUnavailable, "HTTP 503"),
        (
            page(502, b"<html>Bad Gateway</html>", content_type="text/html"),
            BackendUnavailable,
            r"HTTP 502\): .Bad Gateway",
        ),
    ],
)
def test_each_refusal_has_its_sentence(answer, kind, words):
    with serving(answer) as api, pytest.raises(kind, match=words) as raised:
        api.version()
    assert SECRET not in str(raised.value)


def test_a_slow_line_may_take_longer_than_connecting():
    content, sizes = bytes(16 << 20), []

    def take_slowly(handler):
        while sum(sizes) < len(content):
            sizes.append(len(handler.rfile.read(1 << 16)))
            time.sleep(0.012)
        page(200, b"{}", reads=False)(handler)

    with serving(take_slowly) as api:
        api._limits = JobsApiLimits(connect_s=2.0, tries=1)
        api.put_package("kinetic-large.zip", content)
    assert sum(sizes) == len(content)


def test_a_server_that_does_not_answer_is_said():
    waiting = threading.Event()
    with serving(lambda _: waiting.wait(30) and None) as api:
        api._limits = HURRIED
        with pytest.raises(BackendUnavailable, match="does not answer"):
            api.version()
        waiting.set()


def test_a_connection_that_is_cut_off_is_no_fault_of_a_certificate():
    cut_off = urllib3.exceptions.SSLError(ssl.SSLEOFError(8, "EOF occurred"))
    error = explain_silence("https://head:8265", cut_off)
    assert isinstance(error, BackendUnavailable)
    assert "certificate" not in str(error)
    wrong = urllib3.exceptions.SSLError(ssl.SSLCertVerificationError(1, "self-signed"))
    assert "is not trusted" in str(explain_silence("https://head:8265", wrong))


def test_nothing_that_listens_is_said():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(BackendUnavailable, match=r"Nothing answers.*--include-dashboard"):
        JobsApi(f"http://127.0.0.1:{port}", limits=ONE_TRY).version()


def test_a_name_that_nobody_has_is_said():
    with pytest.raises(BackendUnavailable, match=r"could not be resolved.*KINETIC_ADDRESS"):
        JobsApi("http://no-such-host.invalid:8265", limits=ONE_TRY).version()


def test_a_submission_is_not_repeated():
    methods = []

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        methods.append(handler.command)
        page(503, b"")(handler)

    patient = JobsApiLimits(tries=3, pause_s=0.0)
    with serving(refuse) as api:
        api._limits = patient
        with pytest.raises(BackendUnavailable):
            api.submit(Submission("job-1", "true"))
        with pytest.raises(BackendUnavailable):
            api.version()
    assert methods == ["POST", "GET", "GET", "GET"]


def test_the_proxy_of_the_environment_is_for_other_machines(monkeypatch):
    with serving(page(200, b'{"ray_version": "2.99"}')) as server_api:
        monkeypatch.setenv("http_proxy", server_api.address)
        distant = JobsApi("http://no-such-host.invalid:8265", limits=ONE_TRY)
        assert distant.version() == "2.99"
        distant.close()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert server_api.version() == "2.99"
