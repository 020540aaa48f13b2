"""The agent of a host whose worker may stay for the next attempt of an elastic job.

In: as an `Agent`, and what the attempt before has left. Out: a worker that has left its world and
waits, or one that has ended.

    function runs ──gang stopped──> freed ──it has ended──> leaves its world ──> stays
                                      └──────────────── too slow, or it cannot ────────> killed
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kinetic._core.exits import Exit
from kinetic._core.gang.messages import Activity, HostView
from kinetic._core.gang.patience import patience_with
from kinetic._core.preemption import LOOKS, NOTICE, SEEN
from kinetic._host.agent.loop import Agent
from kinetic._host.agent.mountpoints import Mountpoints
from kinetic._host.agent.start_message import ROOM_FILE
from kinetic._host.agent.workspace import Workspace
from kinetic._host.channel import Message, WorkerEvent

_MARKS = (ROOM_FILE, NOTICE, LOOKS, SEEN)
"""What an attempt leaves in the host's folder."""


class RetainedWorkspace(NamedTuple):
    """What stays with a worker: the folder of its host, and the folders that it has mounted on."""

    workspace: Workspace
    mountpoints: Mountpoints


class StayingAgent(Agent):
    """One attempt."""

    def __init__(self, *args: Any, kept: RetainedWorkspace | None, **more: Any) -> None:
        """`kept`: by the worker, from the attempt before; None for a new one."""
        super().__init__(*args, **more)
        self._before = kept
        self._leaves = False
        place = self._who.assignment
        self._can_leave = place is not None and bool(place.service)
        elastic = self._plan.elastic_gang
        self._patience = patience_with("auto" if elastic is None else elastic.survivors)
        if kept is not None:
            self._armed, self._mountpoints = True, kept.mountpoints

    @property
    def must_stay(self) -> bool:
        """Whether a host whose worker does not stay is lost."""
        elastic = self._plan.elastic_gang
        return self._can_leave and elastic is not None and elastic.survivors == "keep"

    @property
    def left(self) -> RetainedWorkspace | None:
        """For the next attempt; None if the worker has ended."""
        return RetainedWorkspace(self._workspace, self._mountpoints) if self.kept else None

    def _move_in(self) -> None:
        if self._before is None:
            super()._move_in()
            return
        self._workspace = self._before.workspace
        for name in _MARKS:
            (self._workspace.root / name).unlink(missing_ok=True)

    def _stop(self, view: HostView) -> None:
        runs = self._end is None and self._state is Activity.RUNNING
        if not self._may_stay(view) or self._preemption.told:
            super()._stop(view)
        elif runs:
            self._stopping, self._kill_at = True, time.monotonic() + self._patience.free_s
            self._worker.terminate()
            self._worker.free(self._who.attempt)
        elif self._end is None and self._armed and not self._started:
            self._stopping = self.kept = True
            self._conclude()
        else:
            super()._stop(view)

    def _may_stay(self, view: HostView | None) -> bool:
        """Whether it is another host that ends this attempt."""
        stopped = view is not None and view.stop_exit is Exit.STOPPED
        return (
            self._can_leave and stopped and not self._preemption.is_ours and not self._worker.gone
        )

    def _let_go(self) -> None:
        if self.kept or self._leaves:
            return
        if self._end is not None and self._may_stay(self._view):
            self._have_it_leave()
        else:
            super()._let_go()

    def _dismiss(self, grace_s: float) -> None:
        if self._can_leave and self._report is not None and self._report.exit is Exit.LEFT:
            self._all_done = True
            self._have_it_leave()
        else:
            super()._dismiss(grace_s)

    def _have_it_leave(self) -> None:
        self._leaves, self._kill_at = True, time.monotonic() + self._patience.leave_s
        self._worker.channel.send({"stay": True})

    def _handle(self, message: Message) -> None:
        if message["event"] == WorkerEvent.FREE:
            self.kept, self._kill_at = True, None
        elif message["event"] == WorkerEvent.CANNOT_STAY:
            self._tell_of_another(str(message["detail"]))
        else:
            super()._handle(message)

    def _kill_late(self) -> None:
        if self._leaves:
            self._tell_of_another(
                f"JAX did not leave its world within {self._patience.leave_s:g} s"
            )
        elif self._stopping and self._end is None and not self._preemption.told:
            self._tell_of_another(f"the function did not end within {self._patience.free_s:g} s")
        self._worker.kill()

    def _tell_of_another(self, why: str) -> None:
        self._log.say(f"kinetic: this host gets a new process for the next attempt: {why}.")

    def _clean_up(self) -> None:
        if not self.kept:
            super()._clean_up()
            return
        for tee in self._tees:
            tee.drain()
        self._log.close()
        self._reserve.unlink(missing_ok=True)
