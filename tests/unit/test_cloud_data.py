"""Data in a bucket, fetched on a host: folders, single objects, and their faults."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("google.cloud.storage")

from doubles.gcs import serving

from kinetic._datasets import cloud
from kinetic._store.gcs import GcsStore
from kinetic.errors import NotFound, StoreError, UsageError


@pytest.fixture
def double(monkeypatch):
    with serving("bucket") as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.uri)
        yield running


@pytest.fixture
def images(double):
    store = GcsStore("gs://bucket")
    for name in ("a.png", "b/c.png", "b/d/e.png"):
        store.put(f"images/{name}", name.encode())
    store.put("imagesx", b"")
    double.buckets.insert("bucket", "images/empty/", b"", {}, {})
    return store


def read_files(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


CONTENT = {"a.png": "a.png", "b/c.png": "b/c.png", "b/d/e.png": "b/d/e.png"}


def test_a_folder_is_downloaded_read_only_and_once(images, double, tmp_path):
    place = cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    assert read_files(place) == CONTENT
    assert (place / "empty").is_dir()
    assert (place / "a.png").stat().st_mode & 0o777 == 0o444
    double.forget_requests()
    assert cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path) == place
    assert double.calls() == {"list": 1}


def test_what_has_changed_is_fetched_anew(images, tmp_path):
    before = cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    images.put("images/a.png", b"new")
    after = cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    assert read_files(after) == CONTENT | {"a.png": "new"}
    assert read_files(before) == CONTENT  # Running jobs still use the earlier copy.


def test_a_single_object_is_a_file(images, tmp_path):
    place = cloud.provide("gs://bucket/images/b/c.png", is_dir=False, root=tmp_path)
    assert read_files(place) == {"c.png": "b/c.png"}


@pytest.mark.parametrize(
    ("source", "is_dir", "message"),
    [
        ("gs://bucket/none", False, "the object gs://bucket/none does not exist"),
        ("gs://bucket/none/", True, "nothing below gs://bucket/none/"),
        ("gs://bucket/images", False, "is a folder, not an object. Write gs://bucket/images/"),
        ("gs://bucket/a.png/", True, "nothing below"),
    ],
)
def test_what_is_not_there_is_named(images, tmp_path, source, is_dir, message):
    with pytest.raises(NotFound, match=message):
        cloud.provide(source, is_dir=is_dir, root=tmp_path)
    with pytest.raises(UsageError, match=message):
        cloud.check(source, is_dir=is_dir)
    assert os.listdir(tmp_path) == []


def test_the_check_before_a_job_refuses_only_what_is_surely_missing(images, double, monkeypatch):
    cloud.check("gs://bucket/images/", is_dir=True)
    cloud.check("gs://bucket/images/a.png", is_dir=False)
    cloud.check("gs://bucket/runs/", is_dir=True, may_be_empty=True)
    with pytest.raises(UsageError, match="no bucket 'none'"):
        cloud.check("gs://none/runs/", is_dir=True, may_be_empty=True)
    with pytest.raises(UsageError, match="no bucket 'none'"):
        cloud.check("gs://none/x", is_dir=False)
    double.denied |= {"storage.objects.get", "storage.objects.list"}
    cloud.check("gs://bucket/none", is_dir=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    cloud.check("gs://bucket/none", is_dir=False, patience_s=0.1)


def test_a_fetch_that_was_interrupted_goes_on(images, double, tmp_path):
    double.fail("media", times=99, status=403, only="images/b/d/e.png")
    with pytest.raises(StoreError):
        cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    double.heal()
    double.forget_requests()
    place = cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    assert read_files(place) == CONTENT
    assert [r.name for r in double.requests if r.call == "media"] == ["images/b/d/e.png"]


@pytest.mark.parametrize("name", ["images/../up", "images//x", "images/a.png/below"])
def test_names_that_no_file_can_have_are_refused(images, double, tmp_path, name):
    double.buckets.insert("bucket", name, b"", {}, {})
    with pytest.raises(StoreError, match="Rename"):
        cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)
    assert not list(tmp_path.rglob("up"))


def test_an_object_that_is_replaced_is_listed_again(images, double, tmp_path):
    double.fail("media", status=404, only="images/a.png")
    assert read_files(cloud.provide("gs://bucket/images/", is_dir=True, root=tmp_path)) == CONTENT
    assert double.calls()["list"] == 2
