"""A store in a bucket: the number of its requests, and its behaviour when the service, the network
or permissions fail."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.storage")

from doubles.gcs import serving

from kinetic._store.gcs import GcsStore
from kinetic._store.many import put_many
from kinetic._store.open import open_store
from kinetic.errors import CorruptRecord, NotFound, StoreError, UsageError

LARGE = os.urandom(1 << 20) * 17
"""Content larger than one chunk of an upload."""


@pytest.fixture
def double(monkeypatch):
    with serving("bucket") as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.uri)
        yield running


@pytest.fixture
def store(double):
    return GcsStore("gs://bucket/store")


def test_requests_are_few(store, double, tmp_path):
    def count_calls(act):
        double.forget_requests()
        act()
        return dict(double.calls())

    (tmp_path / "large").write_bytes(LARGE)
    assert count_calls(lambda: store.put("a/b", b"x")) == {"insert": 1}
    assert count_calls(lambda: store.put("a/b", b"x", if_absent=True)) == {"insert": 1}
    assert count_calls(lambda: store.put("a/c", iter([b"x", b"y"]))) == {"insert": 1}
    assert count_calls(lambda: store.put("a/b", b"y")) == {"insert": 1}
    other = GcsStore(store.uri)
    assert count_calls(lambda: other.put("a/b", b"x")) == {"insert": 1}
    large = count_calls(lambda: store.put("large", tmp_path / "large"))
    assert large == {"start": 1, "chunk": 2}
    assert count_calls(lambda: store.put("large", iter([LARGE]), if_absent=True)) == {"get": 1}
    assert count_calls(lambda: store.get("a/b")) == {"media": 1}
    assert count_calls(lambda: store.fetch("large", tmp_path / "there")) == {"media": 1}
    assert count_calls(lambda: store.has("a/b")) == {"get": 1}
    assert count_calls(lambda: list(store.list("a"))) == {"list": 1}
    assert count_calls(lambda: store.delete("a")) == {"list": 1, "delete": 2}
    assert (tmp_path / "there").read_bytes() == LARGE


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"lost": True}])
def test_what_fails_for_a_moment_is_tried_again(store, double, tmp_path, fault):
    store.put("a", b"one")
    store.put("b/c", b"two")
    for call in ("get", "media", "list", "insert", "start", "chunk"):
        double.fail(call, times=2, **fault)
    double.fail("delete", **fault)
    assert store.has("a")
    assert store.get("a") == b"one"
    assert list(store.list("")) == ["a", "b/c"]
    assert store.put("a", b"three")
    assert store.get("a") == b"three"
    assert store.put("large", iter([LARGE]))
    assert store.delete("b") == 1
    store.fetch("large", tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == LARGE


@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
def test_a_write_whose_answer_was_lost_is_known_for_ones_own(store, double, content):
    double.fail("insert", "chunk", lost=True)
    double.fail("insert", "chunk", status=503)
    assert store.put("a", iter([content]), if_absent=True) is True
    assert store.put("a", b"other", if_absent=True) is False
    double.fail("insert", status=503, times=2)
    assert store.put("a", b"other", if_absent=True) is False
    assert store.get("a") == content


@pytest.mark.parametrize("before", [b"", b"before"], ids=["absent", "there"])
def test_a_conditional_write_that_arrives_late_undoes_nothing(store, double, before):
    """The client repeats a conditional write after a break; the late first request does nothing."""
    if before:
        store.put("a", before)
    late = threading.Event()
    double.fail("insert", gate=late, abandoned=True)
    wrote = store.swap("a", before, b"old") if before else store.put("a", b"old", if_absent=True)
    assert wrote
    assert store.put("a", b"new")
    late.set()
    assert double.idle(200)
    assert store.get("a") == b"new"


def test_a_swap_whose_answer_was_lost_is_known_for_ones_own(store, double):
    store.put("a", b"one")
    double.fail("insert", lost=True)
    double.fail("insert", status=503)
    assert store.swap("a", b"one", b"two") is True
    double.fail("insert", status=503, times=2)
    assert store.swap("a", b"one", b"three") is False
    assert store.get("a") == b"two"


def test_two_that_write_the_same_both_succeed(store, double):
    others = [GcsStore(store.uri) for _ in range(4)]
    put_many(store, {"a": b"first"})

    def write(number: int) -> bool:
        return all(others[number].put("a", b"%d" % number) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(4)))
    assert store.get("a") in {b"0", b"1", b"2", b"3"}


def test_a_large_upload_goes_on_after_a_cut(store, double):
    double.fail("chunk", cut_after=5 << 20)
    assert store.put("a", iter([LARGE]))
    assert store.get("a") == LARGE
    assert [r.call for r in double.requests].count("start") == 1


@pytest.mark.parametrize("fault", [{"stored_bytes": 1 << 20}, {"status": 410}, {"status": 404}])
def test_an_upload_that_cannot_go_on_begins_again(store, double, fault):
    double.fail("chunk", **fault)
    assert store.put("a", iter([LARGE]), if_absent=True)
    assert store.get("a") == LARGE
    assert double.calls()["start"] == 2


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_an_upload_that_arrives_damaged_is_sent_again(store, double, content):
    double.fail("insert", "chunk", times=len(content) // (16 << 20) + 1, damaged=True)
    assert store.put("a", iter([content]))
    assert store.get("a") == content
    double.fail("insert", "chunk", times=99, damaged=True)
    with pytest.raises(StoreError, match="CRC32C"):
        store.put("b", content)
    assert not store.has("b")


def test_a_download_goes_on_after_a_cut(store, double, tmp_path):
    store.put("a", LARGE)
    double.forget_requests()
    for at in (100, 5 << 20):
        double.fail("media", cut_after=at)
    digest = hashlib.sha256(LARGE).hexdigest()
    store.fetch("a", tmp_path / "a", sha256=digest)
    assert (tmp_path / "a").read_bytes() == LARGE
    double.fail("media", cut_after=100)
    assert store.get("a") == LARGE


def test_a_download_that_arrives_damaged_is_read_again(store, double, tmp_path):
    store.put("a", LARGE)
    double.fail("media", damaged=True)
    store.fetch("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == LARGE
    # A download that breaks is read in pieces, whose digests the library does not check.
    double.fail("media", cut_after=1000)
    double.fail("media", damaged=True)
    assert store.get("a") == LARGE
    double.fail("media", times=99, damaged=True)
    with pytest.raises(StoreError, match="damaged"):
        store.fetch("a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_an_object_that_is_replaced_while_it_is_read(store, double):
    store.put("a", b"old" * 1000)
    gate = threading.Event()
    double.fail("media", cut_after=1000)
    double.fail("media", gate=gate)
    read = []
    thread = threading.Thread(target=lambda: read.append(store.get("a")))
    thread.start()
    while double.calls()["media"] < 1:
        threading.Event().wait(0.01)
    store.put("a", b"new" * 1000)
    gate.set()
    thread.join(200)
    assert read == [b"new" * 1000]


def test_a_service_that_stays_away_is_an_error(store, double):
    double.fail(times=999, status=503)
    with pytest.raises(StoreError, match="Service Unavailable"):
        GcsStore("gs://bucket", patience_s=0.1).get("a")


def test_nobody_at_the_address(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="refused"):
        GcsStore("gs://bucket", patience_s=0.1).has("a")


@pytest.mark.parametrize(
    ("permission", "act"),
    [
        ("storage.objects.get", lambda s: s.get("a")),
        ("storage.objects.get", lambda s: s.has("a")),
        ("storage.objects.create", lambda s: s.put("a", b"")),
        ("storage.objects.create", lambda s: s.put("a", iter([LARGE]))),
        ("storage.objects.list", lambda s: list(s.list("a"))),
        ("storage.objects.delete", lambda s: s.delete("a")),
    ],
)
def test_a_missing_permission_is_named(store, double, permission, act):
    store.put("a", b"")
    double.denied.add(permission)
    with pytest.raises(
        StoreError, match=rf"{permission} on gs://bucket, which the role roles/storage\."
    ):
        act(store)


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.get("a"),
        lambda s: s.has("a"),
        lambda s: s.put("a", b""),
        lambda s: s.put("a", iter([LARGE])),
        lambda s: list(s.list("a")),
        lambda s: s.delete("a"),
    ],
)
def test_a_missing_bucket_is_no_missing_key(double, act):
    with pytest.raises(StoreError, match="no bucket 'none'") as caught:
        act(GcsStore("gs://none"))
    assert not isinstance(caught.value, NotFound)


def test_credentials_that_are_missing(monkeypatch, tmp_path):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(StoreError, match="gcloud auth application-default login"):
        GcsStore("gs://bucket").get("a")
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(StoreError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        GcsStore("gs://bucket").get("a")


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(StoreError, match=r"pip install .*\[gcp\]"):
        GcsStore("gs://bucket").get("a")


@pytest.mark.parametrize(
    ("uri", "root"),
    [("gs://bucket", "gs://bucket"), ("gs://bucket/", "gs://bucket"), ("gs://b-1.x/a/b/", None)],
)
def test_addresses(double, uri, root):
    assert open_store(uri).uri == (root or uri.rstrip("/"))


def test_the_whole_bucket_is_a_store(double):
    store = GcsStore("gs://bucket")
    store.put("a/b", b"")
    GcsStore("gs://bucket/a").put("c", b"")
    assert list(store.list("")) == ["a/b", "a/c"]
    assert list(GcsStore("gs://bucket/a").list("")) == ["b", "c"]
    with pytest.raises(UsageError, match="1024"):
        store.put("k" * 1025, b"")


def test_a_digest_that_is_not_the_one_wanted(store, tmp_path):
    store.put("a", b"x")
    with pytest.raises(CorruptRecord):
        store.fetch("a", tmp_path / "a", sha256="0" * 64)


def test_connections_are_used_again(store, double):
    put_many(store, {f"k/{n}": b"" for n in range(300)})
    assert len(double.peers) <= store.calls_at_once


MEMORY = """
import resource, sys
from pathlib import Path
from kinetic._store.gcs import GcsStore

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

store, source = GcsStore("gs://bucket"), Path(sys.argv[1])
store.put("small", b"")
before = peak()
store.put("a", source)
store.fetch("a", source.with_suffix(".there"))
print(peak() - before)
"""


@pytest.mark.starts_processes
def test_a_large_object_is_never_in_memory(double, tmp_path):
    source = tmp_path / "large"
    with open(source, "wb") as file:
        file.truncate(200 << 20)
    command = [sys.executable, "-c", MEMORY, str(source)]
    grown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 100 << 10  # KiB
    assert Path(f"{source}.there").stat().st_size == 200 << 20


@pytest.mark.starts_processes
def test_import_kinetic_loads_nothing_of_google():
    code = (
        "import sys, kinetic, kinetic._store.open; print([m for m in sys.modules if 'google' in m])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
