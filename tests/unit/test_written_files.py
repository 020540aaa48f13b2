"""Files that a function writes to its work folder are stored with the job and can be fetched."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import handle_cases
import pytest
from batch_cases import PATIENCE_S, begin
from batch_fakes import Scripted
from cli_fakes import World
from doubles.memory_store import MemoryStore
from laptop_fakes import put_outcome, put_success, ref

from kinetic._client.board import console
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._host.agent import workspace
from kinetic._store.local import LocalStore
from kinetic.errors import StoreFull

store, backend = handle_cases.store, handle_cases.backend
job, handle = handle_cases.job, handle_cases.handle


@pytest.fixture(autouse=True)
def nothing_was_printed(monkeypatch):
    monkeypatch.setattr(console, "_printed", set())


PREFIX = layout.HostKeys("job-00000001", 1, 0).files


@pytest.fixture(params=["folder", "objects"])
def kept_in(request, tmp_path):
    if request.param == "objects":
        return MemoryStore()
    store = LocalStore(tmp_path / "store")
    store.put(layout.JobKeys("job-00000001").plan, b"")
    return store


@pytest.fixture
def space(tmp_path):
    """A work folder with the two files that the caller sent."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    sent = {"train.py": 2, "sub/data": 3}
    for name, size in sent.items():
        (tree / name).write_text("x" * size)
        os.utime(tree / name, ns=(0, 0))
    return SimpleNamespace(tree=tree, cwd=tree, sent=sent, ready_ns=1)


def files_of(store, prefix=PREFIX):
    return {key.removeprefix(f"{prefix}/"): store.get(key) for key in store.list(prefix)}


def test_nothing_is_kept_or_asked_where_nothing_was_written(space):
    store, stamps = MemoryStore(), {}
    assert workspace.keep_written(space, store, PREFIX, stamps) == ""
    assert (stamps, sum(store.calls.values())) == ({}, 0)


def test_what_was_made_or_changed_is_kept_and_caches_are_not(space, kept_in):
    tree = space.tree
    (tree / "model.pkl").write_text("m" * 2000)
    (tree / "sub" / "data").write_text("abc")  # The size stays the same.
    (tree / "runs" / "1").mkdir(parents=True)
    (tree / "runs" / "1" / "events").write_text("e")
    for cache in ("__pycache__", ".venv", "tagged", "env"):
        (tree / cache).mkdir()
        (tree / cache / "cached").write_text("c")
    (tree / "tagged" / "CACHEDIR.TAG").write_text("")
    (tree / "env" / "pyvenv.cfg").write_text("")
    (tree / "link").symlink_to("model.pkl")
    os.mkfifo(tree / "pipe")
    stamps = {}
    words = workspace.keep_written(space, kept_in, PREFIX, stamps)
    assert words == "model.pkl, sub/data, runs/1/events (2 KiB)"
    assert files_of(kept_in) == {
        "model.pkl": b"m" * 2000, "runs/1/events": b"e", "sub/data": b"abc",
    }  # fmt: skip
    assert len(stamps) == 3


def test_folders_without_end_are_not_walked(space, kept_in):
    """A folder 150 levels deep is skipped: walking it recursively would end the host."""
    (space.tree / "made").write_text("x")
    below = space.tree.joinpath(*["d"] * 150)
    below.mkdir(parents=True)
    (below / "deep").write_text("x")
    assert workspace.keep_written(space, kept_in, PREFIX, {}) == "made (1 B)"


def test_names_are_those_that_the_function_used(space):
    space.cwd = space.tree / "sub"
    for name in ("sub/a", "a", "subs"):
        (space.tree / name).write_text("x")
    store = MemoryStore()
    assert workspace.keep_written(space, store, PREFIX, {}) == "a, project/a, project/subs (3 B)"
    assert set(files_of(store)) == {"a", "project/a", "project/subs"}


def test_what_exit_handlers_write_is_kept_too(space, kept_in):
    stamps = {}
    log = space.tree / "log"
    log.write_text("1")
    workspace.keep_written(space, kept_in, PREFIX, stamps)
    log.write_text("12")
    (space.tree / "summary").write_text("s")
    assert workspace.keep_written(space, kept_in, PREFIX, stamps) == "log, summary (3 B)"
    assert files_of(kept_in) == {"log": b"12", "summary": b"s"}


def test_a_file_is_sent_again_only_if_it_has_changed(space):
    store, stamps = MemoryStore(), {}
    (space.tree / "log").write_text("1")
    for _ in range(2):
        workspace.keep_written(space, store, PREFIX, stamps)
    assert sum(store.calls.values()) == 1


def test_beyond_the_bound_the_smallest_are_kept_and_the_others_named(space, kept_in, monkeypatch):
    monkeypatch.setattr(workspace, "KEPT_BYTES", 2048)
    for name, size in {"a": 1024, "b": 1024, "big\n": 4096}.items():
        (space.tree / name).write_text("x" * size)
    words = workspace.keep_written(space, kept_in, PREFIX, {})
    assert words == (
        "a, b (2 KiB). Not kept: 'big\\n' (4 KiB): a host keeps 2 KiB in 10,000 files. Write more "
        "below $KINETIC_OUTPUT_DIR."
    )
    assert set(files_of(kept_in)) == {"a", "b"}


def test_more_files_than_a_host_keeps_are_named(space, kept_in, monkeypatch):
    monkeypatch.setattr(workspace, "MOST_KEPT", 1)
    for name in "ab":
        (space.tree / name).write_text("x")
    assert "Not kept: b (1 B)" in workspace.keep_written(space, kept_in, PREFIX, {})


def test_a_name_that_no_store_takes_is_named(space, kept_in):
    for name in ("a\nb", "c"):
        (space.tree / name).write_text("x")
    words = workspace.keep_written(space, kept_in, PREFIX, {})
    assert words.startswith("c (1 B). Not kept: 'a\\nb' (1 B): ")
    assert set(files_of(kept_in)) == {"c"}


def test_a_store_that_takes_nothing_costs_no_job(space):
    class Full(MemoryStore):
        def put(self, *args, **more):
            raise StoreFull("No space is left.")

    (space.tree / "a").write_text("x")
    stamps = {}
    words = workspace.keep_written(space, Full(), PREFIX, stamps)
    assert (words, stamps) == ("Not kept: a (1 B): No space is left.", {})


def test_where_there_are_no_links_files_are_copied(space, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    store = LocalStore(tmp_path / "store")
    (space.tree / "a").write_text("x")
    monkeypatch.setattr(os, "link", refuse)
    assert workspace.keep_written(space, store, PREFIX, {}) == "a (1 B)"
    assert files_of(store) == {"a": b"x"}


# -- notices to the caller -------------------------------------------------------------------------

WROTE = HostReport(0, Exit.RETURNED, kept_files=2, written="model.pkl, log (3 KiB)")


def rewrite(store, job, report, host=0):
    """Put a host's report on written files into the job's verdict."""
    key = layout.JobKeys(job.job_id).outcome
    document = json.loads(store.get(key))
    document["reports"][host] |= {"kept_files": report.kept_files, "written": report.written}
    store.put(key, json.dumps(document).encode())


def say(job_id, what="kept 2 files of the work folder: model.pkl, log (3 KiB)"):
    return f"kinetic: {what}. Fetch with `kinetic jobs outputs {job_id} --to DIR`.\n"


def test_the_result_says_once_what_is_kept_and_where(store, job, handle, capsys):
    put_success(store, job, 1)
    rewrite(store, job, WROTE)
    assert [handle.result(), handle.result()] == [1, 1]
    assert capsys.readouterr().err == say(job.job_id)


def test_records_that_are_removed_are_not_said_to_be_kept(store, job, handle, capsys):
    put_success(store, job, 1)
    rewrite(store, job, WROTE)
    assert handle.result(cleanup=True) == 1
    assert capsys.readouterr().err == ""


def test_a_job_that_failed_says_it_as_well(store, job, handle, capsys):
    put_outcome(store, job, replace(WROTE, exit=Exit.OS_EXIT))
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it raises
        handle.result()
    assert say(job.job_id) in capsys.readouterr().err


def test_a_batch_counts_the_files_of_all_inputs(tmp_path, capsys):
    class Writing(Scripted):
        def _end(self, act, job, index):
            super()._end(act, job, index)
            rewrite(self.store, job, replace(WROTE, kept_files=1))

    batch = begin(Writing(LocalStore(tmp_path)), 3)
    batch.results(timeout=PATIENCE_S, progress=False)
    what = "kept 3 files of 3 work folders; in the first: model.pkl, log (3 KiB)"
    assert capsys.readouterr().err == say(batch.group_id, what)


# -- kinetic jobs outputs --------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    """Create a job of two hosts that wrote output files in both of its attempts."""
    world = World(tmp_path / "store")
    world.job("job-00000001", hosts=2)
    world.succeed("job-00000001")
    put = world.store.put
    put(layout.AttemptKeys("job-00000001", 1).outcome, b"{}")
    for attempt, host, name in ((1, 0, "log"), (2, 0, "runs/model.pkl"), (2, 1, "log")):
        put(f"{layout.HostKeys('job-00000001', attempt, host).files}/{name}", b"x" * 1500)
    put(f"{layout.JobKeys('job-00000001').outputs}/report.txt", b"report")
    return world


NAMES = ["attempt-1/log", "runs/model.pkl", "host-1/log", "output-dir/report.txt"]


def test_outputs_are_listed(world, capfd):
    assert world("jobs", "outputs", "job-0") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["FILE", *NAMES]
    assert lines[1].split()[1:] == ["1.5", "KiB"]
    assert world("jobs", "outputs", "--json", "job-0") == 0
    assert json.loads(capfd.readouterr().out) == dict.fromkeys(NAMES, 1500) | {NAMES[3]: 6}


def test_a_job_that_has_left_no_files_says_so(world, tmp_path, capfd):
    world.job("job-00000002")
    assert world("jobs", "outputs", "job-00000002") == 0
    out, err = capfd.readouterr()
    assert (out, "job-00000002 has no output files yet" in err) == ("", True)
    world.succeed("job-00000002")
    for options in ((), ("--to", str(tmp_path / "here"))):
        assert world("jobs", "outputs", "job-00000002", *options) == 0
        assert capfd.readouterr() == ("", "job-00000002 has no output files.\n")
    assert world("jobs", "outputs", "--json", "job-00000002") == 0
    assert capfd.readouterr() == ("{}\n", "")


def test_outputs_are_fetched_and_overwrite_nothing(world, tmp_path, capfd):
    place = tmp_path / "here"
    assert world("jobs", "outputs", "job-0", "--to", str(place)) == 0
    assert capfd.readouterr().out == f"Fetched 4 files (4.4 KiB) into {place}.\n"
    names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert names == set(NAMES)
    assert (place / "output-dir/report.txt").read_bytes() == b"report"
    (place / NAMES[1]).write_text("mine")
    assert world("jobs", "outputs", "job-0", "--to", str(place)) == 2
    assert "exists, so nothing was fetched" in capfd.readouterr().err
    assert (place / NAMES[1]).read_text() == "mine"


def test_outputs_of_a_batch_are_below_the_numbers_of_its_inputs(world, capfd):
    for index in (0, 1):
        member = ref(f"job-b000000{index}", hosts=1, store_uri=world.store.uri)
        member = replace(
            member, group_id="grp-0000000b", group_index=index, output_dir="gs://bucket/out"
        )
        world.store.put(layout.JobKeys(member.job_id).ref, json.dumps(member.to_json()).encode())
        world.store.put(f"{layout.HostKeys(member.job_id, 1, 0).files}/a", b"x")
    assert world("jobs", "outputs", "--json", "grp-0000000b") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"0/a": 1, "1/a": 1}
    assert "job-b0000001 wrote to $KINETIC_OUTPUT_DIR are in gs://bucket/out;" in err


def test_the_status_names_them(world, capfd):
    rewrite(world.store, ref("job-00000001"), WROTE)
    world("jobs", "status", "job-0")
    assert "Files:        kept 2 files of the work folder" in capfd.readouterr().out
