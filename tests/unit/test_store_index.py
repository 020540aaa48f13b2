"""Listing jobs from a folder, and from a remote store in which every call takes time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doubles.gcs import serving
from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._core.outcome import Exit, HostReport, judge
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic._store.many import put_many
from kinetic.cli.root import call
from kinetic.errors import CorruptRecord


def ref_of(number: int, store: Store) -> JobRef:
    return JobRef(
        f"job-{number:08x}",
        Place("local"),
        "cpu:1",
        "f",
        f"train.f{number}",
        1000.0 + number,
        store.uri,
        output_dir=f"{store.uri}/outputs/job-{number:08x}",
    )


def ended(number: int):
    report = HostReport(
        host=0, exit=Exit.RETURNED, started_at=1000.0 + number, result_digest="0" * 64
    )
    return judge(1, [report], now=2000.0 + number)


@pytest.fixture(params=["folder", "distant"])
def store(request, tmp_path) -> Store:
    return LocalStore(tmp_path) if request.param == "folder" else MemoryStore(delay_s=0.0001)


def ids(store: Store) -> list[str]:
    return [ref.job_id for ref in index.list_refs(store)]


def test_jobs_are_listed_newest_first_until_they_are_removed(store):
    refs = [ref_of(number, store) for number in range(5)]
    for ref in refs:
        index.add(store, ref)
    assert index.list_refs(store) == refs[::-1]
    assert index.list_ids(store) == [ref.job_id for ref in refs]
    index.remove(store, refs[2].job_id)
    assert ids(store) == [refs[n].job_id for n in (4, 3, 1, 0)]
    for ref in refs:
        index.remove(store, ref.job_id)
    assert list(store.list("")) == []


def test_references_of_some_jobs(store):
    refs = [ref_of(number, store) for number in range(3)]
    for ref in refs:
        index.add(store, ref)
    wanted = [refs[0].job_id, refs[2].job_id, "job-ffffffff"]
    assert index.read_refs(store, wanted) == {ref.job_id: ref for ref in (refs[0], refs[2])}


def test_a_thousand_jobs_that_ended_are_listed_in_three_calls(capsys, monkeypatch):
    store = MemoryStore()
    for number in range(999):
        ref = ref_of(number, store)
        index.add(store, ref)
        index.write_outcome(store, ref.job_id, ended(number))
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        monkeypatch.setenv("KINETIC_STORE", "gs://bucket")
        for key in store.list(""):
            double.buckets.insert("bucket", key, store.get(key), {}, {})
        assert call(["jobs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert "SUCCEEDED" in lines[1]
    assert "16m40s" in lines[1]
    assert double.calls().total() <= 3, double.calls()


def test_a_list_does_not_need_the_copies():
    """A list uses copies of the jobs' references. It is also right if copies are missing, damaged,
    outdated, or written by a newer version."""
    store = MemoryStore(delay_s=0.0001)
    refs = [ref_of(number, store) for number in range(6)]
    for ref in refs:
        index.add(store, ref)
    entry = {n: next(store.list(layout.JobKeys(refs[n].job_id).listing)) for n in range(6)}
    store.delete(entry[0])
    store.delete(entry[1])
    store.put(f"{layout.JobKeys(refs[1].job_id).listing}/ref-AAAA", b"")
    store.put(f"{layout.JobKeys(refs[2].job_id).listing}/ref-not/base64", b"")
    index.add(store, replace(refs[3], display_name="another"))
    store.delete(layout.JobKeys(refs[4].job_id).ref)
    listed = {ref.job_id: ref for ref in index.list_refs(store)}
    assert listed.keys() == {refs[n].job_id for n in (0, 1, 2, 3, 5)}
    assert listed[refs[3].job_id].display_name == "another"


def test_what_no_key_could_hold_is_read():
    store = MemoryStore(delay_s=0.0001)
    names = "".join(chr(0x4E00 + n * 7 % 9000) for n in range(1500))
    ref = replace(ref_of(1, store), display_name=names)
    index.add(store, ref)
    assert list(store.list(layout.LISTED)) == []
    assert index.list_refs(store) == [ref]


def test_a_copy_that_is_another_jobs_hides_no_job():
    store = MemoryStore(delay_s=0.0001)
    refs = [ref_of(number, store) for number in range(2)]
    for ref in refs:
        index.add(store, ref)
    one, other = (next(store.list(layout.JobKeys(ref.job_id).listing)) for ref in refs)
    store.delete(one)
    store.put(f"{layout.JobKeys(refs[0].job_id).listing}/{other.rpartition('/')[2]}", b"")
    assert index.list_refs(store) == refs[::-1]


def test_damaged_references_are_passed_over_with_a_warning(store, caplog):
    put_many(store, {layout.JobKeys("job-bad").ref: b"{", layout.JobKeys("job-worse").ref: b"[]"})
    index.add(store, ref_of(1, store))
    assert ids(store) == [ref_of(1, store).job_id]
    assert sorted(r.args[0] for r in caplog.records) == ["job-bad", "job-worse"]


def test_a_link_that_loops_hides_no_job(tmp_path):
    store = LocalStore(tmp_path)
    index.add(store, ref_of(1, store))
    for name in ("job-000000ff.json", "loop"):
        (tmp_path / layout.REFS / name).symlink_to(name)
    assert ids(store) == ["job-00000001"]
    assert [*store.list(layout.REFS)] == [layout.JobKeys("job-00000001").ref]
    with pytest.raises(CorruptRecord, match="it is not a file"):
        index.find(store, "job-000000ff")
