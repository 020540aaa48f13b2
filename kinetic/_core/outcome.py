"""The only module that judges a job: it turns the reports of hosts into an outcome.

In: one `HostReport` per host, and the reason for which the gang was stopped. Out: one `Outcome`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from kinetic._core.documents import Record
from kinetic._core.exits import (
    ABORTED_RANK,
    CONSEQUENCE_RANK,
    PEER_ABORTED_RANK,
    Exit,
    ProgramCode,
)
from kinetic._core.values import dataclass

_MAX_RUNS = 12
SIGABRT = 6


@dataclass(frozen=True)
class RemoteError:
    """An exception raised on a host.

    Attributes:
        type_name: qualified name of the exception's class.
        message: `str()` of the exception.
        traceback: the formatted remote traceback.
        key: key of the exception's pickle in the store; "" if it cannot be pickled.
        consequence: True if the exception looks like the echo of a peer's death (a broken
            collective) rather than a cause.
    """

    type_name: str
    message: str
    traceback: str
    key: str = ""
    consequence: bool = False

    @property
    def summary(self) -> str:
        """The last line of the traceback: "ValueError: no", or "ValueError" without a message.
        Blank lines at the beginning of the message are dropped."""
        message = self.message.lstrip()
        return f"{self.type_name}: {message}" if message else self.type_name


@dataclass(frozen=True)
class HostReport(Record, called="The report of a host"):
    """The report on how one host ended.

    Attributes:
        host: index in the gang; 0 is the leader.
        exit: how the function ended.
        guessed: True if the exit is likely, but not proven.
        detail: one sentence for users.
        exit_code: exit code of the worker process; None if it had none.
        signal: number of the signal that killed the worker, or 0.
        error: the exception that was raised, if any.
        peak_rss_bytes: high-water mark of the worker's memory; 0 if unknown.
        leftover_threads: names of non-daemon threads still running at the end.
        stacks: Python stacks of the worker if it hung; if another host hung, the stack of its main
            thread; else "".
        lost_log_bytes: bytes of output that could not be stored (disk full).
        started_at, ended_at: when the function started and ended, in seconds since the epoch; 0.0
            if it never started.
        result_digest: SHA-256 of the pickled value in the store; "" if the host's value is not
            stored.
        result_size_bytes: length of the pickled value.
        joined_jax: True if a process of the host has been part of JAX's world.
        is_first: True if the host has JAX's process 0, whose value is the call's.
        announced: True if the host is about to end, and will send another report then.
        kept_files: number of stored files that the function wrote into its work folder.
        written: text for users: the largest of these files, and files that are not stored, with the
            reason; "" if the function wrote none.
        cache_hits: number of programs that JAX took from its compilation cache.
        compile_saved_s: seconds of compilation that these saved.
    """

    host: int
    exit: Exit
    detail: str = ""
    exit_code: int | None = None
    signal: int = 0
    error: RemoteError | None = None
    peak_rss_bytes: int = 0
    leftover_threads: tuple[str, ...] = ()
    stacks: str = ""
    lost_log_bytes: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    result_digest: str = ""
    result_size_bytes: int = 0
    joined_jax: bool = False
    is_first: bool = False
    guessed: bool = False
    announced: bool = False
    kept_files: int = 0
    written: str = ""
    cache_hits: int = 0
    compile_saved_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the function returned on this host."""
        return self.exit is Exit.RETURNED

    @property
    def ran_s(self) -> float:
        """Seconds that the function ran; 0.0 if it never started, or the clock was set back."""
        return max(self.ended_at - self.started_at, 0.0) if self.started_at else 0.0

    def is_like(self, other: HostReport) -> bool:
        """True if both hosts ended in the same way with the same message. Messages about a broken
        collective vary, and are not compared."""
        echoes = (
            self.error is not None
            and other.error is not None
            and self.error.consequence
            and other.error.consequence
        )
        return self.exit is other.exit and (echoes or self._words() == other._words())

    def _words(self) -> tuple[str, ...]:
        error = self.error
        texts = (self.detail,) if error is None else (error.type_name, error.message)
        # Paths in the host's own folder differ between hosts.
        return tuple(text.replace(f"/host-{self.host}/", "/host-N/") for text in texts)

    def add_detail(self, detail: str) -> HostReport:
        """Return the report with this sentence appended to its detail."""
        detail_before = f"{self.detail.rstrip('.')}. " if self.detail else ""
        return replace(self, detail=f"{detail_before}{detail}")


class Verdict(StrEnum):
    """The verdict on a job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, repr=False)
class Outcome(Record, called="The outcome of the job"):
    """The verdict on a whole gang.

    Attributes:
        verdict: succeeded, failed or cancelled.
        blamed: hosts that failed first, most to blame first; empty on success.
        reason: one line for users; "" on success.
        reports: one report per host, by index.
        result_digest: SHA-256 of the leader's pickled value, or "".
        result_size_bytes: length of the leader's pickled value.
        supervisor_lost: True if the supervising process was killed before it could judge.
        ended_at: seconds since the epoch.
        attempt: the last attempt, from 1.
        given_up: why an elastic job was given up, with all its failures; "" for other jobs.
        explained: True if the backend was asked why the blamed host was lost.
        ends_world: True if the session has lost what it kept between calls.
    """

    verdict: Verdict
    blamed: tuple[int, ...] = ()
    reason: str = ""
    reports: tuple[HostReport, ...] = ()
    result_digest: str = ""
    result_size_bytes: int = 0
    supervisor_lost: bool = False
    ended_at: float = 0.0
    attempt: int = 1
    explained: bool = False
    given_up: str = ""
    ends_world: bool = False

    def __repr__(self) -> str:
        hosts = f"{len(self.reports)} {'host' if len(self.reports) == 1 else 'hosts'}"
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        reason = f": {self.reason.splitlines()[0]:.200}" if self.reason else ""
        return f"<Outcome {self.verdict}, {hosts}{attempt}{reason}>"

    @property
    def ok(self) -> bool:
        """True if the job succeeded."""
        return self.verdict is Verdict.SUCCEEDED

    @property
    def first(self) -> HostReport | None:
        """The report of the host most to blame, or None."""
        return next((r for r in self.reports if self.blamed and r.host == self.blamed[0]), None)

    @property
    def leader(self) -> int:
        """Index of the host whose value the call returns."""
        return next((r.host for r in self.reports if r.is_first), 0)

    def add_detail(self, host: int, detail: str) -> Outcome:
        """Return the outcome with this sentence appended to a host's detail."""
        reports = tuple(r.add_detail(detail) if r.host == host else r for r in self.reports)
        return replace(self, reports=reports)


def program_code(report: HostReport) -> ProgramCode:
    """Return the exit code of a host's program whose report was delivered."""
    own = report.exit.kind.is_final and blame_rank(report) < CONSEQUENCE_RANK
    return ProgramCode.CODE_FAILED if own else ProgramCode.DELIVERED


def blame_rank(report: HostReport) -> int:
    """Return how much a host is to blame: lower is more. See `ExitKind.rank`."""
    if report.error is not None and report.error.consequence:
        return CONSEQUENCE_RANK
    if report.exit.kind.fatal and report.signal == SIGABRT:
        return PEER_ABORTED_RANK if report.host and report.joined_jax else ABORTED_RANK
    return report.exit.kind.rank


def judge(
    hosts: int,
    reports: Sequence[HostReport],
    *,
    blamed: Sequence[int] = (),
    reason: str = "",
    now: float,
    attempt: int = 1,
) -> Outcome:
    """Judge a gang of `hosts` hosts.

    Promises: (1) a job succeeds only with a RETURNED report of every host and the leader's result;
    (2) a host without a report counts as lost; (3) `blamed` is final if the gang's state machine
    has named the first failure, otherwise hosts are ordered by `blame_rank`, then by time of end;
    (4) a host that its cluster asked to end only because another host failed is not called evicted.
    """
    by_host = {r.host: r for r in reports}
    missing = "The host ended without a report."
    full = tuple(
        by_host.get(i, HostReport(host=i, exit=Exit.AGENT_LOST, detail=missing))
        for i in range(hosts)
    )
    leader = next((r for r in full if r.is_first), full[0])
    if all(r.ok for r in full) and leader.result_digest:
        return Outcome(
            Verdict.SUCCEEDED,
            reports=full,
            result_digest=leader.result_digest,
            result_size_bytes=leader.result_size_bytes,
            ended_at=now,
            attempt=attempt,
        )
    guilty = tuple(blamed) or _find_first_failures(full)
    first = next((r for r in full if guilty and r.host == guilty[0]), None)
    cancelled = first is not None and first.exit is Exit.CANCELLED
    why = reason or (
        f"host {first.host}: {first.detail or first.exit}" if first else "the leader left no result"
    )
    if cancelled:
        why = reason or (first.detail if first else "") or "the job was cancelled"
    return Outcome(
        Verdict.CANCELLED if cancelled else Verdict.FAILED,
        blamed=() if cancelled else guilty,
        reason=why,
        reports=full if first is None else tuple(_excuse_evicted(r, first) for r in full),
        ended_at=now,
        attempt=attempt,
    )


def _excuse_evicted(report: HostReport, first: HostReport) -> HostReport:
    """Explain the end of a host that its cluster asked to end after another host had failed. The
    host's exit stays EVICTED, because its machine may be lost as well."""
    if report.exit is not Exit.EVICTED or first.exit in (Exit.EVICTED, Exit.CANCELLED):
        return report
    detail = f"Its cluster asked it to end after host {first.host} had failed."
    return replace(report, detail=detail)


def judge_leaderless(
    hosts: int,
    reports: Sequence[HostReport],
    *,
    backend_reports: Sequence[HostReport] = (),
    reason: str = "",
    led: bool = True,
    head: bool = False,
    now: float,
    attempt: int = 1,
) -> Outcome:
    """Judge a gang whose leader (host 0 or a head) was lost before it could judge.

    Args:
        hosts: number of hosts of the gang.
        reports: reports by the hosts themselves.
        backend_reports: the backend's reports, used for hosts that have not reported.
        reason: the backend's reason for the loss; "" if it has none.
        led: True if the gang was ever led, according to its events.
        head: True if a program that is not a host led the gang.
        now: seconds since the epoch.
        attempt: the last attempt.

    Promises: (1) a gang whose hosts have all returned has succeeded; (2) a gang that never ran,
    or that was cancelled, ended as the backend says; (3) otherwise host 0 is to blame, whatever the
    other hosts reported, because they had lost their leader; (4) a failure that host 0 itself
    reported stands, and if a head led the gang, so does the failure of any function; (5) a host
    that the backend cannot start is to blame, and hosts that waited for it are not.
    """
    outcome = judge(hosts, reports, now=now, attempt=attempt)
    if outcome.ok:
        return outcome
    ends_job = [r for r in reports if program_code(r) is ProgramCode.CODE_FAILED]
    own = next(iter(ends_job if head else [r for r in reports if r.host == 0]), None)
    if own is not None and own.exit.kind.rank < CONSEQUENCE_RANK and not own.ok:
        return judge(hosts, reports, blamed=(own.host,), now=now, attempt=attempt)
    reported = {r.host for r in reports}
    others = [r for r in backend_reports if r.host not in reported]
    unable = [r for r in others if r.exit is Exit.SETUP_FAILED]
    if unable:
        blamed = tuple(r.host for r in unable)
        rest = [HostReport(h, Exit.STOPPED) for h in range(hosts) if h not in reported | {*blamed}]
        reports_now = [*reports, *unable, *rest]
        return judge(hosts, reports_now, blamed=blamed, reason=reason, now=now, attempt=attempt)
    lost = tuple(r.host for r in others if r.exit is Exit.AGENT_LOST)
    if lost and not led and not reports:
        return judge(hosts, others, blamed=lost, reason=reason, now=now, attempt=attempt)
    if others and not reports and all(r.exit is Exit.NEVER_JOINED for r in others):
        blamed = tuple(r.host for r in others)
        rest = [HostReport(h, Exit.NEVER_JOINED) for h in range(hosts) if h not in blamed]
        return judge(
            hosts, [*others, *rest], blamed=blamed, reason=reason, now=now, attempt=attempt
        )
    stopped = {r.host for r in reports if r.exit in (Exit.STOPPED, Exit.REFORMED)}
    cancelled = [
        r for r in backend_reports if r.exit is Exit.CANCELLED and r.host not in reported - stopped
    ]
    if cancelled:
        all_reports = [*reports, *others, *cancelled]
        return judge(hosts, all_reports, reason=reason, now=now, attempt=attempt)
    if head:
        why = "the head, which led the job, was lost" + (f": {reason}" if reason else "")
        hearsay = HostReport(0, Exit.AGENT_LOST, why)
        rest = [r for r in (*reports, *others) if r.host != 0]
        verdict = judge(hosts, [hearsay, *rest], blamed=(0,), reason=why, now=now, attempt=attempt)
        return replace(verdict, given_up=why)
    fault = next((r.detail for r in others if r.host == 0 and r.detail), "")
    detail = fault or "The leader of the job ended without storing an outcome."
    leader = HostReport(0, Exit.AGENT_LOST, detail)
    rest = [r for r in (*reports, *others) if r.host != 0]
    why = f"{name_of((0,), hosts)}, which led the job, was lost" + (f": {fault}" if fault else "")
    return judge(hosts, [leader, *rest], blamed=(0,), reason=why, now=now, attempt=attempt)


def _find_first_failures(reports: Sequence[HostReport]) -> tuple[int, ...]:
    failed = [r for r in reports if not r.ok]
    if not failed:
        return ()
    rank = min(map(blame_rank, failed))
    worst = [r for r in failed if blame_rank(r) == rank]

    def key(report: HostReport) -> tuple[float, int]:
        # If no host caused the exit, the order in which hosts ended says nothing.
        at = 0.0 if report.exit.kind.of_the_job else report.ended_at or float("inf")
        return at, report.host

    return tuple(r.host for r in sorted(worst, key=key))


def name_of(hosts: Sequence[int], of: int) -> str:
    """Return "host 2 of 4", "hosts 0, 2-3 of 4" or "all 4 hosts"."""
    return f"all {of} hosts" if len(hosts) == of > 1 else f"{name_hosts(hosts)} of {of}"


def name_hosts(hosts: Iterable[int]) -> str:
    """Return "host 3" or "hosts 0, 2-5"; if there are very many, name the first and count the
    others."""
    runs = _find_runs(sorted(set(hosts)))
    names = ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS]
    )
    more = sum(last - first + 1 for first, last in runs[_MAX_RUNS:])
    names += f" and {more} more" if more else ""
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"host {names}" if one else f"hosts {names}"


def _find_runs(ordered: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for host in ordered:
        if runs and host == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], host)
        else:
            runs.append((host, host))
    return runs
