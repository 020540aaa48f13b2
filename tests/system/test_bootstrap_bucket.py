"""A pod that starts from a bucket authenticates with a token; if access is denied, it says why."""

from __future__ import annotations

import http.server
import shutil
import threading
import urllib.parse

import bootstrap_pods
import pytest
from bootstrap_pods import (
    DENIED,
    MISSING,
    UNREACHABLE,
    package,
)
from doubles.gcs import serving

from kinetic._core import layout
from kinetic._store.gcs import GcsStore

bare_python, pod = bootstrap_pods.bare_python, bootstrap_pods.pod


class Bucket:
    """A server that stands for one bucket, and for a cloud machine's metadata server."""

    def __init__(self, store):
        self.trouble: list[int] = []
        self.requests: list[tuple[str, str]] = []
        self.token_code, bucket = 200, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                bucket.requests.append((self.path, self.headers.get("Authorization", "")))
                if self.path.startswith("/computeMetadata"):
                    good = self.headers.get("Metadata-Flavor") == "Google"
                    self.answer(bucket.token_code if good else 403, b'{"access_token": "t0"}')
                elif bucket.trouble:
                    code = bucket.trouble.pop(0)
                    # code 0: close the connection in the middle of the body
                    self.answer(code or 200, b"x", length=1 if code else 99)
                else:
                    name = urllib.parse.unquote(self.path.partition("/o/")[2].partition("?")[0])
                    key = name.removeprefix("some/prefix/")
                    exists = store.has(key)
                    self.answer(200 if exists else 404, store.get(key) if exists else b"")

            def answer(self, code, data, length=None):
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def bucket(pod):
    new_bucket = Bucket(pod.store)
    pod.env |= {"KINETIC_STORE": "gs://b/some/prefix", "STORAGE_EMULATOR_HOST": new_bucket.address}
    yield new_bucket
    new_bucket.close()


@pytest.mark.long
def test_the_runner_starts_from_a_bucket(pod, bucket):
    bucket.trouble = [503, 0, 429]
    pod.env["KINETIC_POD_PATIENCE_S"] = "100"
    pod.becomes()
    assert len(bucket.requests) == 4
    path, authorization = bucket.requests[-1]
    name = f"some%2Fprefix%2F{layout.blob(pod.env['KINETIC_RUNTIME']).replace('/', '%2F')}"
    assert path == f"/download/storage/v1/b/b/o/{name}?alt=media"
    assert authorization == ""


def test_a_pod_shows_the_token_of_its_service_account(pod, bucket):
    del pod.env["STORAGE_EMULATOR_HOST"]
    pod.text = pod.text.replace("https://storage.googleapis.com", f"http://{bucket.address}")
    pod.env |= {"GCE_METADATA_HOST": bucket.address, "http_proxy": "http://127.0.0.1:9"}
    pod.env["no_proxy"] = "127.0.0.1"
    pod.becomes()
    assert [authorization for _, authorization in bucket.requests] == ["", "Bearer t0"]
    bucket.token_code = 404
    shutil.rmtree(pod.home)
    assert "no token from" in pod.fails(DENIED)


def test_a_bucket_that_denies(pod, bucket):
    bucket.trouble = [403] * 100
    assert "roles/storage.objectUser" in pod.fails(DENIED)


def test_an_object_that_is_gone(pod, bucket):
    pod.store.delete(layout.blob(pod.env["KINETIC_RUNTIME"]))
    pod.fails(MISSING)
    assert len(bucket.requests) == 1


def test_no_network(pod):
    pod.env |= {"KINETIC_STORE": "gs://b", "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    assert "gs://b does not answer" in pod.fails(UNREACHABLE)


def test_what_the_store_of_buckets_sends_is_what_a_pod_fetches(pod, monkeypatch):
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        store = GcsStore("gs://bucket/some/prefix")
        store.put(layout.blob(pod.env["KINETIC_RUNTIME"]), package())
        pod.env |= {"KINETIC_STORE": store.uri, "STORAGE_EMULATOR_HOST": double.uri}
        pod.becomes()
        store.delete("blobs")
        shutil.rmtree(pod.home)
        pod.fails(MISSING)
