"""The life of one gang, as a pure state machine: no I/O, no clock, no gRPC.

In: joins, heartbeats, reports, deaths, requests of users, and the time. Out: a `HostView` per host,
events, the first failure.

    JOINING ──all joined──> RUNNING ──all returned──> FINISHED
       └──────failure, cancel, time out──────> STOPPING ──every host reported or lost──> FINISHED

Promises:
    1. No host sees "ready" before every host has joined.
    2. The first failure is a cause if one was reported before the stop; else a host that fell
       silent; else the hosts that their cluster took away first; else a consequence.
    3. After a stop every host reports within `grace_s` + `report_s`, or is given up, so that the
       gang always finishes.
    4. A host without a sign of life for `heartbeat_timeout_s` is lost, whatever its connection
       does. With `sees_deaths`, its silence only causes a notice, and `hang_timeout_s` ends it.
    5. Every call is idempotent. A clock that runs backwards counts as standing still, and time in
       which the gang was not watched counts against no host.
    6. A call costs O(1), a sweep at most O(hosts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import (
    ABORTED_RANK,
    CONSEQUENCE_RANK,
    EVICTED_RANK,
    SILENT_RANK,
    Exit,
)
from kinetic._core.gang import blame, stops
from kinetic._core.gang.hangs import HangWatch
from kinetic._core.gang.members import Roster
from kinetic._core.gang.messages import Activity, GangPhase, GangSpec, Heartbeat, HostView
from kinetic._core.gang.programs import Difference, ProgramNote, ProgramWatch
from kinetic._core.gang.rendezvous import FailureWindow
from kinetic._core.gang.stops import Stop
from kinetic._core.outcome import HostReport
from kinetic.errors import UsageError

_INTERVALS = 10
"""Number of heartbeats that an agent sends within `heartbeat_timeout_s`."""
_LATE_INTERVALS = 3
"""Number of missed heartbeats after which a host is silent if another host has just lost a peer."""
_MAX_STACKS = 256 * 1024

__all__ = ["Activity", "Gang", "GangPhase", "GangSpec", "Heartbeat", "HostView"]


class Gang:
    """The state machine of one gang. Not thread-safe."""

    def __init__(self, spec: GangSpec, now: float) -> None:
        if spec.hosts < 1:
            raise UsageError(f"A job needs at least one host, not {spec.hosts}.")
        self.spec = spec
        self.phase = GangPhase.JOINING
        self.version = 1
        self.stop_reason = ""
        self.first_failure: tuple[int, ...] = ()
        self.unwanted = False
        self._hosts = Roster(spec.hosts)
        self._now = self._started = now
        self._programs = ProgramWatch(spec.hosts)
        self._hangs = HangWatch(spec, self._hosts, self._programs, now)
        self._watched = 0.0
        self._silent: tuple[int, ...] = ()
        self._notice = ""
        self._ready_at: float | None = None
        self._window = FailureWindow(spec.peers_window_s, repeats=spec.repeats)
        self._stop_exit: Exit | None = None
        self._stop_exits: Mapping[int, Exit] = {}
        self._blamed_rank: int | None = None
        self._give_up_at = 0.0
        self._stacks_request = 0
        self._reform_requested = self._hung = False
        self._said_differences: list[Difference] = []
        self._events: list[GangEvent] = []
        self._views: dict[Exit | None, HostView] = {}

    # --- from hosts -------------------------------------------------------------------------------

    def join(
        self, host: int, incarnation: str, address: str, now: float, *, ran_s: float = 0.0
    ) -> None:
        """Handle the join of a host whose function has run for `ran_s` already. Idempotent for one
        incarnation; another incarnation means that the first agent has died."""
        member = self._hosts[host]
        if not incarnation:
            raise UsageError(
                f"The agent of host {host} joined without an incarnation, its name for this start."
            )
        self._advance(now)
        member.heard_at = self._watched
        if not member.joined:
            self._enroll(host, incarnation, address, ran_s)
        elif member.incarnation != incarnation:
            member.incarnation = incarnation
            self.mark_lost(host, "the host was restarted: a second agent joined in its place", now)

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Handle a heartbeat, which does not count as a join."""
        member = self._hosts[beat.host]
        self._advance(now)
        member.heard_at = self._watched
        member.beat = beat.clip_line()
        self._hangs.note_beat(member)

    def mark_connected(self, host: int, now: float) -> None:
        """Handle the first or a new connection of a host."""
        self._advance(now)
        self._hosts[host].connected, self._hosts[host].heard_at = True, self._watched
        if self.phase is GangPhase.STOPPING:
            self._give_up_absent()

    def mark_disconnected(self, host: int, now: float) -> None:
        """Handle a broken connection: the host may reconnect. Until then, a host that has not
        joined yet need not send signs of life."""
        self._advance(now)
        self._hosts[host].connected = False

    def report(self, report: HostReport, now: float) -> None:
        """Handle the report of a host that has ended. The host's first report counts, unless it
        only says "stopped" or "lost" and a later report has the cause."""
        member = self._hosts[report.host]
        self._advance(now)
        if member.report is not None and not blame.improves(report, member.report):
            return
        if report.announced and member.joined:
            member.announced = report
            return self._fail_host(report)
        if self.spec.joins_late and report.started_at and not self.ready:
            self._enroll(report.host, "reported", "", report.ran_s)
        if not report.stacks:
            report = replace(report, stacks=member.stacks_to_keep(report.exit, hung=self._hung))
        if self._stop_exits.get(report.host) is Exit.DIFFERED:
            report = stops.blame_difference(report, self.stop_reason)
        self._hosts.record(member, report)
        self._emit(EventKind.REPORT, report.host, report.detail, exit=report.exit)
        if report.ok:  # The host runs no more programs.
            has_ended = self._hosts.returned == self.spec.hosts
            self._programs.find_difference(self._now, is_over=True, stands=has_ended)
            self._say_difference()
        self._fail_host(report)

    def _fail_host(self, report: HostReport) -> None:
        self._count_failure(report)
        self._check_completion()

    def mark_lost(self, host: int, detail: str, now: float) -> None:
        """Handle the death of a host's agent. Even a host that has returned must live until all
        have returned."""
        self._hosts[host]  # raises for an unknown host
        self._advance(now)
        if self._lose(host, detail):
            self._check_completion()

    def stacks(self, host: int, request: int, text: str, now: float) -> None:
        """Handle a host's answer to a request for stacks. Of a long text, only the end is stored,
        which has the main thread."""
        member = self._hosts[host]
        self._advance(now)
        if member.stacks_request < request <= self._stacks_request:
            member.stacks_request, member.stacks = request, text[-_MAX_STACKS:]

    def note_programs(self, host: int, notes: tuple[ProgramNote, ...], now: float) -> None:
        """Record programs that a host runs for the first time. Idempotent."""
        self._hosts[host]  # raises for an unknown host
        self._advance(now)
        for note in notes:
            self._programs.note(host, note, self._now)
        self._say_difference()

    # --- from users -------------------------------------------------------------------------------

    def cancel(self, detail: str, now: float) -> None:
        """Stop the gang at a user's request. The request does not change the end of a gang that is
        already stopping, but prevents its next attempt."""
        self._advance(now)
        self.unwanted = True
        self._stop(Stop(Exit.CANCELLED, detail or "cancelled"))

    def request_reform(self) -> None:
        """Ask the function to end at its next step, so that more slices can take part in the next
        attempt. Idempotent."""
        if self.phase is GangPhase.RUNNING and not self._reform_requested:
            self._reform_requested = True
            self._bump_version()

    def request_stacks(self, now: float) -> int:
        """Ask all hosts for their stacks; return the number of the request, for `stacks_of`."""
        self._advance(now)
        self._stacks_request += 1
        self._bump_version()
        self._emit(EventKind.STACKS, None, f"request {self._stacks_request}")
        return self._stacks_request

    def stacks_of(self, request: int) -> dict[int, str]:
        """Return the answers to this or a later request, by host."""
        return self._hosts.answers(request)

    def stacks_missing(self, request: int) -> tuple[int, ...]:
        """Return the running hosts that have not answered yet."""
        return self._hosts.find_unanswered(request)

    # --- time -------------------------------------------------------------------------------------

    def sweep(self, now: float) -> tuple[GangEvent, ...]:
        """Let time pass, and return the events since the last sweep."""
        self._advance(now)
        if self.phase is GangPhase.STOPPING and self._now >= self._give_up_at:
            self._give_up()
        if self.phase is not GangPhase.FINISHED:
            self._watch_silence()
        if self.phase in (GangPhase.JOINING, GangPhase.RUNNING):
            self._programs.find_difference(self._now)
            self._say_difference()
            self._watch_live()
        events, self._events = tuple(self._events), []
        return events

    def _watch_silence(self) -> None:
        limit_s = self.spec.heartbeat_timeout_s
        silent = self._hosts.find_silent(self._watched - limit_s)
        if self.spec.sees_deaths:  # A silent agent is alive: no loss unless it hangs for too long.
            hosts = tuple(sorted(host for _, host in silent))
            if hosts and hosts != self._silent:
                why = (
                    f"no sign of life for {limit_s:g} s: all processors are busy, or its process "
                    "is stopped."
                )
                self._send_notice(f"{stops.name_by_slice(hosts, self.spec)}: {why}", hosts)
            self._silent = hosts
            limit_s = max(limit_s, self.spec.hang_timeout_s or math.inf)
            silent = self._hosts.find_silent(self._watched - limit_s)
        self._lose_all(silent, f"fell silent: no sign of life for {limit_s:g} s")

    def _send_notice(self, notice: str, hosts: tuple[int, ...] = ()) -> None:
        self._notice = notice
        self._emit(EventKind.WAITING, None, notice, hosts=hosts)
        self._bump_version()

    def _watch_live(self) -> None:
        if self._window.waits_for_peers:
            if self._window.are_peers_late(self._now):
                self._stop_failed()
        elif self._window.waits_since is not None:
            self._close_window(*self._window.waits_since)
        elif self.phase is GangPhase.JOINING:
            # Without a session, a host that its leader sees may still be starting.
            is_starting = self.spec.sees_deaths and not self.spec.turn
            first_sign_s = None if is_starting else self.spec.first_sign_s
            if self._now - self._started >= self.spec.start_timeout_s:
                self._stop_unready()
            elif first_sign_s is not None and self._watched >= first_sign_s:
                late = f"nothing was heard from it within {first_sign_s:g} s"
                self._lose_all(self._hosts.find_unheard(), late)
        elif self._has_run(self.spec.timeout_s):
            self._stop(Stop(Exit.TIMEOUT, f"the job ran longer than its {self.spec.timeout}"))
        elif self._has_run(self.spec.budget_s):
            self._stop(Stop(Exit.OVER_BUDGET, f"the job has used up its {self.spec.budget}"))
        else:
            self._watch_hangs()

    def _say_difference(self) -> None:
        for difference in (self._programs.values, self._programs.difference):
            if difference is not None and difference not in self._said_differences:
                self._said_differences.append(difference)
                self._notice = difference.sentence
                self._emit(EventKind.PROGRAMS, None, difference.sentence, hosts=difference.hosts)
                self._bump_version()
                if self.spec.is_strict:
                    self._stop_different(difference)

    def _stop_different(self, difference: Difference) -> None:
        """Stop because hosts differ, even if some of them have returned already."""
        if self._stop_exit is not None:
            return
        sentence, hosts = difference
        for member in map(self._hosts.__getitem__, hosts):
            if member.report is not None:
                self._hosts.record(member, stops.blame_difference(member.report, sentence))
        self._blamed_rank = None
        self._stop(Stop(Exit.STOPPED, sentence, hosts, dict.fromkeys(hosts, Exit.DIFFERED)))

    def _watch_hangs(self) -> None:
        step = self._hangs.step(self._now)
        self._say_difference()
        if step.event is not None:
            kind, detail, hosts = step.event
            if kind is EventKind.WAITING:
                self._send_notice(detail, hosts)
            else:
                self._emit(kind, None, detail, hosts=hosts)
        if step.asks:
            self._hangs.note_request(self.request_stacks(self._now), self._now)
        if step.stop is not None:
            self._stop(step.stop)

    # --- views ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if every host has joined."""
        return self._ready_at is not None

    @property
    def finished(self) -> bool:
        """True if every host has reported or is lost."""
        return self.phase is GangPhase.FINISHED

    @property
    def urgent(self) -> bool:
        """True if a decision is due soon, so that the gang must be swept more often."""
        awaits = self._window.is_open or self._hangs.awaits_stacks or self._programs.is_due
        return awaits or self.phase is not GangPhase.RUNNING

    @property
    def reports(self) -> tuple[HostReport, ...]:
        """The reports received so far, by host."""
        return self._hosts.reports

    def view(self, host: int) -> HostView:
        """Return the view to send to a host."""
        self._hosts[host]  # raises for an unknown host
        stop_exit = self._stop_exits.get(host, self._stop_exit)
        if stop_exit not in self._views:
            self._views[stop_exit] = self._make_view(stop_exit)
        return self._views[stop_exit]

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the gang for display, as plain JSON."""
        return {
            "phase": str(self.phase),
            "attempt": self.spec.attempt,
            "slices": list(self.spec.slices),
            "ready": self.ready,
            "running_s": 0.0 if self._ready_at is None else round(self._now - self._ready_at, 3),
            "stop_reason": self.stop_reason,
            "first_failure": list(self.first_failure),
        } | self._hosts.describe(self._watched)

    def _make_view(self, stop_exit: Exit | None) -> HostView:
        is_taken_away = any(rank == EVICTED_RANK for rank, _ in self._window.failures)
        saves = is_taken_away or stop_exit is Exit.OVER_BUDGET
        return HostView(
            version=self.version,
            ready=self.ready,
            addresses=self._hosts.addresses if self.ready else (),
            stop=stop_exit is not None,
            stop_exit=stop_exit,
            stop_reason=self.stop_reason,
            grace_s=self.spec.grace_s,
            stacks_request=self._stacks_request,
            all_done=self._hosts.returned == self.spec.hosts,
            notice=self._notice,
            preempted=saves and not self.finished,
            reform_requested=self._reform_requested,
        )

    # --- failures ---------------------------------------------------------------------------------

    def _lose(self, host: int, detail: str) -> bool:
        """Record that a host died, and return True. Do nothing and return False if the host has
        reported and is no longer needed."""
        member = self._hosts[host]
        needed = self.phase is GangPhase.RUNNING and member.report is not None and member.report.ok
        if member.report is not None and not needed:
            return False
        if needed:
            detail = f"{detail}; its function had returned, but other hosts were still running"
        how = member.exit_if_lost(self._stop_exits.get(host, self._stop_exit))
        report = self._substitute_report(host, how, detail)
        self._emit(EventKind.LOST, host, detail, exit=report.exit)
        self._hosts.record(member, report)
        self._count_failure(report)
        return True

    def _count_failure(self, report: HostReport) -> None:
        """Count a report as a failure; after a stop, let it replace the first failure if it is a
        more likely cause."""
        rank, failures = self._window.rank_of(report, self._now), self._window.failures
        if rank > CONSEQUENCE_RANK or (rank, report.host) in failures:
            return
        if self.phase in (GangPhase.JOINING, GangPhase.RUNNING):
            failures.append((rank, report.host))
            self._emit(EventKind.FAILURE, report.host, blame.why(report), exit=report.exit)
            self._bump_version()
        elif self._blamed_rank is not None and rank < self._blamed_rank:
            self._correct_blame(report, rank)

    def _correct_blame(self, report: HostReport, rank: int) -> None:
        # A cause that is reported after the stop replaces a consequence on any host as the failure
        # to blame, or the silence of the same host, but not the earlier silence of another host.
        if (self._blamed_rank or 0) >= ABORTED_RANK or report.host in self.first_failure:
            self.first_failure, self._blamed_rank = (report.host,), rank
            self.stop_reason = stops.first_failure(self._hosts, (report.host,), self.spec)
            self._bump_version()

    def _check_completion(self) -> None:
        """Stop at once on a cause or a silent host. On a consequence, or a host that is taken away,
        wait for the cause. Finish when all hosts have ended."""
        window = self._window
        if self.phase in (GangPhase.JOINING, GangPhase.RUNNING) and window.failures:
            if self._hosts.reported == self.spec.hosts:
                self._stop_failed()
            elif window.first[0] <= SILENT_RANK:
                last = self._hosts[window.failures[-1][1]].report
                runs = self.phase is GangPhase.RUNNING
                if not (runs and last and window.wait_for_peers(last, self._now)):
                    self._stop_failed()
            elif window.waits_since is None:
                window.waits_since = self._now, self._watched
        elif self._hosts.reported == self.spec.hosts and self._hosts.has_reformed:
            self._stop(Stop(Exit.STOPPED, "the function left its attempt so that a slice can join"))
        self._finish_if_complete()

    def _close_window(self, since: float, opened: float) -> None:
        """Stop because of a consequence, reported at `since` (in watched time at `opened`), once
        every host without a report has given a sign of life since, or is silent."""
        if self._now - since < self.spec.blame_window_s:
            return
        unproven = [(heard_at, i) for heard_at, i in self._hosts.last_heard() if heard_at <= opened]
        late_s = _LATE_INTERVALS * self.spec.heartbeat_timeout_s / _INTERVALS
        silent = [(heard_at, i) for heard_at, i in unproven if self._watched - heard_at > late_s]
        if silent and not self.spec.sees_deaths:
            self._lose_all(
                silent, f"fell silent for more than {late_s:g} s while another host lost its peer"
            )
        elif len(silent) == len(unproven):  # No further sign of life is expected.
            self._blame_absent()
            self._stop_failed()

    def _blame_absent(self) -> None:
        """Blame hosts that never joined instead of an evicted host: a cluster that loses a host
        evicts the others. With `first_sign_s` all hosts are known to exist, so hosts that have not
        joined yet are not blamed."""
        rank, host = self._window.first
        if rank == EVICTED_RANK and self.spec.first_sign_s is None:
            detail = f"It had not joined when the cluster asked the pod of host {host} to end."
            for absent in self._hosts.find_absent():
                self._lose(absent, detail)

    def _lose_all(self, silent: list[tuple[float, int]], detail: str) -> None:
        for _, host in sorted(silent):
            self._lose(host, detail)
        if silent:
            self._check_completion()

    # --- start, stop, finish ----------------------------------------------------------------------

    def _enroll(self, host: int, incarnation: str, address: str, ran_s: float) -> None:
        if not self._hosts[host].joined:
            self._hosts.enroll(self._hosts[host], incarnation, address)
            self._emit(EventKind.JOINED, host, address, ago_s=ran_s)
        is_new = self.phase is GangPhase.JOINING
        if self._hosts.joined == self.spec.hosts and (is_new or ran_s) and not self.finished:
            self.phase = GangPhase.RUNNING if is_new else self.phase
            self._ready_at = self._now - ran_s
            self._bump_version()
            joined = f"all {self.spec.hosts} hosts have joined"
            self._emit(EventKind.READY, None, joined, ago_s=ran_s)

    def _has_run(self, limit_s: float | None) -> bool:
        began = self._ready_at
        return limit_s is not None and began is not None and self._now - began >= limit_s

    def _stop_failed(self) -> None:
        blamed = self._window.blamed
        self._blamed_rank = self._window.first[0]
        self._stop(Stop(Exit.STOPPED, stops.first_failure(self._hosts, blamed, self.spec), blamed))

    def _stop_unready(self) -> None:
        missing = self._hosts.find_absent()
        within = f"did not join within {self.spec.start_timeout_s:g} s"
        for host in missing:
            heard = self._hosts[host].last_heard(self._watched)
            self._report_on_behalf(host, Exit.NEVER_JOINED, f"{within}; {heard}")
        reason = f"{stops.name_by_slice(missing, self.spec)} {within}"
        self._stop(Stop(Exit.STOPPED, reason, missing))

    def _stop(self, stop: Stop) -> None:
        if self.phase in (GangPhase.STOPPING, GangPhase.FINISHED):
            return
        if stop.exit is not Exit.CANCELLED:
            difference = self._programs.find_difference(self._now, is_over=True)
            self._say_difference()
            if self._stop_exit is not None:  # The difference has stopped it.
                return
            causes = ["" if difference is None else difference.sentence]
            if stop.exit in (Exit.TIMEOUT, Exit.OVER_BUDGET):
                values = self._programs.values
                causes = [self._hangs.present_notice, *causes, values.sentence if values else ""]
            for cause in filter(None, causes):
                stop = stops.explain(stop, cause)
        self.phase = GangPhase.STOPPING
        self.first_failure, self.stop_reason = stop.blamed, stop.reason
        self._stop_exit, self._stop_exits = stop.exit, stop.exits
        self._hung = Exit.HANG in stop.exits.values()
        self._give_up_at = self._now + self.spec.grace_s + self.spec.report_s
        self._window.waits_since = None
        self._hangs.forget()
        self._bump_version()
        self._emit(EventKind.STOP, stop.blamed[0] if stop.blamed else None, stop.reason)
        self._give_up_absent()

    def _give_up_absent(self) -> None:
        """Record a report for each host that has not joined, without waiting: the error must arrive
        within seconds. With `joins_late`, the function may run on a host that has not connected."""
        detail = f"had not joined when the gang was stopped: {self.stop_reason}"
        for host in self._hosts.find_absent():
            if self._hosts[host].connected or not self.spec.joins_late:
                self._report_on_behalf(host, self._stop_exit or Exit.STOPPED, detail)
        self._finish_if_complete()

    def _report_on_behalf(self, host: int, how: Exit, detail: str) -> None:
        self._hosts.record(self._hosts[host], self._substitute_report(host, how, detail))
        self._emit(EventKind.REPORT, host, detail, exit=how)

    def _give_up(self) -> None:
        waited_s = self.spec.grace_s + self.spec.report_s
        for _, host in self._hosts.find_in_touch() + self._hosts.find_unheard():
            self._lose(host, f"did not report within {waited_s:g} s of its order to stop")
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._hosts.reported == self.spec.hosts and self.phase is not GangPhase.FINISHED:
            self.phase = GangPhase.FINISHED
            self._bump_version()
            self._emit(EventKind.FINISHED, None, self.stop_reason or "every host returned")

    # --- details ----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        # Watched time stops while this process is frozen or starved, because heartbeats then wait
        # unread in its sockets, and their senders are not silent.
        step = max(0.0, now - self._now)
        self._now += step
        self._watched += min(step, 2 * self.spec.heartbeat_timeout_s / _INTERVALS)

    def _substitute_report(self, host: int, how: Exit, detail: str) -> HostReport:
        stacks = self._hosts[host].stacks_to_keep(how, hung=self._hung)
        return HostReport(host=host, exit=how, detail=detail, stacks=stacks)

    def _bump_version(self) -> None:
        self.version += 1
        self._views.clear()

    def _emit(self, kind: EventKind, host: int | None, detail: str, **more: Any) -> None:
        self._events.append(GangEvent(kind, host, detail, attempt=self.spec.attempt, **more))
