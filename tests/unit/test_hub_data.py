"""Data sets of the Hugging Face hub, fetched from a double of the hub on this machine."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

pytest.importorskip("huggingface_hub")

from importlib.util import find_spec

from laptop_fakes import FakeBackend, plan, planned

from kinetic._client import submission
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Dataset
from kinetic._datasets import cached_copy, hub
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound, StoreError, UsageError

COMMIT = "ab" * 20
FILES = {"README.md": b"# images", "data/train.csv": b"a,b\n1,2\n"}
REPO = "/api/datasets/owner/images"
without_datasets = pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is there")


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests: list[str]
    tokens: set[str]

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = urlsplit(self.path).path
        self.requests.append(f"{self.command} {path}")
        self.tokens.add(self.headers.get("Authorization", ""))
        if path in (REPO, f"{REPO}/revision/main", f"{REPO}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer({"id": "owner/images", "sha": COMMIT, "siblings": siblings})
        elif path == f"{REPO}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)}
                for name, data in FILES.items()
            ]
            self.answer(entries)
        elif path.startswith(f"/datasets/owner/images/resolve/{COMMIT}/"):
            data = FILES[path.split(f"{COMMIT}/")[1]]
            self.send(200, data, {"ETag": self.etag(data), "X-Repo-Commit": COMMIT})
        else:
            code = "RevisionNotFound" if path.startswith(f"{REPO}/revision") else "RepoNotFound"
            self.send(404, b"{}", {"X-Error-Code": code})

    do_HEAD = do_GET

    def etag(self, data):
        return hashlib.sha1(data).hexdigest()

    def answer(self, document):
        self.send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def send(self, status, data, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    class Handler(Hub):
        requests, tokens = [], set()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield Handler
        server.shutdown()
        thread.join()


def read_tree(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.starts_processes
@without_datasets
def test_the_files_of_a_repository(endpoint, tmp_path):
    place = hub.provide("hf://owner/images", root=tmp_path / "data", token="hf_secret")
    assert read_tree(place) == FILES
    assert (place / "README.md").stat().st_mode & 0o777 == 0o444
    assert "Bearer hf_secret" in endpoint.tokens
    endpoint.requests.clear()
    other = hub.provide("hf://owner/images?revision=main", root=tmp_path / "data")
    assert read_tree(other) == FILES
    endpoint.requests.clear()
    assert hub.provide("hf://owner/images", root=tmp_path / "data") == place
    assert not [line for line in endpoint.requests if "/resolve/" in line]


@pytest.mark.starts_processes
@without_datasets
def test_a_disk_that_was_full_at_the_end_does_not_spoil_the_next_try(
    endpoint, tmp_path, monkeypatch
):
    """The disk is full when the copy is already write-protected: the next try must be able to write
    into it. The test checks modes, because root may always write."""
    modes, run, seal = [], hub._run_in_child, cached_copy._seal

    def run_and_note(act, request):
        if act == "fetch":
            folders = (folder for folder, _, _ in os.walk(request["dest"]))
            modes.append({os.stat(folder).st_mode & 0o777 for folder in folders})
        return run(act, request)

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "_run_in_child", run_and_note)
    monkeypatch.setattr(cached_copy, "_seal", fail)
    with pytest.raises(StoreError):
        hub.provide("hf://owner/images", root=tmp_path / "data")
    monkeypatch.setattr(cached_copy, "_seal", seal)
    assert read_tree(hub.provide("hf://owner/images", root=tmp_path / "data")) == FILES
    assert modes == [{0o700}, {0o700}]


@pytest.mark.starts_processes
def test_what_is_not_there_is_named(endpoint, tmp_path):
    with pytest.raises(
        NotFound, match="The data set hf://owner/none does not exist, or is private"
    ):
        hub.provide("hf://owner/none", root=tmp_path)
    with pytest.raises(NotFound, match="no revision 'v9'"):
        hub.provide("hf://owner/images?revision=v9", root=tmp_path)


# Before a job is created


@pytest.mark.starts_processes
def test_what_is_not_there_is_refused_before_the_job(endpoint):
    hub._checked.clear()
    for _ in range(3):
        hub.check("hf://owner/images?revision=main&split=train", token="hf_mine")
    requests = [line for line in endpoint.requests if REPO in line]
    assert requests == [f"GET {REPO}/revision/main"], "an answer is reused"
    assert "Bearer hf_mine" in endpoint.tokens
    for source, why in {
        "none": "The data set hf://owner/none does not exist",
        "images?revision=v9": "no revision 'v9'",
    }.items():
        with pytest.raises(UsageError, match=why):
            hub.check(f"hf://owner/{source}", token="")


@pytest.mark.starts_processes
def test_hosts_without_a_login_are_stood_for_by_none(endpoint, monkeypatch):
    hub._checked.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    hub.check("hf://owner/images", token=None)
    assert endpoint.tokens == {""}
    hub.check("hf://owner/images", token="")
    assert "Bearer hf_of_this_machine" in endpoint.tokens


@pytest.mark.starts_processes
def test_what_this_machine_cannot_find_out_is_left_to_the_hosts(endpoint, monkeypatch):
    hub._checked.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub.check("hf://owner/none", token="")
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    monkeypatch.setattr(hub, "_run_in_child", None)
    hub.check("hf://owner/none", token="")


@pytest.mark.starts_processes
def test_nothing_is_written_for_data_that_is_not_there(endpoint, tmp_path):
    hub._checked.clear()
    payload = b"payload"
    about = plan(payload=Blob("ab" * 32, len(payload)), place=Place("gke"))
    data = (Dataset(source="hf://owner/none", is_dir=True),)
    shipped = planned(dataclasses.replace(about, data=data), payload)
    store = LocalStore(tmp_path / "store")
    with pytest.raises(UsageError, match="is private"):
        submission.submit(shipped, FakeBackend(store), store)
    assert not (tmp_path / "store").exists()


@pytest.mark.starts_processes
@without_datasets
def test_a_split_needs_the_package_that_knows_splits(endpoint, tmp_path):
    with pytest.raises(
        StoreError, match=r"package datasets on the hosts.*`pip install datasets` here"
    ):
        hub.provide("hf://owner/images?split=train", root=tmp_path)


@pytest.mark.starts_processes
def test_a_hub_that_never_answers_is_given_up(endpoint, tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(endpoint, "do_GET", lambda _: gate.wait())
    try:
        with pytest.raises(StoreError, match=r"the hub did not answer within 0\.2 s.*HF_ENDPOINT"):
            hub.provide("hf://owner/images", root=tmp_path / "data", answer_s=0.2)
    finally:
        gate.set()


def test_silence_is_known_also_behind_what_the_package_makes_of_it():
    error = LookupError("not in the cache")
    error.__context__ = TimeoutError("read")
    assert hub._is_silence(error)
    assert not hub._is_silence(LookupError("not there"))
    assert not hub._is_silence(None)
