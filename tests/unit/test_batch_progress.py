"""The progress line of a batch while a caller waits: on a terminal, in a pipe, after Ctrl-C."""

from __future__ import annotations

import io
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from batch_cases import NUMBERS, PATIENCE_S, begin, until
from batch_fakes import Scripted

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._client.batch import handle as handles
from kinetic._client.batch import launch
from kinetic._client.batch.inputs import InputState
from kinetic._client.batch.progress import BAR_WIDTH, progress_line
from kinetic._client.batch.records import BatchRecords
from kinetic._client.batch.run import BatchRules, BatchSubmitter
from kinetic._client.futures import EndWatcher
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._store.local import LocalStore

OURS = f"{Path(kinetic.__file__).parent}/"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar_unless_told_otherwise(store, monkeypatch):
    for progress in (True, False):
        monkeypatch.setattr("sys.stderr", stream := Terminal())
        batch = begin(Scripted(LocalStore(store.path(f"s{next(NUMBERS)}")), ["raise"]), 3)
        batch.wait(timeout=PATIENCE_S, progress=progress)
        text = stream.getvalue()
        assert bool(text) is progress
        if progress:
            assert text.endswith(
                f"\rkinetic: {batch.group_id} 3/3, 1 failed [{'#' * BAR_WIDTH}]\033[K\033[?7h\n"
            )


def test_an_end_that_is_told_twice_counts_once(store):
    """A job that is registered again while its end is being reported counts as one end."""
    batch = begin(Scripted(store, ["raise"]), 1)
    batch.wait(timeout=PATIENCE_S)
    (handle,) = batch._view.handles
    batch._view._enter_end(handle, handle.outcome())
    assert batch._view.finished == [0]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "dumb terminal"])
def test_a_stream_that_cannot_redraw_gets_one_line_for_each_ended_input(store, monkeypatch, stream):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", stream)
    batch = begin(Scripted(store, ["raise"]), 3, BatchRules(max_concurrent=1))
    batch.wait(timeout=PATIENCE_S)
    batch.results(return_exceptions=True)
    assert len(stream.getvalue().splitlines()) == 3
    assert "input 0 failed" in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_skipped_inputs_get_no_lines_in_a_pipe(store, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    batch = begin(Scripted(store, ["raise"]), 300, BatchRules(max_concurrent=1, fail_fast=True))
    batch.wait(timeout=PATIENCE_S)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("1 failed; input 0 failed") or line.endswith(
        "299 left out; input 0 failed"
    )
    assert batch._view.counts() == {InputState.FAILED: 1, InputState.SKIPPED: 299}


class OnSessions(Scripted):
    """A `JobSource` whose jobs are calls on two sessions, of which the second has every third."""

    def submit(self, group_id, index, job_id=""):
        ref = super().submit(group_id, index, job_id).ref
        session = "job-000000e2" if index % 3 == 2 else "job-000000e1"
        return JobHandle(replace(ref, place=replace(ref.place, session=session)), self, self.store)


@pytest.mark.parametrize(("source", "running"), [(Scripted, 4), (OnSessions, 2)])
def test_of_the_calls_on_a_session_only_one_counts_as_running(store, source, running):
    """The others wait in the session's queue."""
    source = source(store, ["raise", *["hang"] * 4])
    batch = begin(source, 5)
    until(batch, lambda: batch._view.finished and batch._view.live == 4)
    assert progress_line(batch._view) == f"{batch.group_id} 1/5, 1 failed, {running} running"
    for index in range(1, 5):
        source.release(index)
    batch.wait(timeout=PATIENCE_S)


def test_a_broken_stream_does_not_end_the_wait(store, monkeypatch):
    stream = Terminal()
    stream.write = lambda text: (_ for _ in ()).throw(BrokenPipeError())
    monkeypatch.setattr("sys.stderr", stream)
    assert begin(Scripted(store), 2).results(timeout=PATIENCE_S) == [(0, 1), (1, 1)]


def test_ctrl_c_says_how_to_come_back(store, monkeypatch, capsys):
    source = Scripted(store, ["hang", "hang"])
    batch = begin(source, 2, BatchRules(max_concurrent=1))
    wait_for_event = batch._view.wait_for_event

    def interrupt(*args):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        wait_for_event(*args)

    monkeypatch.setattr(batch._view, "wait_for_event", interrupt)
    for waiting in (batch.results, batch.wait, lambda: next(batch.as_completed()), batch.cancel):
        with pytest.raises(KeyboardInterrupt) as caught:
            waiting()
        assert OURS not in "".join(traceback.format_exception(caught.value))
        if waiting == batch.results:
            err = capsys.readouterr().err
    assert f'kinetic.attach_batch("{batch.group_id}").results()' in err
    assert f'kinetic.attach_batch("{batch.group_id}").cancel()' in err
    assert "this process still submits the rest" in err
    monkeypatch.setattr(batch._view, "wait_for_event", wait_for_event)
    batch.cancel()
    batch.wait(timeout=PATIENCE_S)


def test_ctrl_c_while_all_is_submitted_at_once(store, capsys):
    source = Scripted(store, ["hang", KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        launch.launch(source, store, 3, BatchRules(max_concurrent=None), name="", notes={})
    (group_id,) = {key.split("/")[1] for key in store.list(layout.GROUPS)}
    err = capsys.readouterr().err
    assert f'kinetic.attach_batch("{group_id}").cancel()' in err
    assert "1 of its 3 inputs was submitted, the others will not be" in err
    with registry.substitute_backend("local", lambda _, store: source):
        batch = handles._attach(store, group_id)
        batch.cancel()
        results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results] == [
        errors.JobCancelled,
        errors.SubmitError,
        errors.SubmitError,
    ]


def interrupt_call(store, source, total):
    """Launch a batch that Ctrl-C interrupts, then wait for the batch's threads to end."""
    how = BatchRules(max_concurrent=2)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(source, store, total, how, name="", notes={})
    for thread in threading.enumerate():
        if thread.name.startswith("kinetic-grp-"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_ctrl_c_before_a_batch_has_begun_leaves_nothing(store, monkeypatch, capsys):
    for owner, name in (
        (BatchSubmitter, "start"),
        (threading.Thread, "start"),
        (BatchRecords, "begin"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            interrupt_call(store, source := Scripted(store), 4)
        assert (source.order, list(store.list("groups"))) == ([], [])
        err = capsys.readouterr().err
        assert "was interrupted: none of its 4 inputs was submitted" in err
        assert "keep running" not in err


def test_ctrl_c_once_the_threads_have_started_has_nothing_more_submitted(
    store, monkeypatch, capsys
):
    source, start = Scripted(store, ["hang"] * 4), BatchSubmitter.start

    def interrupt(self, *, blocking):
        start(self, blocking=blocking)
        with self._view.changes:
            assert self._view.changes.wait_for(lambda: len(source.order) == 2, PATIENCE_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchSubmitter, "start", interrupt)
    interrupt_call(store, source, 4)
    (group_id,) = {key.split("/")[1] for key in store.list(layout.GROUPS)}
    err = capsys.readouterr().err
    assert (
        f"{group_id} was interrupted: 2 of its 4 inputs were submitted, the others will not be"
        in err
    )
    assert f'kinetic.attach_batch("{group_id}").cancel()' in err
    for index in (0, 1):
        source.release(index)
    with registry.substitute_backend("local", lambda _, store: source):
        results = handles._attach(store, group_id).results(
            timeout=PATIENCE_S, return_exceptions=True
        )
    assert results[:2] == [(0, 1), (1, 1)]
    assert [type(error) for error in results[2:]] == [errors.SubmitError] * 2
    assert source.order == [0, 1]


def test_an_input_that_would_end_the_submitting_thread_ends_only_itself(store):
    source = Scripted(store, ["ok", SystemExit(3)])
    results = begin(source, 3).results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results] == [tuple, errors.SubmitError, tuple]
    assert "SystemExit: 3" in str(results[1])


def test_errors_of_the_watching_thread_reach_whoever_waits(store, monkeypatch):
    source = Scripted(store, ["hang"])
    monkeypatch.setattr(
        EndWatcher, "poll", lambda *_: (_ for _ in ()).throw(ZeroDivisionError("a bug"))
    )
    batch = begin(source, 1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        batch.wait(timeout=PATIENCE_S)
    batch._view.stop("done")


def test_a_narrow_terminal_cuts_the_line_instead_of_wrapping_it(store, monkeypatch):
    """Numbers come before the bar, so a cut keeps them; wrapping is off while a line is drawn."""
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    batch = begin(Scripted(store), 3)
    batch.wait(timeout=PATIENCE_S)
    drawn = stream.getvalue().rstrip().removesuffix("\033[?7h").split("\033[?7h")
    assert all(line.startswith(f"\033[?7l\rkinetic: {batch.group_id} ") for line in drawn)
    assert "3/3 [#" in drawn[-1]
