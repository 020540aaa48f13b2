"""The report on a worker's end: pure.

In: the worker's last message, its wait status, the coordinator's view if it stopped the host.
Out: a `HostReport`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from kinetic._core.exits import Exit
from kinetic._core.gang.messages import HostView
from kinetic._core.outcome import HostReport, RemoteError
from kinetic._core.values import dataclass
from kinetic._host.agent.memory import MemoryVerdict
from kinetic._host.worker import report
from kinetic._system import processes

TAKEN_AWAY = HostView(
    stop=True,
    stop_exit=Exit.EVICTED,
    stop_reason=(
        "It was asked to end: it was deleted, evicted or preempted, or its machine is going away."
    ),
)
"""Stands in for the coordinator's view when this host itself is taken away."""
NEARLY_ALL = 0.85
"""Share of the memory limit above which a killed worker probably ran out of memory. Memory daemons
and clusters kill processes that the kernel does not count as victims."""
_SHARED_FIELDS = (
    *("exit_code", "signal", "result_digest", "result_size_bytes", "is_first"),
    *("cache_hits", "compile_saved_s"),
)
"""Fields of the worker's last message that the report has, too."""


@dataclass(frozen=True)
class Moment:
    """A worker's progress when it ended.

    Attributes:
        started: the function was called.
        ending: the worker's message that the function has ended, which it sends before it pickles
            the value or reads the exception; None if it has not.
    """

    started: bool = True
    ending: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.ending is None:
            return (
                "before the function returned"
                if self.started
                else "before the function began, while it was loaded"
            )
        name = self.ending["type_name"]
        if self.ending["raised"]:
            return (
                f"while the exception that the function raised ({name}) was read, which runs code "
                "of its own such as __str__"
            )
        return (
            f"while the value that the function returned ({name}) was pickled, which runs code of "
            "its own such as __reduce__"
        )


def ending_of(
    end: dict[str, Any] | None,
    status: int | None,
    stop: HostView | None,
    host: int,
    *,
    peak_bytes: int = 0,
    memory: MemoryVerdict = MemoryVerdict(),  # noqa: B008 - frozen
    moment: Moment = Moment(),  # noqa: B008 - frozen
) -> HostReport:
    """Return the report on a host's end.

    The first of these that applies decides: a returned value, or an exception (or `sys.exit`, even
    with 0) raised before the agent was asked to stop; the coordinator's reason for the stop
    (cancelled, timeout, hang, stopped); the worker's last message; its wait status.

    Args:
        end: the worker's last message, or None.
        status: the worker's wait status; None while it runs.
        stop: the coordinator's view if the host was told to stop, else None.
        host: index of the host.
        peak_bytes: peak memory of the worker.
        memory: what the kernel's counters say about a worker that died without a message.
        moment: how far the worker had come.
    """
    has_value = end is not None and end["event"] == Exit.RETURNED and not end.get("by_exit")
    if stop is not None and stop.stop_exit is not None and not has_value:
        report = HostReport(host, Exit(stop.stop_exit), detail=stop.stop_reason)
    elif end is not None:
        report = _report_from_end(end, host)
    else:
        report = _report_death(status or 0, host, peak_bytes, memory, moment)
    return replace(report, peak_rss_bytes=peak_bytes)


def last_words(report: HostReport) -> str:
    """Return the last lines of a host's log about a function that did not return; "" for none.

    An exception is shown as Python does, `sys.exit` not at all (its text, if any, is already in the
    log), anything else in one line.
    """
    if report.exit.kind.has_traceback and report.error is not None and report.error.traceback:
        return report.error.traceback.rstrip()
    if report.ok or report.exit is Exit.SYS_EXIT:
        return ""
    why = report.detail.rstrip() or str(report.exit)
    return (
        f"kinetic: this host was stopped: {why}"
        if report.exit is Exit.STOPPED
        else f"kinetic: {why}"
    )


def _report_from_end(end: dict[str, Any], host: int) -> HostReport:
    raised = end.get("error")
    error = None
    if raised:
        error = RemoteError(
            raised["type_name"],
            raised["message"],
            raised["traceback"],
            consequence=raised["consequence"],
        )
    kind = Exit(end["event"])
    detail = end.get("detail") or (error.summary[:500] if error else "")
    if "repr" in end:
        detail = f"{detail}\nIts repr: {end['repr']}"
    return HostReport(
        host,
        kind,
        detail=detail,
        error=error,
        leftover_threads=tuple(end.get("leftover_threads", ())),
        **{name: end[name] for name in _SHARED_FIELDS if name in end},
    )


def _report_death(
    status: int, host: int, peak_bytes: int, verdict: MemoryVerdict, moment: Moment
) -> HostReport:
    peak = f"peak memory {peak_bytes / 2**20:,.0f} MiB" if peak_bytes else ""
    ended = f"The worker process {processes.describe_end(status)}"
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        cause = "os._exit, or native code"
        if code == report.BROKEN_CODE:
            cause += ", or the function broke a part of Python that kinetic needs"
        how = "; ".join(filter(None, (cause, peak)))
        detail = f"{ended} {moment} ({how})."
        return HostReport(host, Exit.OS_EXIT, detail=detail, exit_code=code)
    signum = os.WTERMSIG(status)
    if signum == signal.SIGKILL and (reason := _out_of_memory(peak_bytes, verdict)):
        return HostReport(
            host,
            Exit.OUT_OF_MEMORY,
            detail=reason,
            signal=signum,
            guessed=not verdict.struck,
        )
    when = f" {moment}" if moment.ending or not moment.started else ""
    how = f" ({peak})" if peak else ""
    detail = f"{ended}{when}{how}."
    return HostReport(host, Exit.SIGNAL, detail=detail, signal=signum)


def _out_of_memory(peak_bytes: int, verdict: MemoryVerdict) -> str:
    """Return a sentence if a worker that got SIGKILL ran out of memory; "" if nothing suggests
    it."""
    peak, limit = (f"{n / 2**20:,.0f} MiB" for n in (peak_bytes, verdict.limit_bytes))
    if verdict.struck:
        return (
            f"The kernel's out-of-memory killer ended the worker process (peak memory {peak}, "
            f"limit {limit})."
        )
    if verdict.limit_bytes and peak_bytes > NEARLY_ALL * verdict.limit_bytes:
        return (
            f"The worker process was killed by SIGKILL at a peak memory of {peak} of {limit}: "
            "probably out of memory."
        )
    return ""
