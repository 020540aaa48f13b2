"""Cloud Build, over HTTP, against a server that answers as its documentation says. The service
itself has never been called by these tests."""

from __future__ import annotations

import base64
import gzip
import http.server
import io
import json
import tarfile
import threading

import pytest

from kinetic._backends.kubernetes.cloud_build import Addresses, CloudBuild
from kinetic.errors import BackendUnavailable, PreflightError

URI = "us-central1-docker.pkg.dev/p/kn-c/base:tpu-0123"
FILES = {"Dockerfile": b"FROM x\n", "requirements.txt": b"numpy\n"}
LOG = "https://console.example/builds/b1"


class Google:
    """Buckets, builds and a registry: each build passes through the states that a test gives."""

    def __init__(self):
        self.asked, self.objects, self.images = [], {}, set()
        self.states, self.trouble, self.requests = ["QUEUED", "WORKING", "SUCCESS"], [], []
        google = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.reply()

            def do_GET(self):
                self.reply()

            def do_HEAD(self):
                self.reply()

            def reply(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                google.asked.append((self.command, self.path, self.headers["Authorization"]))
                code, told = (
                    google.trouble.pop(0)
                    if google.trouble
                    else google.answer(self.command, path, query, body)
                )
                data = json.dumps(told).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method, path, query, body):
        if path.startswith("/upload/"):
            assert "ifGenerationMatch=0" in query
            if query in self.objects:
                return 412, {}
            self.objects[query] = body
            return 200, {}
        if path.startswith("/v2/"):
            return (200 if path in self.images else 404), {}
        if method == "POST":
            self.requests.append(json.loads(body))
        status = self.states.pop(0)
        build = {"id": "b1", "status": status, "logUrl": LOG}
        if status == "FAILURE":
            build["failureInfo"] = {"detail": "step 0 exited with 1"}
        return 200, {"metadata": {"build": build}} if method == "POST" else build


@pytest.fixture
def google():
    made = Google()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


@pytest.fixture
def waited():
    return []


@pytest.fixture
def builds(google, waited):
    at = Addresses(google.url, google.url, google.url)
    return CloudBuild(
        "p", "us-central1", authorization=lambda: "Bearer t0", addresses=at, sleep=waited.append
    )


def test_an_image_is_built(google, builds, waited):
    logs = []
    builds.build(URI, FILES, "p-kn-c-builds", on_log=logs.append)
    ((query, sent),) = google.objects.items()
    (request,) = google.requests
    assert request["images"] == [URI]
    assert request["source"]["storageSource"]["bucket"] == "p-kn-c-builds"
    assert f"name={request['source']['storageSource']['object']}" in query
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(sent))) as archive:
        assert sorted(archive.getnames()) == sorted(FILES)
    assert [(method, path.partition("?")[0]) for method, path, _ in google.asked] == [
        ("POST", "/upload/storage/v1/b/p-kn-c-builds/o"),
        ("POST", "/v1/projects/p/locations/us-central1/builds"),
        ("GET", "/v1/projects/p/locations/us-central1/builds/b1"),
        ("GET", "/v1/projects/p/locations/us-central1/builds/b1"),
    ]
    assert {proof for *_, proof in google.asked} == {"Bearer t0"}
    assert logs == [LOG]
    assert waited == [5.0, 5.0]


def test_the_same_files_are_sent_once(google, builds):
    for states in (["SUCCESS"], ["SUCCESS"]):
        google.states = states
        builds.build(URI, FILES, "b")
    assert len(google.objects) == 1
    assert google.requests[0] == google.requests[1]


def test_a_build_that_fails(google, builds):
    google.states = ["QUEUED", "FAILURE"]
    with pytest.raises(PreflightError, match="step 0 exited with 1") as caught:
        builds.build(URI, FILES, "b")
    assert LOG in str(caught.value)


def test_whether_an_image_is_there(google, builds):
    assert not builds.has(URI)
    google.images.add("/v2/p/kn-c/base/manifests/tpu-0123")
    assert builds.has(URI)
    proof = base64.b64decode(google.asked[-1][2].removeprefix("Basic ")).decode()
    assert proof == "oauth2accesstoken:t0"


def test_trouble_passes(google, builds, waited):
    google.trouble = [(503, {}), (429, {})]
    assert not builds.has(URI)
    assert waited == [1.0, 2.0]


def test_trouble_that_does_not_pass(google, builds, waited):
    google.trouble = [(503, {})] * 9
    with pytest.raises(BackendUnavailable, match="does not answer"):
        builds.has(URI)
    assert len(google.asked) == 5


def test_a_build_is_begun_once_at_most(google, builds):
    google.trouble = [(200, {}), (503, {})]
    with pytest.raises(BackendUnavailable):
        builds.build(URI, FILES, "b")
    assert len([path for _, path, _ in google.asked if path.endswith("/builds")]) == 1


@pytest.mark.parametrize(
    ("code", "advice"), [(401, "gcloud auth"), (403, "cloudbuild.builds.editor"), (404, "enabled")]
)
def test_what_is_refused_says_what_to_do(google, builds, code, advice):
    google.trouble = [(code, {"error": {"message": "no such thing"}})]
    with pytest.raises(PreflightError, match="no such thing") as caught:
        builds.build(URI, FILES, "b")
    assert advice in str(caught.value)
    assert len(google.asked) == 1
