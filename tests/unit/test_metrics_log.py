"""`kinetic.log`, from the call to the rows in the file."""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kinetic
from kinetic._core.metrics import NO_STEP, VARIABLE, FigureCadence, RowDecoder
from kinetic._host.worker import metric_sender
from kinetic._host.worker.metric_sender import MetricRow, Sender, StepTimes
from kinetic._in_job import metrics
from kinetic.errors import UsageError, UsageTypeError

Row = tuple[int, dict[str, float]]


class Logged:
    """The file of a host's metrics, and its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: list[float] = []

    def rows(self, *, returned: bool = True) -> list[Row]:
        """End the function, and return its rows without the rows of `step_time_s`."""
        return [row for row in self.all_rows(returned=returned) if "step_time_s" not in row[1]]

    def all_rows(self, *, returned: bool = True) -> list[Row]:
        metrics._finish(returned)
        rows = []
        for part in RowDecoder().feed(self.path.read_bytes() if self.path.exists() else b""):
            self.times += part.times
            for index, step in enumerate(part.steps):
                columns = zip(part.names, part.values, strict=True)
                rows.append((step, {name: column[index] for name, column in columns}))
        return rows


@pytest.fixture
def logged(tmp_path, monkeypatch) -> Iterator[Logged]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "metrics"))
    own = os.getpid()  # kinetic logs only in a worker, which leads its process group.
    monkeypatch.setattr(os, "getpgid", lambda _: own)
    metrics._forget_in_fork()
    yield Logged(tmp_path / "metrics")
    metrics._forget_in_fork()


# -- values that kinetic.log accepts ---------------------------------------------------------------


def test_numbers_of_all_kinds_are_kept(logged):
    np = pytest.importorskip("numpy")
    kinetic.log(step=0, a=1, b=2.5, c=True, d=Fraction(1, 4))
    kinetic.log(
        step=np.int64(1), a=np.float32(0.5), b=np.array([3.0]), c=np.array(4), d=np.bool_(1)
    )
    kinetic.log(step=2, a=math.nan, b=math.inf, c=-math.inf, d=10**400)
    one, two, (step, odd) = logged.rows()
    assert one == (0, {"a": 1, "b": 2.5, "c": 1, "d": 0.25})
    assert two == (1, {"a": 0.5, "b": 3, "c": 4, "d": 1})
    assert (step, odd["b"], odd["c"], odd["d"]) == (2, math.inf, -math.inf, math.inf)
    assert math.isnan(odd["a"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.5", r"loss=….: a str \('0.5'\) is not a number. Log numbers, print text"),
        (b"1", "is not a number"),
        (None, "a NoneType .None. is not a real number"),
        ([1.0, 2.0], "under a name of its own"),
        ({"a": 1}, "under a name of its own"),
        (1j, r"a complex \(1j\) is not a real number. Log an int, a float"),
    ],
)
def test_what_is_no_number_is_refused_with_what_to_do(logged, value, words):
    with pytest.raises(UsageTypeError, match=words):
        kinetic.log(step=0, loss=value)
    assert logged.rows() == []


def test_a_dict_by_position_is_refused_with_the_way_to_write_it(logged):
    with pytest.raises(
        UsageTypeError, match=r"by name; got a dict .*step=step, loss=loss\)"
    ) as caught:
        kinetic.log({"loss": 1.0}, step=1)
    assert caught.traceback[-1].path == Path(__file__)
    assert logged.rows() == []


def test_arrays_of_several_elements_are_refused(logged):
    np = pytest.importorskip("numpy")
    with pytest.raises(UsageTypeError, match=r"shape \(8,\) is not a single number. Log its mean"):
        kinetic.log(step=0, loss=np.zeros(8))
    with pytest.raises(UsageTypeError, match=r"shape \(0,\)"):
        kinetic.log(step=0, loss=np.zeros(0))
    with pytest.raises(UsageTypeError, match="is not a real number"):
        kinetic.log(step=0, loss=np.complex64(1))
    with pytest.raises(UsageTypeError, match="is not a real number"):
        kinetic.log(step=0, loss=np.array("1.5"))


@pytest.mark.parametrize("step", [1.0, "1", None, True, [1]])
def test_a_step_is_an_int(logged, step):
    with pytest.raises(UsageTypeError, match="step= must be an int; got a"):
        kinetic.log(step=step, loss=1.0)


@pytest.mark.parametrize("step", [-1, 1 << 63, 10**30])
def test_a_step_is_a_number_that_can_be_kept(logged, step):
    with pytest.raises(UsageError, match="step= must be from 0 to 9223372036854775807"):
        kinetic.log(step=step, loss=1.0)


@pytest.mark.parametrize("name", ["", " loss", "a\nb", "a\x1b[31m", "x" * 201, "é" * 101])
def test_names_are_printable_and_short(logged, name):
    with pytest.raises(UsageError, match=r"printable characters|at most 200 bytes"):
        kinetic.log(step=0, **{name: 1.0})


def test_an_error_points_at_the_users_line(logged):
    with pytest.raises(UsageTypeError) as caught:
        kinetic.log(step=0, loss="x")
    assert caught.traceback[-1].path == Path(__file__)


def test_names_without_end_are_dropped_and_the_others_kept(logged, capfd):
    many = {f"n{number}": float(number) for number in range(metrics.MOST_NAMES - 1)}
    kinetic.log(step=0, loss=1.0, **many)
    for step in range(1, 4):
        kinetic.log(step=step, **{f"loss_{step}": 1.0}, loss=2.0)
    by_step: dict[int, dict[str, float]] = {}
    for step, values in logged.rows():
        by_step.setdefault(step, {}).update(values)
    assert by_step == {0: {"loss": 1.0, **many}, **{step: {"loss": 2.0} for step in (1, 2, 3)}}
    assert capfd.readouterr().err.count("more than 10000 names of metrics are in use") == 1


def test_outside_of_a_job_it_says_so_once_and_checks_all_the_same(monkeypatch, capfd):
    monkeypatch.delenv(VARIABLE, raising=False)
    metrics._forget_in_fork()
    for step in range(3):
        kinetic.log(step=step, loss=1.0)
    assert capfd.readouterr().err.count("not part of a job, so nothing is recorded") == 1
    with pytest.raises(UsageTypeError):
        kinetic.log(step=0, loss="x")
    metrics._forget_in_fork()


# -- arrays of JAX ---------------------------------------------------------------------------------


class Array:
    """A stand-in for a JAX array whose value may not be computed yet."""

    def __init__(self, value: Any, *, ready: bool = True) -> None:
        self.value, self.ready = value, ready
        self.size, self.shape, self.dtype = 1, (), SimpleNamespace(kind="i")

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        if isinstance(self.value, Exception):
            raise self.value
        return self.ready

    def item(self) -> Any:
        assert self.ready, "it was waited for"
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.fixture
def arrays(monkeypatch) -> None:
    monkeypatch.setattr(metrics, "_is_array_of_jax", lambda value: isinstance(value, Array))
    monkeypatch.setattr(metrics, "_refuse_traced", lambda *_: None)
    monkeypatch.setattr(metrics, "_CONVERTERS", dict(metrics._CONVERTERS))


def test_values_that_are_not_computed_yet_are_not_waited_for(logged, arrays):
    late = Array(0.25, ready=False)
    kinetic.log(step=0, loss=late)
    kinetic.log(step=Array(1), loss=0.125)
    threading.Timer(0.5, lambda: setattr(late, "ready", True)).start()
    assert logged.rows() == [(0, {"loss": 0.25}), (1, {"loss": 0.125})]


def test_values_that_never_come_are_dropped_when_the_function_has_failed(logged, arrays, capfd):
    kinetic.log(step=0, loss=1.0)
    kinetic.log(step=1, loss=Array(0.5, ready=False))
    assert logged.rows(returned=False) == [(0, {"loss": 1.0})]
    assert "the values of the last call are lost" in capfd.readouterr().err


def test_a_value_that_cannot_be_fetched_costs_only_itself(logged, arrays, capfd):
    deleted = Array(RuntimeError("Array has been deleted with shape=float32[]."))
    for step in range(3):
        kinetic.log(step=step, loss=deleted, rate=0.5)
    kinetic.log(step=3, loss=Array(2.0), rate=0.5)
    assert logged.rows() == [
        *((step, {"rate": 0.5}) for step in range(3)),
        (3, {"loss": 2.0, "rate": 0.5}),
    ]
    assert capfd.readouterr().err.count("Log a value that is not donated") == 1


# -- the thread that writes rows -------------------------------------------------------------------


def test_a_function_that_logs_faster_than_rows_are_sent_is_held_back_and_loses_nothing(logged):
    steps = 2 * metric_sender.MOST_ROWS + 1
    for step in range(steps):
        kinetic.log(step=step, loss=1.0)
    assert [step for step, _ in logged.rows()] == list(range(steps))


def test_rows_are_dropped_while_the_disk_takes_none_and_the_function_goes_on(
    logged, monkeypatch, capfd
):
    monkeypatch.setattr(metric_sender, "MOST_ROWS", 100)
    monkeypatch.setattr(metric_sender, "HOLD_S", 0.01)
    waits = []
    is_stuck = threading.Event()
    is_stuck.set()
    send = Sender._send

    def send_later(self: Sender) -> None:
        while is_stuck.is_set():
            time.sleep(0.001)
        send(self)

    monkeypatch.setattr(Sender, "_send", send_later)
    monkeypatch.setattr(metric_sender.time, "sleep", lambda s, sleep=time.sleep: waits.append(s))
    for step in range(5_000):
        kinetic.log(step=step, loss=1.0)
    held = len(waits)
    is_stuck.clear()
    metrics._finish(True)
    kinetic.log(step=5_000, loss=2.0)
    assert logged.rows()[-1] == (5_000, {"loss": 2.0})
    assert "kinetic.log: calls come faster than" in capfd.readouterr().err
    assert held


def test_a_full_disk_is_told_once_and_the_next_lines_are_whole(logged, monkeypatch, capfd):
    write = os.write

    def fill(fd: int, data: bytes) -> int:
        if b"steps" not in data:
            return write(fd, data)
        if step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:10])

    kinetic.log(step=0, loss=1.0)
    assert logged.rows() == [(0, {"loss": 1.0})]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        for step in (1, 2):
            kinetic.log(step=step, loss=1.0)
            metrics._finish(True)
    kinetic.log(step=3, loss=3.0)
    assert logged.rows() == [(0, {"loss": 1.0}), (3, {"loss": 3.0})]
    err = capfd.readouterr().err
    assert err.count(f"the disk of {logged.path} is full. Free some space.") == 1
    assert err.count("cannot be written to: No space left on device.") == 1


def test_a_job_that_was_removed_disturbs_nobody(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing" / "metrics"))
    metrics._forget_in_fork()
    kinetic.log(step=0, loss=1.0)
    metrics._finish(True)
    metrics._forget_in_fork()
    assert capfd.readouterr().err == ""


@pytest.mark.starts_processes
def test_a_fork_logs_for_itself(logged):
    kinetic.log(step=0, loss=0.0)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            kinetic.log(step=1, loss=1.0)
        os._exit(0)
    os.waitpid(pid, 0)
    kinetic.log(step=2, loss=2.0)
    assert sorted(logged.rows()) == [(step, {"loss": float(step)}) for step in range(3)]


@pytest.mark.starts_processes
def test_a_program_that_the_function_starts_logs_too(logged):
    program = "import kinetic; kinetic.log(step=7, loss=0.5)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert logged.rows() == [(7, {"loss": 0.5})]


def log_in_a_child(step: int) -> int:
    kinetic.log(step=step, loss=0.5)
    return step


@pytest.mark.starts_processes
def test_what_the_children_of_a_pool_log_last_is_kept(logged):
    """Children of a pool end without exit handlers. All their rows must be in the file, even the
    last."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(log_in_a_child, range(6))) == list(range(6))
    assert sorted(logged.rows()) == [(step, {"loss": 0.5}) for step in range(6)]


POOL = """
import multiprocessing, sys
import kinetic

def log(step):
    kinetic.log(step=step, loss=0.5)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(log, range(6))
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_the_children_of_a_pool_log_before_they_are_killed_is_kept(logged, tmp_path, method):
    """The end of a pool's `with` block kills its children by SIGTERM: no row may be lost."""
    (tmp_path / "pool.py").write_text(POOL)
    subprocess.run([sys.executable, str(tmp_path / "pool.py"), method], check=True, timeout=120)
    assert sorted(logged.rows()) == [(step, {"loss": 0.5}) for step in range(6)]


@pytest.mark.starts_processes
def test_writers_do_not_mix_their_lines(logged):
    kinetic.log(step=0, loss=0.0)
    children = []
    for number in range(1, 5):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                for step in range(300):
                    kinetic.log(step=step, **{f"loss{number}": float(step)})
                    if step % 10 == 0:
                        metrics._finish(True)
                metrics._finish(True)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    assert len(logged.rows()) == 4 * 300 + 1


def test_many_threads_log(logged):
    threads = [
        threading.Thread(
            target=lambda n=n: [kinetic.log(step=step, **{f"t{n}": 1.0}) for step in range(500)]
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(logged.rows()) == 4000


def test_a_clock_that_is_set_does_not_move_rows(logged, monkeypatch):
    kinetic.log(step=0, loss=1.0)
    before = time.time()
    monkeypatch.setattr(metric_sender.time, "time", lambda: before - 86400)
    kinetic.log(step=1, loss=1.0)
    logged.rows()
    assert all(before - 3600 < when < before + 3600 for when in logged.times)


def test_memory_in_use_is_that_of_the_fullest_device(logged, monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 5, "bytes_limit": 10})
    full = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 7, "bytes_limit": 10})
    silent = SimpleNamespace(memory_stats=lambda: None)
    jax = SimpleNamespace(local_devices=lambda: [device, full, silent])
    bridge = SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    names = "host/device_memory_bytes", "host/device_memory_limit_bytes"
    (row,) = metric_sender._sample_devices(5.0)
    assert row == MetricRow(5.0, NO_STEP, dict(zip(names, (7, 10), strict=True)), waits=False)
    bridge.backends_are_initialized = lambda: False
    assert metric_sender._sample_devices(5.0) == []


def test_measurements_of_a_host_become_less_frequent_up_to_every_10_s():
    cadence, due = FigureCadence(0.0), []
    for second in range(4000):
        if cadence.is_due(float(second)):
            due.append(second)
    assert due[:3] == [1, 2, 3]
    assert due[-1] - due[-2] == 10
    assert len(due) < 600


# -- step_time_s -----------------------------------------------------------------------------------


def times_of(*rows: tuple[float, int, str], last: bool = True) -> list[tuple[int, float]]:
    """Log a metric at each (time in s, step, metric name). Return (step, seconds) for each row of
    `step_time_s`: the mean time of the steps since the row before."""
    steps, measured = StepTimes(), []
    for time_s, step, name in rows:
        steps.note(MetricRow(time_s, step, {name: 1.0} if name else {}, waits=False))
        measured += steps.take()
    measured += steps.take(is_last=last)
    return [
        (row.step, row.values["step_time_s"]) for row in measured if "step_time_s" in row.values
    ]


def test_the_time_of_a_step_is_the_mean_of_about_a_second():
    rows = [(n * 0.25, n, "loss") for n in range(9)]
    assert times_of(*rows) == [(4, 0.25), (8, 0.25)]
    assert times_of((0.0, 0, "loss"), (10.0, 1, "loss")) == [(1, 10.0)]
    assert times_of((0.0, 0, "loss"), (0.1, 1, "loss")) == [(1, 0.1)]
    assert times_of((0.0, 5, "loss")) == []
    assert times_of((0.0, 0, "loss"), (2.0, 100, "loss")) == [(100, 0.02)]


def test_epochs_do_not_count_as_steps():
    steps = [(n * 0.5, n, "loss") for n in range(9)]
    rows = sorted([*steps, (1.1, 0, "accuracy"), (2.1, 1, "accuracy")])
    assert times_of(*rows) == [(2, 0.5), (4, 0.5), (6, 0.5), (8, 0.5)]


def test_a_checkpointer_marks_steps_as_well():
    rows = [(n * 0.5, n, name) for n in range(5) for name in ("", "loss")]
    assert times_of(*rows) == [(2, 0.5), (4, 0.5)]


def test_steps_that_begin_anew_are_no_time():
    rows = [(0.0, 50, "loss"), (2.0, 52, "loss"), (9.0, 50, "loss"), (10.0, 51, "loss")]
    assert times_of(*rows) == [(52, 1.0), (51, 1.0)]


def test_a_function_that_logs_its_own_step_time_keeps_it():
    assert times_of((0.0, 0, "step_time_s"), (5.0, 1, "step_time_s")) == []


def test_what_a_thread_raises_is_said_and_does_not_end_it(logged, monkeypatch, capfd):
    broken = [RuntimeError("no such thing")]
    note = StepTimes.note

    def fail_once(self: StepTimes, row: MetricRow) -> None:
        if broken:
            raise broken.pop()
        note(self, row)

    monkeypatch.setattr(StepTimes, "note", fail_once)
    kinetic.log(step=0, loss=1.0)
    while broken:
        time.sleep(0.01)
    kinetic.log(step=1, loss=1.0)
    assert (1, {"loss": 1.0}) in logged.rows()
    assert "metrics could not be written: RuntimeError: no such thing" in capfd.readouterr().err
