"""Agreements between hosts (threads here): when to save, whose error is raised, who owns a folder;
also iterator positions, cadences and sizes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from doubles.checkpoint_fakes import PATIENCE_S, Crowd, on_all
from doubles.memory_store import MemoryStore

from kinetic._core import checkpoint_size
from kinetic._in_job.checkpoint import opening, persistent, positions
from kinetic._in_job.checkpoint.arguments import check_cadence
from kinetic._in_job.checkpoint.sync_points import SyncPoints, SyncRequest
from kinetic._in_job.peers import Alone
from kinetic._store import lease
from kinetic._store.lease import InFolder, InStore, Lease, Owner
from kinetic.errors import (
    CheckpointError,
    CheckpointInUse,
    CheckpointMismatch,
    StoreError,
    UsageError,
)

# -- sync points ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_all_hosts_leave_at_the_same_call(seed):
    luck = random.Random(seed)
    taken_away = threading.Event()
    steps = 400
    when, who = luck.randrange(50), luck.randrange(3)
    why = luck.choice([SyncRequest.PREEMPTED, SyncRequest.REFORM])
    step_of = threading.Barrier(3)

    def train(host):
        sync_points = SyncPoints(
            host, lambda: why if host.index == who and taken_away.is_set() else None
        )
        try:
            for step in range(steps):
                if host.index == who and step == when:
                    taken_away.set()
                if (request := sync_points.call()) is not None:
                    return step, request
                step_of.wait(PATIENCE_S)  # Hosts wait for each other, as in a collective.
                time.sleep(0.001)
            return None
        finally:
            sync_points.close()

    first, *others = on_all(Crowd(3).hosts(), train)
    assert first is not None
    assert first[0] > when
    assert first[1] is why
    assert all(each == first for each in others)


def test_a_process_that_is_alone_leaves_at_once():
    sync_points = SyncPoints(Alone(), lambda: SyncRequest.PREEMPTED)
    assert sync_points.call() is SyncRequest.PREEMPTED
    assert sync_points.call() is None, "once"
    sync_points.close()


def test_the_leader_wishes_when_the_time_has_come():
    now = [0.0]

    def train(host):
        sync_points = SyncPoints(host, lambda: None, 100.0, clock=lambda: now[0])
        try:
            wishes = []
            for step in range(2000):
                if host.index == 0 and step == 10:
                    now[0] = 101.0
                if (request := sync_points.call()) is not None:
                    wishes.append((step, request))
                    sync_points.note_save()
                    return wishes
                step_of.wait(PATIENCE_S)
                time.sleep(0.001)
            return wishes
        finally:
            sync_points.close()

    # The leader's thread would check the fake clock only after a long wait: shorten the wait.
    step_of = threading.Barrier(2)
    patience = SyncPoints._patience_s
    try:
        SyncPoints._patience_s = lambda self: 0.01
        one, other = on_all(Crowd(2).hosts(), train)
    finally:
        SyncPoints._patience_s = patience
    assert one == other
    assert len(one) == 1
    assert one[0][1] is SyncRequest.TIME


def test_a_host_that_is_gone_does_not_hold_the_others_forever(monkeypatch):
    from kinetic._in_job.checkpoint import sync_points as module

    monkeypatch.setattr(module, "_LIMIT_S", 0.05)
    host = Crowd(2).hosts()[0]  # Host 1 never calls.
    sync_points = SyncPoints(host, lambda: SyncRequest.PREEMPTED)
    for _ in range(20):
        assert sync_points.call() is None
        time.sleep(0.01)
    sync_points.close()


# -- errors on all hosts ---------------------------------------------------------------------------


def test_the_error_of_one_host_is_raised_on_all():
    def act(host):
        def fail():
            if host.index == 1:
                raise CheckpointInUse("taken", job_id="job-1")
            return "fine"

        return opening.agree(host, "act", fail)

    zero, one, two = on_all(Crowd(3).hosts(), act)
    assert type(zero) is type(one) is type(two) is CheckpointInUse
    assert (str(zero), str(one)) == ("Host 1: taken", "taken")
    assert zero.job_id == one.job_id == two.job_id == "job-1"
    assert on_all(Crowd(2).hosts(), lambda h: opening.agree(h, "x", lambda: str(h.index))) == [
        ["0", "1"],
        ["0", "1"],
    ]


# -- the owner of a folder -------------------------------------------------------------------------


def owner(job="job-1", token="a"):
    return Owner(job, token, 1, "machine")


def no_sleep(_):
    pass


def held(folder, job="job-1", token="a", sleep=no_sleep):
    return Lease(InFolder(folder), str(folder), owner(job, token), sleep)


def test_two_jobs_do_not_write_one_folder(tmp_path):
    first = held(tmp_path)
    assert first.acquire() is None
    assert (InFolder(tmp_path).is_held(), InFolder(tmp_path).read()[0]) == (True, owner())
    with pytest.raises(CheckpointInUse, match="written by job-1") as caught:
        held(tmp_path, "job-2", "b").acquire()
    assert caught.value.job_id == "job-1"
    first.check()
    first.release()
    first.release()
    assert not InFolder(tmp_path).is_held()
    second = held(tmp_path, "job-2", "b")
    assert second.acquire() is None, "the first one has said that it ended"
    second.release()


LOCKS = """
import sys, time
from pathlib import Path
from kinetic._store.lease import InFolder, Lease, Owner
Lease(InFolder(Path(sys.argv[1])), "x", Owner("job-1", "a", 1, "m")).acquire()
print("held", flush=True)
time.sleep(1000)
"""


@pytest.mark.starts_processes
def test_another_process_keeps_us_out_until_it_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointInUse, match="job-1"):
            held(tmp_path, "job-2", "b").acquire()
        assert InFolder(tmp_path).is_held()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert not InFolder(tmp_path).is_held()
    own_lease = held(tmp_path, "job-2", "b")
    assert own_lease.acquire().job_id == "job-1", "it had not said that it ended"
    own_lease.release()


@pytest.mark.parametrize("another", [False, True])
def test_a_folder_that_was_removed_is_not_written_any_more(tmp_path, another):
    folder = tmp_path / "run"
    first = held(folder)
    first.acquire()
    first.check()
    shutil.rmtree(folder)
    if another:  # Another process has recreated the folder.
        folder.mkdir()
        (folder / lease.RECORD).write_text("")
    with pytest.raises(CheckpointError, match="was removed"):
        first.check()
    first.release()


def in_store(store, job, token, sleep=no_sleep):
    return Lease(InStore(store), "memory://x", owner(job, token), sleep)


def test_a_record_that_is_renewed_is_never_empty(tmp_path, monkeypatch):
    """The owner's record is never empty during a rewrite: another machine that read an empty record
    would take over the folder."""
    contents, ftruncate = [], os.ftruncate

    def note_and_truncate(fd, length):
        contents.append((tmp_path / lease.RECORD).read_bytes())
        ftruncate(fd, length)
        contents.append((tmp_path / lease.RECORD).read_bytes())

    place = InFolder(tmp_path)
    assert place.take()
    place.replace(None, owner())
    with monkeypatch.context() as patched:
        patched.setattr(lease.os, "ftruncate", note_and_truncate)
        for beat in range(8, 12):
            assert place.renew(owner(), Owner("job-1", "a", 1, "machine", beat))
    place.free(remove=True)
    assert [json.loads(each)["beat"] for each in contents] == [8, 8, 9, 9, 10, 10, 11, 11]


def test_a_bucket_has_one_owner_until_that_is_silent():
    store = MemoryStore(f"lease-{os.urandom(4).hex()}")
    first = in_store(store, "job-1", "a")
    first.acquire()

    beats = itertools.count(1)

    def it_lives(_):
        assert not first._beat(next(beats))

    with pytest.raises(CheckpointInUse):
        in_store(store, "job-2", "b", it_lives).acquire()
    second = in_store(store, "job-2", "b")
    assert second.acquire().job_id == "job-1"
    third = in_store(store, "job-2", "c")
    assert third.acquire().token == "b", "the same job does not wait for itself"
    second.release()
    assert InStore(store).read()[0].token == "c", "it was not its own any more"
    third.release()
    assert InStore(store).read()[0] is None


def test_an_owner_that_has_released_writes_nothing_over_the_next_one():
    """A released lease writes no more, even if its thread was about to write a heartbeat."""
    renews, goes_on = threading.Event(), threading.Event()

    class Slow(InStore):
        def renew(self, before, owner):
            renews.set()
            goes_on.wait(PATIENCE_S)
            return super().renew(before, owner)

    store = MemoryStore()
    first = Lease(Slow(store), "memory://x", owner("job-1", "a"))
    first.acquire()
    beat = threading.Thread(target=first._beat, args=(1,))
    beat.start()
    renews.wait(PATIENCE_S)
    threading.Timer(0.2, goes_on.set).start()
    first.release()
    second = in_store(store, "job-1", "b")
    second.acquire()
    beat.join(PATIENCE_S)
    assert InStore(store).read()[0].token == "b"
    assert first._beat(2), "it is over"
    second.release()


@pytest.mark.parametrize("ends", ["takes over", "releases"])
def test_an_owner_that_is_suspended_in_a_beat_writes_nothing_over_the_next_one(ends):
    """Regression: an owner was suspended after reading its record; when it continued, it wrote its
    heartbeat over the record of the next owner."""
    store, second = MemoryStore(), []

    class Suspended(InStore):
        def renew(self, before, owner):
            if not second:
                second.append(in_store(store, "job-1", "b"))
                second[0].acquire()
                if ends == "releases":
                    second[0].release()
            return super().renew(before, owner)

    first = Lease(Suspended(store), "memory://x", owner("job-1", "a"))
    first.acquire()
    assert first._beat(1), "it is told that it was taken over"
    now = InStore(store).read()[0]
    assert (now.token if now else "") == ("b" if ends == "takes over" else "")
    with pytest.raises(CheckpointInUse, match="taken over by"):
        first.check()


def test_a_beat_whose_answer_was_lost_is_no_takeover():
    class Forgetful(InStore):
        def renew(self, before, owner):
            super().renew(before, owner)
            raise StoreError("The bucket does not answer.")

    store = MemoryStore()
    held = Lease(Forgetful(store), "memory://x", owner("job-1", "a"))
    held.acquire()
    with pytest.raises(StoreError):
        held._beat(1)
    held._record = InStore(store)
    for number in (2, 3):
        assert not held._beat(number)
    assert InStore(store).read()[0].beat == 3
    held.release()


def test_an_owner_counts_on_after_a_moment_without_its_bucket():
    beats = []

    def beat(number):
        beats.append(number)
        if number == 1:
            raise StoreError("The bucket does not answer.")
        return number == 3

    lease.count_up(beat, threading.Event(), 0.0)
    assert beats == [1, 2, 3], "and no more, once somebody else has it"


def test_a_lease_that_was_taken_over_says_so_at_the_next_beat():
    store = MemoryStore()
    first, second = in_store(store, "job-1", "a"), in_store(store, "job-1", "b")
    first.acquire()
    assert not first._beat(1)
    second.acquire()
    assert first._beat(2)
    with pytest.raises(CheckpointInUse, match="taken over by job-1"):
        first.check()
    second.release()


def test_one_of_many_gets_a_bucket():
    store = MemoryStore(f"lease-{os.urandom(4).hex()}")
    place, beats = InStore(store), itertools.count(1)

    def it_lives(_):
        now = place.read()[0]
        place.renew(now, replace(now, beat=next(beats)))

    def acquire(host):
        return in_store(store, f"job-{host.index}", str(host.index), it_lives).acquire()

    outcomes = on_all(Crowd(8).hosts(), acquire)
    assert sum(each is None for each in outcomes) == 1
    assert all(each is None or isinstance(each, CheckpointInUse) for each in outcomes)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        held(tmp_path / "file").acquire()


# -- positions of iterators ------------------------------------------------------------------------


class Iterator:
    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def equal(a, b):
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize(
    "state",
    [
        {"next_index": 7, "exhausted": False, "inner": {"a": [1, 2.5, None]}},
        b"\x00\xff bytes",
        (1, (2, b"x")),
        {"rng": np.arange(4, dtype=np.uint64), "n": np.int64(3)},
    ],
)
def test_a_position_comes_back(state):
    import json

    saved = json.loads(json.dumps(positions.take_position(Iterator(state))))
    back = Iterator()
    positions.put_back(back, [saved], 0, 1)
    assert equal(back.state, state)


def test_positions_belong_to_hosts():
    saved = [positions.take_position(Iterator(n)) for n in range(2)]
    back = Iterator()
    positions.put_back(back, saved, 1, 2)
    assert back.state == 1
    with pytest.raises(CheckpointMismatch, match="2 hosts' iterators, which differ"):
        positions.put_back(back, saved, 0, 3)
    positions.put_back(back, [5, 5], 2, 3)
    assert back.state == 5
    with pytest.raises(CheckpointMismatch, match="without data="):
        positions.put_back(back, [], 0, 1)


@pytest.mark.parametrize("bad", [object(), [1], Iterator(object()), Iterator({1: 2})])
def test_what_has_no_position_is_refused(bad):
    with pytest.raises(UsageError, match=r"data=|get_state\(\)"):
        positions.take_position(bad)


# -- the steps that are saved ----------------------------------------------------------------------


def test_when_steps_are_saved():
    cadence = check_cadence(100, "10m", 10)
    assert [s for s in range(0, 250, 5) if cadence.is_persistent(s, is_requested=False)] == [
        0,
        100,
        200,
    ]
    assert cadence.is_persistent(7, is_requested=True)
    assert [s for s in range(25) if cadence.is_local(s)] == [0, 10, 20]
    assert cadence.every_s == 600.0
    by_time = check_cadence("90s", None, None)
    assert (by_time.every, by_time.every_s) == (None, 90.0)
    assert not by_time.is_local(0)


@pytest.mark.parametrize(
    "bad", [(0, None, 1), (1, "x", 1), (1, None, -1), (1.5, None, 1), (True, None, 1)]
)
def test_what_cannot_be_a_cadence(bad):
    with pytest.raises(UsageError):
        check_cadence(*bad)


# -- sizes -----------------------------------------------------------------------------------------


def test_the_size_of_the_seventy_billion():
    size = checkpoint_size.Size(70e9, 32)
    assert size.checkpoint_bytes == 840e9
    assert size.part_bytes == 26.25e9
    assert checkpoint_size.in_gigabytes(size.host_bytes) == "60.375 GB"
    assert 60.3e9 < size.host_bytes < 60.4e9


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (52.5e9, "52.5 GB")]
)
def test_sizes_are_text(size, words):
    assert checkpoint_size.in_gigabytes(size) == words


def test_what_orbax_lacks_for_a_bucket_is_named():
    missing = ImportError("Please install gcsfs to access Google Storage")
    with (
        pytest.raises(CheckpointError, match="add it to the project's dependencies"),
        persistent.explain_errors("opened", "gs://bucket/run"),
    ):
        raise missing
