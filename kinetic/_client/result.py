"""The result of an ended job: the value that its hosts returned, or the exception to raise.

A value is unpickled only if its digest is that in the verdict.
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
_TAIL_LINES = 400
"""Number of last output lines to read for an error message, which quotes only the useful ones. In a
crash, the stacks of all threads follow the line that says why."""
_NOT_FOUND = re.compile(r"(?:(No module named)|No such file or directory:) '([^']+)'")
_log = logging.getLogger("kinetic.collecting")


def values(board: JobBoard, ref: JobRef, outcome: Outcome) -> list[Any]:
    """Return the values of all hosts, by index.

    Raises:
        UsageError: the job stored only the leader's value.
        ResultUnavailable: a value was removed, or cannot be unpickled here.
        CorruptRecord: a value is not what its host wrote.
    """
    if not all(report.result_digest for report in outcome.reports):
        raise UsageError(
            f"{ref.job_id} stored only the value of host {outcome.leader}. To store the values of "
            "all hosts, use all_hosts=True: @kinetic.run(..., all_hosts=True), or "
            f"{ref.func_name}.with_options(all_hosts=True)."
        )
    return [value(board, ref, outcome, report.host) for report in outcome.reports]


def value(board: JobBoard, ref: JobRef, outcome: Outcome, host: int | None = None) -> Any:
    """Return the value of a host, by default the leader's.

    Raises:
        ResultUnavailable: the value was removed, or cannot be unpickled here.
        CorruptRecord: the stored value is not what the host wrote; it was not unpickled.
        UnsupportedVersion: another version of kinetic ran the job.
    """
    return load(board, ref, fetch(board.store, ref, outcome, host))


def fetch(store: Store, ref: JobRef, outcome: Outcome, host: int | None = None) -> bytes:
    """Return the pickled value of a host, after checking its digest. Raises as `value` does."""
    host = outcome.leader if host is None else host
    ref.check_version()
    try:
        data = store.get(layout.HostKeys(ref.job_id, outcome.attempt, host).result)
    except NotFound as error:
        raise ResultUnavailable(
            f"{ref.job_id} succeeded, but its value was removed from the store. Run the job again.",
            job_id=ref.job_id,
        ) from error
    if hashlib.sha256(data).hexdigest() != (
        outcome.result_digest if host == outcome.leader else outcome.reports[host].result_digest
    ):
        writer = "the leader" if host == outcome.leader else f"host {host}"
        raise CorruptRecord(
            f"The stored value of {ref.job_id} is damaged (it differs from what {writer} wrote) "
            "and was not unpickled. Run the job again."
        )
    return data


def load(board: JobBoard, ref: JobRef, data: bytes) -> Any:
    """Unpickle a value that `fetch` returned.

    Raises:
        ResultUnavailable: unpickling failed.
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
    """Return the exception to raise for a failed job: the function's, if it can be unpickled here.

    Args:
        board: reads the job's records.
        ref: the job.
        outcome: the job's verdict.
        last_lines: returns the last lines that a host printed.
    """
    from kinetic._core.gang.blame import summarize_groups

    first = outcome.first
    if first is None:
        return exception_of(Evidence(ref.job_id, ref.display_name, outcome))
    key = "" if first.error is None else first.error.key
    original = _read_original(board, ref, key) if key else ""
    evidence = Evidence(
        ref.job_id,
        ref.display_name,
        outcome,
        original=original if isinstance(original, BaseException) else None,
        unreadable=original if isinstance(original, str) else "",
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
    """Return the notice about files that functions wrote into their work folders, and the command
    that fetches these files; "" if there are no files. `of` is the id of the job or batch."""
    reports = [r for outcome in outcomes for r in outcome.reports if r.written]
    if not reports:
        return ""
    files = text.count(sum(report.kept_files for report in reports), "file")
    many = len(reports) > 1
    folders = f"{len(reports)} work folders; in the first" if many else "the work folder"
    return (
        f"kept {files} of {folders}: {reports[0].written.rstrip('.')}. Fetch with `kinetic "
        f"jobs outputs {of} --to DIR`."
    )


def name_files(of: str, outcomes: Iterable[Outcome]) -> None:
    """Print the notice of `describe_files`, at most once in a process."""
    if words := describe_files(of, outcomes):
        console.notice(f"kinetic: {words}")


def read_tail(
    chunks: Callable[[LogRequest], Iterable[LogChunk | None]], host: int, attempt: int
) -> str:
    """Return the last lines that a host printed in an attempt; "" if they cannot be read. `chunks`
    reads the job's output."""
    request = LogRequest((host,), False, _TAIL_LINES, failures=False, attempt=attempt)
    with contextlib.suppress(KineticError, OSError):
        data = [chunk.data for chunk in chunks(request) if chunk is not None]
        return b"".join(data).decode(errors="replace")
    return ""


def _drop_edited(error: BaseException, trace: str) -> None:
    """Drop an exception's frames if a file was edited after the call was sent: Python would quote
    the edited lines. The host's traceback is then shown instead."""
    errors = [each for each in (error, error.__cause__, error.__context__) if each is not None]
    frames = [frame for each in errors for frame in traceback.extract_tb(each.__traceback__)]
    quoted = [f for f in frames if f", line {f.lineno}, in {f.name}\n    " in trace]
    if any((frame.line or "") not in trace for frame in quoted):
        for edited in errors:
            BaseException.with_traceback(edited, None)


def _note_unsent(board: JobBoard, ref: JobRef, error: BaseException, text: str) -> None:
    """If a host did not find a file or module that the caller's project has, add a note to the
    error. The last message of this kind in `text` has the file's or module's name."""
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
            f"{name} exists on this machine. If it was not sent with the project, .gitignore, "
            f".kineticignore or kinetic's own rules exclude it: {instead}include it with the line "
            f"{line} in .kineticignore."
        )


def _read_original(board: JobBoard, ref: JobRef, key: str) -> BaseException | str:
    """Return the function's exception, or the reason why it cannot be unpickled here; "" if its
    class cannot be rebuilt."""
    from kinetic._pickling import results

    try:
        data = board.store.get(key)
        return _load_in_project(board, ref, lambda: results.unpack_exception(data))
    except Exception as problem:  # noqa: BLE001 - unpickling runs the user's code; the error's text is still available
        _log.info("the exception of %s cannot be rebuilt here: %s", ref.job_id, problem)
        is_foreign = isinstance(problem, UnsupportedVersion)
        return "another version of kinetic wrote it down" if is_foreign else ""


_path_lock = threading.RLock()
"""Held while a project's folders are on `sys.path`."""


def _load_in_project(board: JobBoard, ref: JobRef, load: Callable[[], T]) -> T:
    """Call `load`. If a module is missing, because this program is not the one that submitted the
    job, call it once more with the folders of the caller's project on `sys.path`."""
    try:
        return load()
    except (ResultUnavailable, UserCodeFailed) as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        with _path_lock:
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
    """Return the existing folders of the submitter's import path that are not on our path."""
    plan = board.plan(ref)
    if plan is None or not plan.client_root:
        return []
    folders = dict.fromkeys(
        Path(plan.client_root, rel)
        for rel in (*plan.sys_path_rel, plan.entry_rel, *plan.editable_rel)
    )
    return [str(folder) for folder in folders if folder.is_dir() and str(folder) not in sys.path]


def stacks(outcome: Outcome) -> dict[int, str]:
    """Return the Python stacks of the hosts of a hung gang, by host; `RETURNED` for a host whose
    function had returned. Return {} if the gang did not hang."""
    from kinetic._core.gang.blame import RETURNED

    if not any(r.stacks for r in outcome.reports):
        return {}
    return {
        r.host: RETURNED if r.ok else r.stacks
        for r in outcome.reports
        if r.stacks or r.ok or r.exit is Exit.HANG
    }
