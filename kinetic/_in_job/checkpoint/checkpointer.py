"""`kinetic.Checkpointer`: saves the state of a training run in two tiers, restores the newest.

All hosts of a job call it with the same steps, and agree on what is saved and restored.
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
from kinetic._core.metrics import RESTORING_SPAN, SAVING_SPAN
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
from kinetic._in_job.metrics import mark_step, note_span, send_now
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
"""Seconds to wait for saves in progress after the function has raised."""


class Checkpointer:
    """Saves and restores the state of a training run, on all hosts of a job.

    Checkpoints go to two tiers. The *persistent* tier is a folder or bucket that all hosts share;
    Orbax writes it. The *local* tier is a folder in the memory of each host: fast, and kept while
    the job's hosts restart. A host that has lost its part of the state receives that part from a
    host with a copy, for example in another slice in data-parallel training.

    Call every method on all hosts, with the same steps. Use it as a context manager: it waits for
    saves when the block ends.

    Args:
        directory: Path or URI of the persistent tier; by default `checkpoints` below
            `KINETIC_OUTPUT_DIR`.
        every: Save steps divisible by this to the persistent tier; or a length of time ("10m").
        at_least_every: Save to the persistent tier if nothing was saved there for this time; None
            for never.
        local_every: Save steps divisible by this to the local tier; None for no local tier.
        keep: Number of newest persistent checkpoints to keep; None for all.
        keep_every: Also keep steps divisible by this.
        best: Name of a metric: the best checkpoints by it are kept as well.
        best_is: "min" or "max".
        keep_best: Number of best checkpoints to keep.
        local_directory: Folder of the local tier on this host; by default below
            `KINETIC_LOCAL_DIR`. Without either there is no local tier.
        verify: Save digests and check them on restore: a damaged checkpoint is skipped in favor of
            another copy or an older step.

    Raises:
        UsageError: An option is invalid, or no folder is configured.

    Example:
        ```python
        with kinetic.Checkpointer(every=1000) as checkpointer:
            state, start = checkpointer.restore(state)
            for step in range(start, 10_000):
                state = train_step(state)
                checkpointer.save(step, state)
        ```
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
        self._last = -1  # The last step saved or restored.
        self._finished = -1  # A local step that restore() copied to the persistent tier.
        self._pattern: list[Leaf] | None = None  # The leaves of the state given to restore().
        self._before: list[Leaf] | None = None  # The leaves of the previous save since restore().
        self._has_iterator = False  # restore() was called with data=.
        self._casts = False  # restore() was called with cast=True.
        self._is_closed = self._has_stepped = False
        self._owner = 0  # Id of the process that opened the tiers: forks must not use them.
        self.restored: Restored | None = None

    @property
    def directory(self) -> str:
        """Path or URI of the persistent tier."""
        return self._directory

    @property
    def local_directory(self) -> str | None:
        """Path of this host's local tier; None without a local tier."""
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
        """Restore the newest checkpoint of either tier.

        Checkpoints that another program has written with Orbax are read too, and never changed.

        Args:
            state: The initial state of the training run, a pytree. The result has its structure,
                shapes and layout over the devices, also if it was saved on another mesh. Do not use
                its arrays afterwards: they are freed if a device has no room for two states.
                `jax.ShapeDtypeStruct`s with shardings may stand for arrays.
            init: Makes the initial state; called only if nothing was saved.
            data: An iterator with `get_state` and `set_state`, which is set to its saved position.
            cast: Allow casts that lose precision, such as from float32 to bfloat16.
            start_from: Folder or URI with checkpoints of another training run or program; the
                newest is read if this run has not saved anything.

        Returns:
            The state, and the step to continue with. If nothing was saved: the result of `init`, or
                `state` (None if it only describes arrays), and step 0. The step is also 0 after a
                checkpoint without a number.

        Raises:
            CheckpointMismatch: The checkpoint does not fit `state` or `data`.
            UsageTypeError: `data` lacks `get_state` or `set_state`.
            CheckpointInUse: Another job writes to the folder.
            CheckpointError: The checkpoint cannot be read.
        """
        began_s = time.monotonic()
        self._has_iterator, self._casts = data is not None, cast
        if self._has_iterator:
            positions.check(data)
        now = tree.take_apart(state, describes=True)
        opened, self._pattern, self._before = self._open(), now.leaves, None
        if self._local_saves is not None:
            self._local_saves.wait()
        assert self._restoring is not None  # Set by _open.
        origin = None if start_from is None else arguments.absolute(start_from)
        saved = self._restoring.restore(now, cast=cast, start_from=origin)
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
        note_span(RESTORING_SPAN, began_s)
        if saved.is_start:
            self.restored = saved.restored
            self._say(f"the training starts from {saved.where}.")
            return result, saved.restored.step + 1
        if data is not None:
            if len(saved.data) not in (0, self._peers.count) and not positions.is_elastic(data):
                self._warn(
                    positions.SAVED_ON_OTHER_HOSTS.format(len(saved.data), self._peers.count)
                )
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
        """Save the state after a step, if a save is due. Call it after every step.

        Returns once the state is copied out of the devices; writing goes on in the background.

        Args:
            step: The step that is done; `restore` returns the next one.
            state: A pytree with the structure of the state given to `restore`.
            metrics: Numbers to store with persistent checkpoints.
            data: An iterator with `get_state` and `set_state`, whose position is saved.
            force: Save to the persistent tier even if no save is due.

        Returns:
            The tiers that the step is saved to: "local", "persistent", both or none.

        Raises:
            CheckpointError: This save cannot begin, or an earlier one has failed.
            CheckpointMismatch: The first save does not fit the state given to `restore`.
            Preempted: A host is being taken away, and all hosts have saved this step. Do not
                catch it.
        """
        return self._save(step, lambda: state, metrics=metrics, data=data, force=force)

    def _save(
        self,
        step: int,
        make_state: Callable[[], Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        data: Any = None,
        force: bool = False,
    ) -> tuple[str, ...]:
        """Save like `save`, but make the state only if a save is due."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise UsageTypeError(f"A step must be an int; got {a_type(step)}.")
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
                f"Step {step} cannot be saved: step {self._last} was saved or restored before, and "
                "steps must increase. Continue with the step that restore() returns.",
                step=step,
            )
        if not self._has_stepped and (lost_at := slices.read_variable(slices.LOST_AT)):
            paused_s = time.monotonic() - float(lost_at)
            self._say(
                f"the training has reached its next step, {paused_s:.1f} s after the interruption."
            )
        self._has_stepped = True
        is_asked = force or requested is not None
        to = {
            "local": opened.local is not None and self._cadence.is_local(step),
            "persistent": self._cadence.is_persistent(step, is_requested=is_asked),
        }
        opened.persistent.check()
        if any(to.values()):
            began_s = time.monotonic()
            send_now()
            position = None if data is None else positions.take_position(data)
            numbers = arguments.read_metrics(metrics) if to["persistent"] else None
            due = Due(next(self._numbers), step, tree.take_apart(make_state()), position, numbers)
            self._check_structure(due)
            if self._local_saves is not None and to["local"] and step > self._last:
                self._local_saves.begin(due)
            if to["persistent"]:
                positions_of_hosts = local_saves.gather_positions(
                    self._peers, f"positions/{due.number}", due.position
                )
                is_new = self._save_persistent(opened, due, positions_of_hosts)
                to["persistent"] = is_new or step == self._finished
            self._last = step
            note_span(SAVING_SPAN, began_s)
        if requested in (SyncRequest.PREEMPTED, SyncRequest.REFORM):
            self._leave(requested, step)
        return tuple(tier for tier, is_due in to.items() if is_due)

    def wait(self) -> None:
        """Wait until all saves are committed on all hosts.

        Raises:
            CheckpointError: A save has failed.
        """
        began_s = time.monotonic()
        if self._local_saves is not None:
            self._local_saves.wait()
        if self._opened is not None:
            self._opened.persistent.wait()
        note_span(SAVING_SPAN, began_s)

    def close(self) -> None:
        """Wait until all saves are committed, and release the folder to other jobs. Idempotent.

        Raises:
            CheckpointError: A save has failed.
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
        preemption.preempted()  # Registers that this function handles preemption itself.
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._is_forked():
            self._give_up(waits=self._peers.count == 1 or kind.__name__ not in opening.ECHOES)

    # -- opening, checks, closing ------------------------------------------------------------------

    def _open(self) -> Opened:
        self._check_usable()
        if self._opened is not None:
            return self._opened
        self._owner = os.getpid()
        persistent.orbax()  # Fail before the first collective if Orbax is not installed.
        self._peers = peers.connect()
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
            self._warn_without_local_tier()
        return self._opened

    def _warn_without_local_tier(self) -> None:
        job = slices.job_id()
        if job and (fault := memory_folder.fault_of(job, "local")):
            self._warn(
                f"local checkpoints are off, because no folder in memory could be created for them "
                f"({fault}). Remove that file or folder, set local_directory= to another folder, "
                "or set local_every=None."
            )

    def _is_forked(self) -> bool:
        return self._owner not in (0, os.getpid())

    def _check_usable(self) -> None:
        if self._is_closed:
            raise UsageError("This Checkpointer is closed. Make a new one.")
        if self._is_forked():
            raise UsageError(
                f"This Checkpointer belongs to process {self._owner}, and this process is a fork: "
                f"save and restore in process {self._owner}."
            )

    def _begin_without_restore(self) -> None:
        assert self._restoring is not None  # Set by _open.
        if self._opened is not None and isinstance(self._opened.persistent, foreign.Guest):
            self._opened.persistent.check()
        step = self._restoring.newest_step()
        if step is not None:
            raise CheckpointError(
                f"{self._directory} has checkpoints of an earlier training (the last step is "
                f"{step}). Call restore() before the first save(), or choose another folder."
            )

    def _check_structure(self, due: Due) -> None:
        """Check that `restore` will accept this save. If not, raise an error for the first save,
        and only warn for later ones."""
        before, leaves = self._before, due.state.leaves
        if before is None and self._pattern is not None:
            self._check_first(due, self._pattern)
        elif before is not None and pieces.differ(before, leaves):
            where = f"of step {due.step}, whose state differs from that of the step before,"
            try:
                tree.check_same(leaves, self._pattern or before, where, cast=self._casts)
            except CheckpointMismatch as error:
                self._warn(str(error))
        self._before = leaves

    def _check_first(self, due: Due, pattern: list[Leaf]) -> None:
        """Check that the first save fits the arguments that `restore` was called with."""
        where, leaves = f"at step {due.step}", due.state.leaves
        tree.check_same(leaves, pattern, where, cast=self._casts, is_stored=False)
        if due.position is None and self._has_iterator:
            raise CheckpointMismatch(
                "restore() was called with data=, but save() was not, so the position of the "
                "iterator would not be saved. Give data= to save(), too."
            )
        if due.position is not None and elastic.could_shrink():
            name = f"first-positions/{due.number}"
            all_hosts = local_saves.gather_positions(self._peers, name, due.position)
            if any(position != all_hosts[0] for position in all_hosts):
                self._warn(positions.NOT_SHARED)

    def _say(self, words: str) -> None:
        """Print a notice to the job's output. All hosts call this; only host 0 prints."""
        _log.info(words)
        if slices.is_shown() and slices.job_id():
            streams.say(f"kinetic: {words}")

    def _warn(self, words: str) -> None:
        """Print a warning to the job's output. All hosts call this; only host 0 prints."""
        if not slices.job_id():
            _log.warning(words)
        elif slices.is_shown():
            streams.say(f"kinetic: warning: {words}")

    def _give_up(self, *, waits: bool) -> None:
        """Close after an error. With `waits`, first wait a few seconds for saves in progress."""
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
                    self._opened.persistent.close()  # The process may run on.

        threading.Thread(target=wait, name="kinetic-checkpoint-end", daemon=True).start()
        if not worlds.settle(_AFTER_AN_ERROR_S):
            _log.warning("a save in progress was abandoned: that checkpoint is incomplete")

    def _free(self) -> None:
        self._is_closed = True
        opening.unclosed.pop(self, None)
        if self._sync_points is not None:
            self._sync_points.close()
        if self._opened is not None and self._opened.lease is not None:
            self._opened.lease.release()

    def _free_memory(self, opened: Opened) -> None:
        """Remove the local checkpoints if the persistent tier has the last step: they would occupy
        memory until the job is cleaned up."""
        if opened.local is None or not self._has_job_folder or self._last < 0:
            return
        if isinstance(opened.persistent, Persistent) and opened.persistent.has(self._last):
            opened.local.remove()

    def _leave(self, why: SyncRequest | None, step: int) -> None:
        """Wait until all hosts have committed this step, then end the function."""
        self.wait()
        self._peers.wait_at_barrier("left", opening.LIMIT_S)
        if why is SyncRequest.REFORM:
            self._say(
                f"step {step} is saved on all hosts. A slice is back, so the function is called "
                "again on all slices."
            )
            elastic.reform()
        self._say(f"step {step} is saved on all hosts, which end now.")
        preemption.end_function()

    # -- saving ------------------------------------------------------------------------------------

    def _finish_save(self, opened: Opened, saved: SavedState, metrics: Any) -> None:
        """Save a step, restored from the local tier, to the persistent tier, too: its attempt ended
        before that save was complete, and no other save follows a run's last step."""
        state = tree.take_apart(saved.state)
        due = Due(next(self._numbers), self._last, state, None, metrics)
        try:
            self._finished = self._last if self._save_persistent(opened, due, saved.data) else -1
        except CheckpointInUse:
            raise
        except CheckpointError as error:
            self._warn(
                f"{_name_step(self._last)} exists only as a local checkpoint, because it could not "
                f"be saved to {self._directory}: {error}"
            )

    def _save_persistent(self, opened: Opened, due: Due, data: list[Any]) -> bool:
        """Save to the persistent tier. `data` has the iterators' positions, by host."""
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
