"""Saves to the local tier: copy the state at once, commit it on all hosts in the background.

All hosts end up with the same last committed step.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kinetic._in_job.checkpoint import opening
from kinetic._in_job.checkpoint.local_tier import LocalSaveFailed, LocalTier, measure_size
from kinetic._in_job.checkpoint.pieces import Local
from kinetic._in_job.checkpoint.saving_mark import SavingMark
from kinetic._in_job.checkpoint.tree import TreeState
from kinetic._in_job.peers import Peers
from kinetic.errors import CheckpointError

_log = logging.getLogger(__name__)


class Due(NamedTuple):
    """A step that is due to be saved.

    Attributes:
        number: Number of the save, the same on all hosts.
        step: Step of the training run.
        state: State after the step.
        position: Position of the iterator, or None.
        metrics: Metrics of a step that goes to the persistent tier as well; else None.
    """

    number: int
    step: int
    state: TreeState
    position: Any
    metrics: Mapping[str, float] | None = None


class LocalSaves:
    """Saves steps to the local tier, one at a time, on all hosts.

    If one host has no room for a step, all hosts drop the step, keep the previous one, and warn
    once. Training goes on.

    Args:
        tier: This host's local tier.
        writer: Id of this run, stored with each step.
        peers: The hosts.
        warn: Prints a warning to the job's output.
    """

    def __init__(
        self, tier: LocalTier, writer: str, peers: Peers, warn: Callable[[str], None]
    ) -> None:
        self._tier = tier
        self._writer = writer
        self._peers = peers
        self._numbers = itertools.count()
        self._mark = SavingMark("local")
        self._error: CheckpointError | None = None
        self._warn = warn
        self._has_warned = False
        self._is_idle = threading.Event()
        self._is_idle.set()

    def prepare(self, state: TreeState) -> None:
        """Reserve memory for the first save of a state of this size, in the background."""
        self._start(self._prepare, measure_size(state))

    def begin(self, due: Due) -> None:
        """Wait for the previous save, then copy the state, which may change afterwards.

        Raises:
            CheckpointError: This save cannot begin, or the previous one has failed.
        """
        self.wait()
        local: Local | None = None
        failed = ""
        self._mark.set(due.step)
        try:
            local = self._tier.stage(due.step, self._writer, self._peers.count, due.state)
        except LocalSaveFailed as error:
            failed = str(error)
        except BaseException:
            self._mark.clear()
            raise
        self._start(self._finish, due, local, failed)

    def wait(self) -> None:
        """Wait until the last step is committed on all hosts.

        Raises:
            CheckpointError: The step could not be written.
        """
        # Not `Thread.join`: once a signal has interrupted a join, later joins return before the
        # thread has ended.
        self._is_idle.wait()
        if self._error is not None:
            raise self._error

    def _start(self, act: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                act(*args)
            finally:
                self._is_idle.set()

        self._is_idle.clear()
        threading.Thread(target=run, name="kinetic-local-checkpoint", daemon=True).start()

    def _finish(self, due: Due, local: Local | None, failed: str) -> None:
        try:
            data = gather_positions(self._peers, f"local-positions/{due.number}", due.position)
            if local is not None:
                try:
                    self._tier.commit(replace(local, data=data, metrics=due.metrics))
                except LocalSaveFailed as error:
                    failed = str(error)
            if self._is_committed(failed):
                self._tier.retire(due.step)
            elif not failed:
                self._tier.withdraw(due.step)
            self._prepare(measure_size(due.state))
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a peer is lost: keep the previous step
            _log.debug("the local checkpoint of step %d was not committed: %s", due.step, error)
        finally:
            self._mark.clear()

    def _is_committed(self, failed: str) -> bool:
        """True if all hosts have committed this step. `failed`: why this host has not, or ""."""
        number = next(self._numbers)
        # Alternate between two folders: a host may begin its next save while others still read.
        folder = f"local-failed/{number % 2}"
        if failed:
            self._peers.set(f"{folder}/{self._peers.index}", f"{number} {failed}")
        self._peers.wait_at_barrier(f"local/{number}", opening.LIMIT_S)
        answers = {host: text.split(" ", 1) for host, text in self._peers.get_all(folder).items()}
        reasons = {host: reason for host, (save, reason) in answers.items() if save == str(number)}
        if reasons and not self._has_warned:
            self._has_warned = True
            host, reason = min(reasons.items())
            self._warn(
                f"host {host}: {reason} The training goes on, and the previous local checkpoint is "
                "kept. Further failures are not reported."
            )
        return not reasons

    def _prepare(self, size_bytes: int) -> None:
        try:
            self._tier.prepare(size_bytes)
        except CheckpointError as error:
            _log.debug("%s", error)  # The next save allocates the memory itself.


def gather_positions(hosts: Peers, name: str, position: Any) -> list[Any]:
    """Return the iterator positions of all hosts, which must all call this; [] without
    iterators."""
    if position is None:
        return []
    values = [json.loads(text) for text in opening.exchange(hosts, name, json.dumps(position))]
    hosts.wait_at_barrier(f"{name}/read", opening.LIMIT_S)
    if hosts.index == 0:
        hosts.forget(name)
    return values
