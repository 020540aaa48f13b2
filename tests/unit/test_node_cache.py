"""Data on a node whose pods share a folder: the second job fetches nothing, what runs is kept.

In: programs that prepare the data of a job as the agent of a pod does. Out: where it lies, and what
was asked of the bucket.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.storage")

from doubles.gcs import serving

from kinetic._source import bundle
from kinetic._source.upload import upload
from kinetic._store.gcs import GcsStore

POD = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from kinetic._core.plan import Blob, Dataset, Tree
from kinetic._host.agent import datasets
from kinetic._host.identity import Identity
from kinetic._store.gcs import GcsStore

given = json.loads(sys.argv[1])
who = Identity("", "job-1", 0, 1, "", "", "", given["scratch"], cache=given["cache"], is_pod=True)
tree = given["tree"] and Tree(Blob(*given["tree"][0]), *given["tree"][1:])
data = Dataset(given["source"], True, tree or None)
plan = SimpleNamespace(data=(data,), cluster_mounts=dict)
store = GcsStore("gs://bucket/store")
print(*datasets.prepare(who, plan, store, Path(given["scratch"])).places, flush=True)
sys.stdin.read()
"""
SWEEP = "from kinetic._host import bootstrap; print(bootstrap.sweep(0))"


@pytest.fixture
def double(monkeypatch):
    with serving("bucket") as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.uri)
        for name in ("a", "b/c"):
            running.buckets.insert("bucket", f"images/{name}", name.encode(), {}, {})
        yield running


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("KINETIC_POD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def pod(tmp_path, number, cache, source="gs://bucket/images/", tree=()) -> Iterator[Path]:
    """A job on the node, while the `with` block runs: where its data lies."""
    scratch = tmp_path / f"scratch-{number}"
    scratch.mkdir()
    given = {"scratch": str(scratch), "cache": str(cache), "source": source, "tree": tree}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", POD, json.dumps(given)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        yield Path(program.stdout.readline().strip())
        program.stdin.close()
    assert program.returncode == 0


def swept() -> bool:
    done = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


def test_the_second_job_of_a_node_fetches_nothing(tmp_path, double, cache):
    with pod(tmp_path, 1, cache) as first:
        assert sorted(os.listdir(first)) == ["a", "b"]
    double.forget_requests()
    with pod(tmp_path, 2, cache) as second:
        assert second == first
    assert double.calls() == {"list": 1}


def test_what_has_changed_is_fetched_although_the_old_is_in_use(tmp_path, double, cache):
    with pod(tmp_path, 1, cache) as first:
        double.buckets.insert("bucket", "images/a", b"new", {}, {})
        with pod(tmp_path, 2, cache) as second:
            assert (first / "a").read_text() == "a"
            assert (second / "a").read_text() == "new"


def test_what_a_job_uses_is_not_swept(tmp_path, double, cache):
    with pod(tmp_path, 1, cache) as place:
        assert not swept()
        assert (place / "a").read_text() == "a"
    assert swept()
    assert not list(cache.glob("data-*"))


def test_data_that_was_sent_is_unpacked_once(tmp_path, double, cache):
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent/file").write_text("content")
    made = bundle.build_data(tmp_path / "sent", cache_dir=tmp_path / "notes")
    upload(made, GcsStore("gs://bucket/store"))
    blob = (made.tree.manifest.digest, made.tree.manifest.size_bytes)
    tree = (blob, made.tree.files, made.tree.size_bytes)
    source = str(tmp_path / "sent")
    for number, calls in ((1, 2), (2, 0)):
        double.forget_requests()
        with pod(tmp_path, number, cache, source, tree) as place:
            assert (place / "file").read_text() == "content"
        assert double.calls().total() == calls


@pytest.mark.parametrize("cache", ["", "/proc/nothing"])
def test_a_pod_without_a_folder_of_the_node_has_its_own(tmp_path, double, cache):
    with pod(tmp_path, 1, cache) as place:
        assert place.is_relative_to(tmp_path / "scratch-1")
        assert (place / "a").read_text() == "a"
