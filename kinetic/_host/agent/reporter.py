"""The records of a host's end: its report, its value or exception in the store, and the last lines
of its log.

The report comes from `exit_report`; this module completes it with the keys of stored pickles.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.gang import blame, policy
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.log_format import FAILURE, STDERR
from kinetic._core.outcome import HostReport
from kinetic._core.plan import Plan
from kinetic._host.agent import workspace
from kinetic._host.agent.exit_report import last_words
from kinetic._host.agent.log_writer import HostLog, Tee
from kinetic._host.agent.metric_file import MetricFile
from kinetic._host.agent.workspace import Workspace
from kinetic._host.channel import Message
from kinetic._host.identity import Identity
from kinetic._store.base import Store
from kinetic._system import processes
from kinetic.errors import KineticError, StoreFull

LEFTOVER_GRACE_S = 0.2
"""Time that the function's remaining processes have to end by themselves after the worker."""
LEFTOVERS_NAMED = 5
POOLS_S = 2.0
"""Additional time for the processes of a library's pools, which clean up after the library."""
POOL_COMMANDS = (
    b"resource_tracker import main",
    b"forkserver import main",
    b"loky.backend.popen_loky_posix",
)
"""Parts of the command lines of pool processes: trackers of Python and joblib, Python's fork
server, joblib's workers."""

ENDS_QUIETLY = (".Terminated", ".Preempted")
"""Exceptions that only end the function."""


def ends_quietly(pid: int) -> bool:
    """True if a remaining process of the function belongs to a pool or has ended by itself."""
    with contextlib.suppress(OSError):
        command = processes.lasting_command_line(pid)
        return any(words in command for words in POOL_COMMANDS)
    return True  # A process that has ended has no command line.


class Reporter:
    """Writes the end of one host to the store and to its log."""

    def __init__(
        self,
        identity: Identity,
        plan: Plan,
        store: Store,
        *,
        log: HostLog,
        tees: Sequence[Tee],
        metrics: MetricFile,
    ) -> None:
        self._where = identity.job_id, identity.attempt, identity.host
        self._attempt = identity.attempt
        self._place, self._lost_at = identity.assignment, identity.lost_at
        self._is_elastic = plan.elastic_gang is not None
        self._plan = plan
        self._store = store
        self._log = log
        self._tees = tees
        self._metrics = metrics
        self._stored_files: dict[str, tuple[int, int]] = {}
        self._reserve = Path(identity.scratch) / processes.DISK_RESERVE

    # -- the log -----------------------------------------------------------------------------------

    def announce_attempt(self) -> None:
        """Log the start of an attempt other than the first, and why it was needed; for an elastic
        job also its slices."""
        if self._place is None:
            return
        if self._place.notice and not self._place.host:
            self._log.say(f"kinetic: {self._place.notice}")
        if self._is_elastic:
            self._announce_slices(self._place)
            return
        # Only failures use up retries: after a preemption there may be one more attempt.
        number, limit = self._attempt, self._attempt - 1 + self._place.retries_left
        if number > 1:
            why = f": {why}" if (why := self._place.failed_before) else "."
            self._log.say(
                f"kinetic: attempt {policy.name_attempt(number - 1, limit)} failed{why}\n"
                f"kinetic: attempt {policy.name_attempt(number, limit)} begins."
            )

    def _announce_slices(self, place: HostAssignment) -> None:
        most, on = self._plan.options.most_slices, policy.name_slices(place.slices)
        on = f"{on} of {most}" if len(place.slices) < most else f"all {most} slices"
        if place.attempt > 1 or len(place.slices) < most:
            number = policy.name_attempt(place.attempt, self._plan.most_attempts - 1)
            self._log.say(f"kinetic: attempt {number} begins on {on}.")

    def announce_recovery(self, began: float) -> None:
        """Log for how long an elastic job did not run, on the leader only."""
        if self._lost_at and not self._where[2]:
            paused_s = began - self._lost_at
            self._log.say(
                f"kinetic: the function runs again, {paused_s:.1f} s after the interruption."
            )

    def notice(self, text: str) -> None:
        """Log the coordinator's notice of a stall or a difference, on the leader only."""
        job_id, _, host = self._where
        if host == 0:
            self._log.say(f"kinetic: {text} More: kinetic jobs explain {job_id}")

    def tell_of_late_exit(self, stacks: str) -> None:
        """Log that the worker was killed because it kept running after the function had ended, and
        at which line of `stacks`."""
        at = blame.describe_position(stacks) if blame.parse(stacks).frames else ""
        self._log.say(
            f"kinetic: after the function had ended, its process kept running{at}, perhaps in an "
            "exit handler, and was killed."
        )

    def tell_of_preemption(self, left_s: float, why: str = "") -> None:
        """Log that the function has `left_s` s to save, and `why`: by default, a host is lost."""
        why = why or "a host of this job is about to be lost (preempted, or its node is drained)"
        self._log.say(f"kinetic: {why}: the function has {left_s:.0f} s to save.")

    def name_leftovers(self, trees: Collection[int], own: Collection[int] = ()) -> None:
        """Log which processes of the function still ran after its end, although they had time to
        end. Leave out the agent's `own` processes, those in `trees` of processes, and pools, which
        libraries end when the interpreter exits."""
        remaining = processes.await_leaving(LEFTOVER_GRACE_S, own, trees)
        leftovers = [
            f"{processes.name(pid).replace('kinetic-worker', 'fork of the function')} ({pid})"
            for pid in remaining
            if not ends_quietly(pid)
        ]
        if leftovers:
            names = ", ".join(leftovers[:LEFTOVERS_NAMED]) + (
                " and others" if len(leftovers) > LEFTOVERS_NAMED else ""
            )
            self._say_after_output(
                f"kinetic: processes still running after the function ended were killed: {names}"
            )
        elif (
            remaining
            and (late := processes.await_leaving(POOLS_S, own, trees))
            and self._plan.is_verbose
        ):
            pids = ", ".join(map(str, late))
            self._say_after_output(f"kinetic: processes of pools were killed: {pids}")

    def log_failure(self, report: HostReport, discarded: Message) -> None:
        """End the host's log as the output of any failing program ends. Log the exception even if
        the worker's last message was `discarded`: saving a checkpoint may have failed."""
        raised = discarded.get("error")
        if raised and report.error is None and not raised["type_name"].endswith(ENDS_QUIETLY):
            self._say_after_output(raised["traceback"].rstrip())
        # The client does not raise the failure of an attempt that is repeated: every host logs it
        # to stderr, and the next attempt logs why it begins.
        is_last = not (report.exit.kind.retryable and self._may_be_followed(report))
        if self._is_elastic and (not report.exit.kind.code_failed or blame.rank_of(report)):
            return  # The job goes on, or its leader logs why not.
        words = last_words(report)
        if not words or (report.exit is Exit.STOPPED and not is_last):
            return
        self._say_after_output(words, FAILURE if is_last else STDERR)

    def _may_be_followed(self, report: HostReport) -> bool:
        if self._place is None:
            return False
        taken_away = report.exit is Exit.EVICTED and not self._is_elastic
        return taken_away or self._place.retries_left > 0

    def _say_after_output(self, text: str, stream: int = STDERR) -> None:
        for tee in self._tees:
            tee.drain()
        self._log.say(text, stream)

    # -- the store ---------------------------------------------------------------------------------

    def conclude(
        self, report: HostReport, end: Message, *, is_discarded: bool
    ) -> tuple[HostReport, bool]:
        """Store the host's records, and end its log. Return the completed report, and True if the
        store has it. With `is_discarded`, the worker's last message does not count."""
        report = self.store_pickles(report, end)
        self.log_failure(report, end if is_discarded else {})
        self._log.deliver()  # Clients read the output as soon as they see the report.
        self._metrics.deliver()
        is_stored = False
        with contextlib.suppress(KineticError):  # The coordinator gets the report, too.
            self._put(layout.HostKeys(*self._where).report, json.dumps(report.to_json()).encode())
            is_stored = True
        if damaged := end.get("damaged"):
            with contextlib.suppress(KineticError):  # The next submission uploads the blob.
                self._store.delete(layout.blob(damaged))
        return report, is_stored

    def keep_files(self, space: Workspace) -> tuple[int, str]:
        """Store the files that the function wrote into its work folder since the last call. Return
        the number of files stored so far, and a text with their names."""
        key = layout.HostKeys(*self._where).files
        words = workspace.keep_written(space, self._store, key, self._stored_files)
        return len(self._stored_files), words

    def store_pickles(self, report: HostReport, end: Message) -> HostReport:
        """Store the pickled value or exception of the worker's last message; return the completed
        report."""
        try:
            if report.ok:
                self._put_pickle(layout.HostKeys(*self._where).result, end, "result")
            elif report.error is not None:
                key = layout.HostKeys(*self._where).error
                if self._put_pickle(key, end["error"], "error"):
                    return replace(report, error=replace(report.error, key=key))
        except (KineticError, OSError) as error:
            if report.ok:
                return replace(
                    report,
                    exit=Exit.RESULT_UNPICKLABLE,
                    result_digest="",
                    detail=f"The value could not be stored: {error}",
                )
        return report

    def _put_pickle(self, key: str, message: Message, name: str) -> bool:
        """Store the pickle that a message contains, or whose file it names; return False if the
        message has no pickle."""
        if f"{name}_data" in message:
            data: bytes | Path = base64.b64decode(message[f"{name}_data"])
        elif f"{name}_file" in message:
            data = Path(message[f"{name}_file"])
        else:
            return False
        self._put(key, data)
        return True

    def _put(self, key: str, data: bytes | Path) -> None:
        """Store data; on a full disk, free space that the job's supervisor has reserved."""
        for _ in range(2):  # The host's output may take the space that is freed first.
            try:
                self._store.put(key, data)
            except StoreFull:
                processes.free_half(self._reserve)
            else:
                return
        self._store.put(key, data)
