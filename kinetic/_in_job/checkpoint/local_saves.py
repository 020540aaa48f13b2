"""Saves to the local tier: the state is copied at once, and committed on all hosts in the
background.

In: steps with their states, the hosts. Out: on every host the same last step.
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
from kinetic._in_job.checkpoint.local_tier import LocalSaveFailed, LocalTier, size_of
from kinetic._in_job.checkpoint.pieces import Local
from kinetic._in_job.checkpoint.saving_mark import SavingMark
from kinetic._in_job.checkpoint.tree import TreeState
from kinetic._in_job.peers import Peers
from kinetic.errors import CheckpointError

_log = logging.getLogger(__name__)


class Due(NamedTuple):
    """A step that is to be saved.

    Attributes:
        number: of the save, the same on all hosts.
        step: of the training.
        state: after it.
        position: of the iterator, or None.
        metrics: if it is saved to the persistent tier as well; else None.
    """

    number: int
    step: int
    state: TreeState
    position: Any
    metrics: Mapping[str, float] | None = None


class LocalSaves:
    """Saves one step after the other, on all hosts alike.

    Where one host has no room for a step, all hosts give it up, and the step before it stays. That
    costs a warning, not the training.

    Args:
        tier: of this host.
        writer: marks what this run writes.
        peers: the hosts.
        warn: takes what those who read the job's output should know.
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
        """Have memory for a state ready, in the background, when the first one is saved."""
        self._start(self._prepare, size_of(state))

    def begin(self, due: Due) -> None:
        """Copy a state; returns when it may change. Waits for the save before.

        Raises:
            CheckpointError: this save cannot begin, or the one before has failed.
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
            CheckpointError: it could not be written.
        """
        self._is_idle.wait()  # After a `join` that a signal has ended, another one returns at once.
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
            data = of_all_hosts(self._peers, f"local-positions/{due.number}", due.position)
            if local is not None:
                try:
                    self._tier.commit(replace(local, data=data, metrics=due.metrics))
                except LocalSaveFailed as error:
                    failed = str(error)
            if self._is_committed(failed):
                self._tier.retire(due.step)
            elif not failed:
                self._tier.withdraw(due.step)
            self._prepare(size_of(due.state))
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a peer is lost; the step before this one stays
            _log.debug("the local checkpoint of step %d was not committed: %s", due.step, error)
        finally:
            self._mark.clear()

    def _is_committed(self, failed: str) -> bool:
        """Whether all hosts have committed this step; `failed`: why this host has not."""
        number = next(self._numbers)
        # Two places in turn: a host may already be at the next save while another one reads.
        place = f"local-failed/{number % 2}"
        if failed:
            self._peers.set(f"{place}/{self._peers.index}", f"{number} {failed}")
        self._peers.wait_at_barrier(f"local/{number}", opening.LIMIT_S)
        answers = {host: text.split(" ", 1) for host, text in self._peers.get_all(place).items()}
        why = {host: words for host, (save, words) in answers.items() if save == str(number)}
        if why and not self._has_warned:
            self._has_warned = True
            host, words = min(why.items())
            self._warn(
                f"host {host}: {words} The training goes on, and the local checkpoint before this "
                "one stays. This is not said again."
            )
        return not why

    def _prepare(self, size_bytes: int) -> None:
        try:
            self._tier.prepare(size_bytes)
        except CheckpointError as error:
            _log.debug("%s", error)  # the next save tries again


def of_all_hosts(hosts: Peers, name: str, position: Any) -> list[Any]:
    """Return the positions of the iterators of all hosts; empty when none was given."""
    if position is None:
        return []
    values = [json.loads(each) for each in opening.exchange(hosts, name, json.dumps(position))]
    hosts.wait_at_barrier(f"{name}/read", opening.LIMIT_S)
    if hosts.index == 0:
        hosts.forget(name)
    return values
