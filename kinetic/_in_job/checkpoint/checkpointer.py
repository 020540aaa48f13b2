"""`kinetic.Checkpointer`: saves the state of a training in two tiers, and brings back the newest
one.

In: a state (a pytree), steps. Out: checkpoints; after a restart the state and the step to go on
with. Used inside a job, on all hosts alike.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from kinetic._core.duration import Duration
from kinetic._core.tracebacks import hide_frames
from kinetic._host.worker import streams, worlds
from kinetic._in_job import elastic, peers, preemption, slices
from kinetic._in_job.checkpoint import (
    arguments,
    foreign,
    local_saves,
    opening,
    persistent,
    pieces,
    positions,
    tree,
)
from kinetic._in_job.checkpoint.local_saves import Due, LocalSaves
from kinetic._in_job.checkpoint.opening import Opened
from kinetic._in_job.checkpoint.persistent import Persistent
from kinetic._in_job.checkpoint.restoring import Restored, Restoring, SavedState
from kinetic._in_job.checkpoint.sync_points import SyncPoints, SyncRequest, find_request
from kinetic._in_job.checkpoint.tree import Leaf
from kinetic._in_job.checkpoint.verifying import ShardDigests
from kinetic._in_job.metrics import mark_step, send_now
from kinetic._system import memory_folder
from kinetic.errors import (
    CheckpointError,
    CheckpointInUse,
    CheckpointMismatch,
    UsageError,
    UsageTypeError,
    a_type,
)

S = TypeVar("S")
_log = logging.getLogger(__name__)
_AFTER_AN_ERROR_S = 10.0
"""How long saves that have begun may take to end when the function has raised."""


class Checkpointer:
    """Saves and restores the state of a training, on all hosts of a job.

    Two tiers: the *persistent* one is a folder or bucket that all hosts share, where Orbax writes.
    The *local* one is a folder in the memory of each host, which is quick to write and read, and
    stays while the job's hosts are restarted. A host that has lost its own part gets it from
    another host that has a copy, as the hosts of other slices have in data-parallel training.

    Every method is called on all hosts, with the same steps.

    Args:
        directory: of the persistent tier, a path or URI; by default `checkpoints` below
            `KINETIC_OUTPUT_DIR`.
        every: save steps divisible by this to the persistent tier; or a length of time ("10m").
        at_least_every: also save to it when nothing was saved there for so long; None for never.
        local_every: save steps divisible by this to the local tier; None to have none.
        keep: how many of the newest persistent checkpoints stay; None for all.
        keep_every: steps divisible by this stay, too.
        best: name of a metric: the best checkpoint by it stays, too.
        best_is: "min" or "max".
        keep_best: how many of the best stay.
        local_directory: this host's folder for the local tier; by default below
            `KINETIC_LOCAL_DIR`, and without that there is no such tier.
        verify: keep digests of what is saved, and check what is restored; what is damaged is not
            restored, but another copy or an older step.

    Raises:
        UsageError: an option cannot work, or there is no directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        every: int | Duration | None = None,
        at_least_every: Duration | None = "10m",
        local_every: int | None = 10,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        best_is: Literal["min", "max"] = "min",
        keep_best: int = 1,
        local_directory: str | os.PathLike[str] | None = None,
        verify: bool = True,
    ) -> None:
        with hide_frames:
            self._cadence = arguments.check_cadence(every, at_least_every, local_every)
            self._directory = arguments.persistent_folder(directory)
            self._keep = arguments.check_keep(keep, keep_every, best, best_is, keep_best)
            local = arguments.folder_in_memory(local_directory, self._directory)
            self._local = None if local_every is None else local
        self._has_job_folder = local_directory is None
        self._verify = verify
        self._opened: Opened | None = None
        self._restoring: Restoring | None = None
        self._sync_points: SyncPoints | None = None
        self._peers: peers.Peers = peers.Alone()
        self._local_saves: LocalSaves | None = None
        self._numbers = itertools.count()
        self._last = self._finished = -1  # steps: saved or restored, saved for good by restore()
        self._pattern: list[Leaf] | None = None  # of restore()
        self._before: list[Leaf] | None = None  # of the save before, since restore()
        self._has_iterator = False  # restore() was given one
        self._casts = False  # restore() may lose numbers
        self._is_closed = self._has_stepped = False
        self._owner = 0  # The process that has opened the tiers; forks of it have only their copy.
        self.restored: Restored | None = None

    @property
    def directory(self) -> str:
        """Of the persistent tier."""
        return self._directory

    @property
    def local_directory(self) -> str | None:
        """Of this host's local tier; None where there is none."""
        return None if self._local is None else str(self._local)

    def restore(
        self,
        state: S,
        *,
        init: Callable[[], S] | None = None,
        data: Any = None,
        cast: bool = False,
        start_from: str | os.PathLike[str] | None = None,
    ) -> tuple[S, int]:
        """Bring back the newest checkpoint of either tier.

        A folder with checkpoints of another program is read as well, and never written to.

        Args:
            state: the state as a new training begins: its structure, shapes and layout over the
                devices are those of the result; what was saved on another mesh is laid out anew.
                Leaves come back as they were saved: weakly typed, as a number, or as an array of
                shape (). Do not use the arrays afterwards: where a device has no room for two
                states, they are freed. `jax.ShapeDtypeStruct`s with shardings stand for arrays.
            init: makes the state of a new training, and is called where nothing was saved.
            data: an iterator with `get_state` and `set_state`, to be put where it was.
            cast: whether arrays may be cast to types that cannot hold all their numbers, as from
                float32 to bfloat16.
            start_from: a folder or URI with checkpoints of another training or program, the newest
                of which is read where this training has not saved anything.

        Returns:
            the state, and the step to go on with. If nothing was saved, what `init` makes, else
            `state` itself, or None where that describes arrays; and 0. 0 also after a checkpoint
            without a number.

        Raises:
            CheckpointMismatch: what was saved does not fit `state` or `data`.
            UsageTypeError: `data` is no such iterator.
            CheckpointInUse: another job writes the folder.
            CheckpointError: the checkpoint cannot be read.
        """
        self._has_iterator, self._casts = data is not None, cast
        if self._has_iterator:
            positions.check(data)
        now = tree.take_apart(state, describes=True)
        opened, self._pattern, self._before = self._open(), now.leaves, None
        if self._local_saves is not None:
            self._local_saves.wait()
        assert self._restoring is not None  # as soon as it is open
        place = None if start_from is None else arguments.absolute(start_from)
        saved = self._restoring.restore(now, cast=cast, start_from=place)
        result: Any = None if now.is_abstract() else state
        if saved is not None:
            result = saved.state
        elif init is not None:
            result = init()
        if opened.local is not None and self._local_saves is not None:
            opened.local.keep_only(None if saved is None else saved.whole)
            if result is not None:
                self._local_saves.prepare(tree.take_apart(result))
        if saved is None:
            return result, 0
        if saved.is_start:
            self.restored = saved.restored
            self._say(f"the training starts from {saved.where}.")
            return result, saved.restored.step + 1
        if data is not None:
            if len(saved.data) not in (0, self._peers.count) and not positions.is_elastic(data):
                self._warn(positions.OF_OTHER_HOSTS.format(len(saved.data), self._peers.count))
            positions.put_back(data, saved.data, self._peers.index, self._peers.count)
        self.restored, self._last = saved.restored, saved.restored.step
        self._say(f"{_name_step(self._last)} is restored from {saved.where}.")
        if saved.unfinished is not None:
            self._finish_save(opened, saved, saved.unfinished.metrics)
        return result, self._last + 1

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        data: Any = None,
        force: bool = False,
    ) -> tuple[str, ...]:
        """Save the state after a step, if it is due; called after every step.

        Returns when the state has been copied out of the devices; it is written in the background.

        Args:
            step: that has been done; `restore` returns the one after it.
            state: with the same structure as that of `restore`.
            metrics: numbers that are kept with persistent checkpoints.
            data: an iterator with `get_state` and `set_state`, whose position is kept.
            force: save to the persistent tier in any case.

        Returns:
            the tiers that the step is being saved to: "local", "persistent", both or none.

        Raises:
            CheckpointError: this save cannot begin, or an earlier one has failed.
            CheckpointMismatch: this first save would not fit the state of `restore`.
            Preempted: a host is taken away, and the step has been saved on all hosts: let it pass.
        """
        return self._save(step, lambda: state, metrics=metrics, data=data, force=force)

    def _save(
        self,
        step: int,
        state_of: Callable[[], Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        data: Any = None,
        force: bool = False,
    ) -> tuple[str, ...]:
        """Save as `save` does a state that is only made if it is due."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise UsageTypeError(f"A step is an int, not {a_type(step)}.")
        self._check_usable()
        mark_step(step)
        if self._opened is None:
            self._open()
            self._begin_without_restore()
        opened, sync_points = self._opened, self._sync_points
        assert opened is not None
        assert sync_points is not None
        requested = sync_points.call()
        if step <= self._last and not (step == self._last and (force or requested)):
            raise CheckpointError(
                f"Step {step} was saved or restored before (the last one is {self._last}). Go on "
                "with the step that restore() returns.",
                step=step,
            )
        if not self._has_stepped and (lost_at := slices.read_variable(slices.LOST_AT)):
            self._say(f"first step after {time.monotonic() - float(lost_at):.1f} s.")
        self._has_stepped = True
        is_asked = force or requested is not None
        to = {
            "local": opened.local is not None and self._cadence.is_local(step),
            "persistent": self._cadence.is_persistent(step, is_requested=is_asked),
        }
        opened.persistent.check()
        if any(to.values()):
            send_now()
            position = None if data is None else positions.take_position(data)
            numbers = arguments.read_metrics(metrics) if to["persistent"] else None
            due = Due(next(self._numbers), step, tree.take_apart(state_of()), position, numbers)
            self._check_structure(due)
            if self._local_saves is not None and to["local"] and step > self._last:
                self._local_saves.begin(due)
            if to["persistent"]:
                data_of_all = local_saves.of_all_hosts(
                    self._peers, f"positions/{due.number}", due.position
                )
                is_new = self._save_for_good(opened, due, data_of_all)
                to["persistent"] = is_new or step == self._finished
            self._last = step
        if requested in (SyncRequest.PREEMPTED, SyncRequest.REFORM):
            self._leave(requested, step)
        return tuple(tier for tier, is_due in to.items() if is_due)

    def wait(self) -> None:
        """Wait until everything that was saved is committed on all hosts.

        Raises:
            CheckpointError: a save has failed.
        """
        if self._local_saves is not None:
            self._local_saves.wait()
        if self._opened is not None:
            self._opened.persistent.wait()

    def close(self) -> None:
        """Wait as `wait` does, and let others write the folder. Idempotent.

        Raises:
            CheckpointError: a save has failed.
        """
        if self._is_closed or self._is_forked():
            return
        try:
            self.wait()
            if self._opened is not None:
                self._opened.persistent.close()
                self._free_memory(self._opened)
        finally:
            self._free()

    def __enter__(self) -> Checkpointer:
        preemption.preempted()  # says that this function looks for it
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._is_forked():
            self._give_up(waits=self._peers.count == 1 or kind.__name__ not in opening.ECHOES)

    # -- beginning and end -------------------------------------------------------------------------

    def _open(self) -> Opened:
        self._check_usable()
        if self._opened is not None:
            return self._opened
        self._owner = os.getpid()
        persistent.orbax()  # whether it is there, before anything is done together
        self._peers = peers.of_this_world()
        self._opened = opening.open_checkpoints(
            self._directory,
            self._local,
            self._keep,
            self._peers,
            verify=self._verify,
            warn=self._warn,
        )
        tier, writer = self._opened.local, self._opened.writer
        if tier is not None:
            self._local_saves = LocalSaves(tier, writer, self._peers, self._warn)
        if slices.job_id():
            opening.unclosed[self] = self.wait
        self._restoring = Restoring(self._opened, self._peers, self._directory, self._warn)
        self._sync_points = SyncPoints(self._peers, find_request, self._cadence.every_s)
        if self._local is None and self._cadence.local_every is not None:
            self._tell_why_not_local()
        return self._opened

    def _tell_why_not_local(self) -> None:
        job = slices.job_id()
        if job and (fault := memory_folder.fault_of(job, "local")):
            self._warn(
                f"there are no local checkpoints, as this machine gives its hosts no folder in "
                f"memory ({fault}). Clear the way, give local_directory= a folder, or say "
                "local_every=None."
            )

    def _is_forked(self) -> bool:
        return self._owner not in (0, os.getpid())

    def _check_usable(self) -> None:
        if self._is_closed:
            raise UsageError("This Checkpointer is closed: make a new one.")
        if self._is_forked():
            raise UsageError(
                f"This Checkpointer is that of process {self._owner}, of which this one is a fork: "
                "save and restore there."
            )

    def _begin_without_restore(self) -> None:
        assert self._restoring is not None  # as soon as it is open
        if self._opened is not None and isinstance(self._opened.persistent, foreign.Guest):
            self._opened.persistent.check()
        step = self._restoring.newest_step()
        if step is not None:
            raise CheckpointError(
                f"{self._directory} has checkpoints of an earlier training (the last step is "
                f"{step}). Call restore() before the first save(), or choose another folder."
            )

    def _check_structure(self, due: Due) -> None:
        """Tell now, not when a host has been lost, that a restart would not find what it needs."""
        before, leaves = self._before, due.state.leaves
        if before is None and self._pattern is not None:
            self._check_first(due, self._pattern)
        elif before is not None and pieces.differ(before, leaves):
            where = f"of step {due.step}, whose state is another one than before,"
            try:
                tree.check_same(leaves, self._pattern or before, where, cast=self._casts)
            except CheckpointMismatch as error:
                self._warn(str(error))
        self._before = leaves

    def _check_first(self, due: Due, pattern: list[Leaf]) -> None:
        """Check whether `restore`, called as it was, would find what it needs in the first save."""
        where = f"of step {due.step}, which was to be saved,"
        tree.check_same(due.state.leaves, pattern, where, cast=self._casts)
        if due.position is None and self._has_iterator:
            raise CheckpointMismatch(
                "restore() was given data=, and save() was not: nothing could tell it where to put "
                "the iterator. Give data= to save(), too."
            )
        if due.position is not None and elastic.could_shrink():
            name = f"first-positions/{due.number}"
            all_hosts = local_saves.of_all_hosts(self._peers, name, due.position)
            if any(each != all_hosts[0] for each in all_hosts):
                self._warn(positions.NOT_SHARED)

    def _say(self, words: str) -> None:
        """Tell those who read the job's output, once for all hosts."""
        _log.info(words)
        if slices.is_shown() and slices.job_id():
            streams.say(f"kinetic: {words}")

    def _warn(self, words: str) -> None:
        """Warn those who read the job's output; called on all hosts."""
        if not slices.job_id():
            _log.warning(words)
        elif slices.is_shown():
            streams.say(f"kinetic: warning: {words}")

    def _give_up(self, *, waits: bool) -> None:
        """End after an error; `waits`: for saves that have begun, a moment."""
        try:
            if waits:
                self._wait_a_moment()
        finally:
            self._free()

    def _wait_a_moment(self) -> None:
        def wait() -> None:
            with contextlib.suppress(Exception):
                self.wait()
            with contextlib.suppress(Exception):
                if self._opened is not None and self._peers.count == 1:
                    self._opened.persistent.close()  # The process may live on.

        threading.Thread(target=wait, name="kinetic-checkpoint-end", daemon=True).start()
        if not worlds.settle(_AFTER_AN_ERROR_S):
            _log.warning("a checkpoint that was being saved was not finished")

    def _free(self) -> None:
        self._is_closed = True
        opening.unclosed.pop(self, None)
        if self._sync_points is not None:
            self._sync_points.close()
        if self._opened is not None and self._opened.lease is not None:
            self._opened.lease.release()

    def _free_memory(self, opened: Opened) -> None:
        """Free the job's memory of what the persistent tier has as well: nobody else reads it, and
        the job may wait for long to be cleaned up."""
        if opened.local is None or not self._has_job_folder or self._last < 0:
            return
        if isinstance(opened.persistent, Persistent) and opened.persistent.has(self._last):
            opened.local.remove()

    def _leave(self, why: SyncRequest | None, step: int) -> None:
        """Every host has saved this step: wait until it is committed, and go."""
        self.wait()
        self._peers.wait_at_barrier("left", opening.LIMIT_S)
        if why is SyncRequest.REFORM:
            self._say(f"step {step} is saved on all hosts, which begin again on all slices.")
            elastic.reform()
        self._say(f"step {step} is saved on all hosts, which end now.")
        preemption.end_function()

    # -- the tiers ---------------------------------------------------------------------------------

    def _finish_save(self, opened: Opened, saved: SavedState, metrics: Any) -> None:
        """Save a restored step for good, as it was to be: nothing may be left to do after it."""
        state = tree.take_apart(saved.state)
        due = Due(next(self._numbers), self._last, state, None, metrics)
        try:
            self._finished = self._last if self._save_for_good(opened, due, saved.data) else -1
        except CheckpointInUse:
            raise
        except CheckpointError as error:
            self._warn(f"{_name_step(self._last)} is not saved for good: {error}")

    def _save_for_good(self, opened: Opened, due: Due, data: list[Any]) -> bool:
        """Save to the persistent tier; `data`: the positions of iterators, by host."""
        if opened.lease is not None:
            opened.lease.check()
        record = {
            "format": 1,
            "job_id": slices.job_id(),
            "attempt": slices.read_variable("KINETIC_ATTEMPT"),
            "writer": opened.writer,
            "hosts": self._peers.count,
            "saved_at": time.time(),
            "leaves": [leaf.to_json() for leaf in due.state.leaves],
            "data": data,
        }
        if self._sync_points is not None:
            self._sync_points.note_save()
        own = None
        if opened.verify:
            own = ShardDigests(due.state, self._peers.index)
            record["digests"] = self._peers.count
        return opened.persistent.save(due.step, due.state.plain(), record, due.metrics or {}, own)


def _name_step(step: int) -> str:
    return f"step {step}" if step >= 0 else "the state"
