"""What a verdict means for the caller: the leader's value, or the exception to raise.

In: a board, a reference, the outcome. Out: a value, an exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kinetic._backends.base import LogRequest
from kinetic._client.board import console, text
from kinetic._client.board.reader import JobBoard
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.failure import Evidence, exception_of
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic.errors import (
    CorruptRecord,
    KineticError,
    NotFound,
    ResultUnavailable,
    UnsupportedVersion,
    UsageError,
    UserCodeFailed,
)

T = TypeVar("T")
_TAIL_LINES = 60
"""More than are shown: some say nothing."""

_NOT_FOUND = re.compile(r"(?:(No module named)|No such file or directory:) '([^']+)'")
_log = logging.getLogger("kinetic.collecting")


def values(board: JobBoard, ref: JobRef, outcome: Outcome) -> list[Any]:
    """Return what the hosts returned, by index.

    Raises:
        UsageError: only one value was kept.
        ResultUnavailable: one was removed, or cannot be rebuilt here.
        CorruptRecord: one was changed.
    """
    if not all(report.result_digest for report in outcome.reports):
        raise UsageError(
            f"Only the value of host {outcome.leader} of {ref.job_id} was kept. To have those of "
            "all hosts, run it with all_hosts=True: @kinetic.run(..., all_hosts=True), or "
            f"{ref.func_name}.with_options(all_hosts=True)."
        )
    return [value(board, ref, outcome, report.host) for report in outcome.reports]


def value(board: JobBoard, ref: JobRef, outcome: Outcome, host: int | None = None) -> Any:
    """Return what a host returned, the leader by default. Unpickles only what that host wrote.

    Raises:
        ResultUnavailable: it was removed, or cannot be rebuilt here.
        CorruptRecord: it was changed.
        UnsupportedVersion: another version of kinetic ran the job.
    """
    return load(board, ref, fetch(board.store, ref, outcome, host))


def fetch(store: Store, ref: JobRef, outcome: Outcome, host: int | None = None) -> bytes:
    """Return the pickled value that a host wrote; raises as `value` does."""
    host = outcome.leader if host is None else host
    ref.check_version()
    try:
        data = store.get(layout.HostKeys(ref.job_id, outcome.attempt, host).result)
    except NotFound as error:
        raise ResultUnavailable(
            f"{ref.job_id} succeeded, but its value was removed from the store.", job_id=ref.job_id
        ) from error
    if hashlib.sha256(data).hexdigest() != (
        outcome.result_digest if host == outcome.leader else outcome.reports[host].result_digest
    ):
        writer = "the leader" if host == outcome.leader else f"host {host}"
        raise CorruptRecord(
            f"The stored value of {ref.job_id} is not what {writer} wrote; it was not unpickled. "
            "Run the job again."
        )
    return data


def load(board: JobBoard, ref: JobRef, data: bytes) -> Any:
    """Return the value that `fetch` fetched.

    Raises:
        ResultUnavailable: it cannot be rebuilt here.
    """
    from kinetic._pickling import results

    try:
        return _load_in_project(board, ref, lambda: results.unpack_value(data))
    except ResultUnavailable as error:
        raise ResultUnavailable(
            f"{ref.display_name} ({ref.job_id}): {error}", job_id=ref.job_id
        ) from error.__cause__


def error(
    board: JobBoard, ref: JobRef, outcome: Outcome, last_lines: Callable[[int], str]
) -> BaseException:
    """Return what to raise for a failed job: the function's own exception, if it can be rebuilt
    here.

    Args:
        board: where the job's records are.
        ref: the job.
        outcome: its verdict.
        last_lines: returns the last lines that a host printed.
    """
    from kinetic._core.gang.blame import summarize_groups

    first = outcome.first
    if first is None:
        return exception_of(Evidence(ref.job_id, ref.display_name, outcome))
    key = "" if first.error is None else first.error.key
    found = _read_original(board, ref, key) if key else ""
    evidence = Evidence(
        ref.job_id,
        ref.display_name,
        outcome,
        original=found if isinstance(found, BaseException) else None,
        unreadable=found if isinstance(found, str) else "",
        tail=last_lines(first.host),
        stacks=summarize_groups(stacks(outcome), outcome.blamed) if first.exit is Exit.HANG else "",
    )
    if evidence.original is not None and first.error is not None:
        _drop_edited(evidence.original, first.error.traceback)
    failure = exception_of(evidence)
    if isinstance(failure, FileNotFoundError | ModuleNotFoundError):
        _note_unsent(board, ref, failure, str(failure))
    elif first.exit is Exit.SYS_EXIT:
        _note_unsent(board, ref, failure, evidence.tail)
    return failure


def describe_files(of: str, outcomes: Iterable[Outcome]) -> str:
    """Say which files functions wrote into their work folders, and how to get them; "" for none.
    `of`: the id of the job, or of the batch, that ended so."""
    reports = [r for outcome in outcomes for r in outcome.reports if r.written]
    if not reports:
        return ""
    kept = text.count(sum(report.kept_files for report in reports), "file")
    many = len(reports) > 1
    where = f"{len(reports)} work folders; in the first" if many else "the work folder"
    return (
        f"kept {kept} of {where}: {reports[0].written.rstrip('.')}. Fetch with `kinetic "
        f"jobs outputs {of} --to DIR`."
    )


def name_files(of: str, outcomes: Iterable[Outcome]) -> None:
    """Print once what `describe_files` says."""
    if words := describe_files(of, outcomes):
        console.notice(f"kinetic: {words}")


def read_tail(
    chunks: Callable[[LogRequest], Iterable[LogChunk | None]], host: int, attempt: int
) -> str:
    """Return what a host has printed last in an attempt; "" if that cannot be read. `chunks`: of
    the job's output."""
    request = LogRequest((host,), False, _TAIL_LINES, failures=False, attempt=attempt)
    with contextlib.suppress(KineticError, OSError):
        data = [chunk.data for chunk in chunks(request) if chunk is not None]
        return b"".join(data).decode(errors="replace")
    return ""


def _drop_edited(error: BaseException, trace: str) -> None:
    """Drop the frames of an exception if tracebacks would quote other lines than that of the host,
    which is shown then: a file was edited since."""
    linked = [each for each in (error, error.__cause__, error.__context__) if each is not None]
    frames = [frame for each in linked for frame in traceback.extract_tb(each.__traceback__)]
    shown = [f for f in frames if f", line {f.lineno}, in {f.name}\n    " in trace]
    if any((frame.line or "") not in trace for frame in shown):
        for each in linked:
            BaseException.with_traceback(each, None)


def _note_unsent(board: JobBoard, ref: JobRef, error: BaseException, text: str) -> None:
    """Say so if the caller's project has the file or the module that was not found, by the last
    error of this kind in a text."""
    instead, names = "", []
    for is_module, name in _NOT_FOUND.findall(text)[-1:]:
        path = name.replace(".", "/") if is_module else name
        instead = f"pass kinetic.Data({name!r}), or " if isinstance(error, OSError) else ""
        names = [f"{path}.py", f"{path}/"] if is_module else [path]
    plan = board.plan(ref) if names else None
    if plan is None or not plan.client_root:
        return
    cwd = Path(plan.client_root, plan.cwd_rel or "")
    for name in names:
        if Path(name).is_absolute() or not os.path.exists(cwd / name):  # noqa: PTH110 - Path.exists raises where a folder cannot be searched
            continue
        line = f"!{os.path.normpath(Path(plan.cwd_rel or '', name))}"
        error.add_note(
            f"{name} is here. If it was not sent with the project, .gitignore, .kineticignore or "
            f"kinetic's own rules leave it out: {instead}let it be sent by a line {line} in "
            ".kineticignore."
        )


def _read_original(board: JobBoard, ref: JobRef, key: str) -> BaseException | str:
    """Return the exception, or why it cannot be rebuilt; "" if its class is the reason."""
    from kinetic._pickling import results

    try:
        data = board.store.get(key)
        return _load_in_project(board, ref, lambda: results.unpack_exception(data))
    except Exception as problem:  # noqa: BLE001 - unpickling runs the user's code; the error's text is still available
        _log.info("the exception of %s cannot be rebuilt here: %s", ref.job_id, problem)
        is_foreign = isinstance(problem, UnsupportedVersion)
        return "another version of kinetic wrote it down" if is_foreign else ""


_searching = threading.RLock()
"""Held by the thread for whose value the folders of a project are on `sys.path`."""


def _load_in_project(board: JobBoard, ref: JobRef, load: Callable[[], T]) -> T:
    """Load. If a module is missing, because this is not the program that made the call, look for it
    in the call's project."""
    try:
        return load()
    except (ResultUnavailable, UserCodeFailed) as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        with _searching:
            folders = _project_folders(board, ref)
            if not folders:
                raise
            sys.path += folders
            try:
                return load()
            finally:
                for folder in folders:
                    sys.path.remove(folder)


def _project_folders(board: JobBoard, ref: JobRef) -> list[str]:
    """Return the project's folders that the caller imported from, if they are on this
    machine."""
    plan = board.plan(ref)
    if plan is None or not plan.client_root:
        return []
    folders = dict.fromkeys(
        Path(plan.client_root, place)
        for place in (*plan.sys_path_rel, plan.entry_rel, *plan.editable_rel)
    )
    return [str(folder) for folder in folders if folder.is_dir() and str(folder) not in sys.path]


def stacks(outcome: Outcome) -> dict[int, str]:
    """Return where the hosts of a hung gang stood, and which had returned; {} for any other
    gang."""
    from kinetic._core.gang.blame import RETURNED

    if not any(r.stacks for r in outcome.reports):
        return {}
    return {
        r.host: RETURNED if r.ok else r.stacks
        for r in outcome.reports
        if r.stacks or r.ok or r.exit is Exit.HANG
    }
