"""Restoring the newest readable step of either tier.

All hosts restore the same step, or raise the same error if steps were saved and none can be read.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from kinetic._in_job.checkpoint import foreign, opening, pieces, tree
from kinetic._in_job.checkpoint.assembly import LocalRestore
from kinetic._in_job.checkpoint.opening import Opened
from kinetic._in_job.checkpoint.persistent import Persistent, StepReading, StepUnreadable
from kinetic._in_job.checkpoint.pieces import CompleteStep, Region
from kinetic._in_job.checkpoint.tree import Leaf, TreeState
from kinetic._in_job.checkpoint.verifying import Verification
from kinetic._in_job.peers import Peers
from kinetic.errors import CheckpointError

_ADVICE = (
    "To begin a new training, choose another folder with directory= or output_dir=. To restore one "
    "of these steps, bring back its files from a copy. If only checksums differ and you trust the "
    "files, set verify=False."
)
_NEXT = "The newest undamaged step is restored instead."


class Restored(NamedTuple):
    """The checkpoint that `Checkpointer.restore` has restored.

    Attributes:
        step: Number of the step; -1 for a checkpoint without a number.
        tier: "local" or "persistent".
        received_from: Hosts that have sent parts of the local tier to this one.
    """

    step: int
    tier: Literal["local", "persistent"]
    received_from: tuple[int, ...] = ()


class SavedState(NamedTuple):
    """A restored state.

    Attributes:
        state: The state, in the current layout.
        data: Positions of iterators, by host.
        restored: The checkpoint that the state comes from.
        where: Description of that checkpoint for messages.
        whole: The local step; None if the state comes from the persistent tier.
        is_start: True if another training run or program has saved it, in another folder.
        unfinished: The local step, if it was also due in the persistent tier, but hosts were lost
            before that save ended; else None.
    """

    state: Any
    data: list[Any]
    restored: Restored
    where: str
    whole: CompleteStep | None = None
    is_start: bool = False
    unfinished: CompleteStep | None = None


class Restoring:
    """Restores a state. All hosts must call each method.

    Args:
        opened: Both tiers.
        peers: The hosts.
        directory: Path or URI of the persistent tier, for messages.
        warn: Prints a warning to the job's output; called on all hosts.
    """

    def __init__(
        self, opened: Opened, peers: Peers, directory: str, warn: Callable[[str], None]
    ) -> None:
        self._opened = opened
        self._peers = peers
        self._directory = directory
        self._warn = warn
        self._numbers = itertools.count()

    def newest_step(self) -> int | None:
        """Return the newest step in either tier, readable or not; None if there is none."""
        steps, local, _ = opening.list_checkpoints(self._opened, self._peers)
        whole = pieces.find_newest(local)
        return max([*steps, *([] if whole is None else [whole.step])], default=None)

    def restore(
        self, now: TreeState, *, cast: bool = False, start_from: str | None = None
    ) -> SavedState | None:
        """Return the newest readable step; None if nothing was saved.

        Args:
            now: The current state, with the layout of the result.
            cast: Allow casts that lose precision.
            start_from: Folder to read if nothing was saved; or None.

        Raises:
            CheckpointMismatch: The step does not fit `now`.
            CheckpointError: Steps were saved, but none can be read.
        """
        steps, local, faults = opening.list_checkpoints(self._opened, self._peers)
        reasons: list[str] = []
        while (whole := pieces.find_newest(local)) is not None or steps:
            if whole is not None and whole.step >= max(steps, default=-1):
                saved, damaged = self._restore_local(whole, now, cast)
                if saved is not None and _is_unfinished(whole, steps, now):
                    saved = saved._replace(unfinished=whole)
                local = pieces.drop_pieces(local, whole, damaged)
                reason = _explain_damage(
                    whole, damaged, has_copy=_is_same_step(whole, pieces.find_newest(local))
                )
            else:
                saved, reason = self._restore_persistent(max(steps), now, cast)
                steps = [step for step in steps if step != max(steps)]
            if saved is not None:
                for (host, step), text in faults.items():
                    if step >= saved.restored.step:  # Damage to older steps does not matter.
                        self._warn(f"host {host}: {text}. This checkpoint is not used.")
                self._opened.persistent.continue_after(saved.restored.step)
                return saved
            self._warn(reason)
            reasons.append(reason.removesuffix(_NEXT).rstrip())
        reasons += [f"On host {host} {text}." for (host, _), text in faults.items()]
        if reasons:
            raise CheckpointError(
                f"None of the saved steps can be restored. {' '.join(reasons)} {_ADVICE}"
            )
        return None if start_from is None else self._restore_foreign(start_from, now, cast)

    def _restore_foreign(self, directory: str, now: TreeState, cast: bool) -> SavedState:
        guest = foreign.Guest(directory)
        if not (steps := guest.steps()):
            raise CheckpointError(
                f"The folder of start_from={directory!r} has no checkpoint. Correct the path, or "
                "omit start_from=."
            )
        state, where = guest.restore(max(steps), now, cast=cast)
        return SavedState(state, [], Restored(max(steps), "persistent"), where, is_start=True)

    def _restore_local(
        self, whole: CompleteStep, now: TreeState, cast: bool
    ) -> tuple[SavedState | None, dict[tuple[int, Region], str]]:
        """Return the restored state and {}; or None, and the damaged pieces with the reasons."""
        assert self._opened.local is not None
        tree.check_same(whole.leaves, now.leaves, f"of step {whole.step} in memory", cast=cast)
        now.make_room()
        now = now.as_saved(whole.leaves)
        assembly = LocalRestore(self._opened.local, self._peers, whole)
        assembly.fetch(now)
        state = now.with_values(lambda n: assembly.value(now.leaves[n], now.values[n]))
        damaged = self._merge_damage(assembly.damaged)
        if damaged:
            return None, damaged
        restored = Restored(whole.step, "local", tuple(sorted(assembly.received_from)))
        return SavedState(state, whole.data, restored, "the hosts' memory", whole), {}

    def _merge_damage(
        self, damaged: dict[tuple[int, Region], str]
    ) -> dict[tuple[int, Region], str]:
        """Exchange the damaged pieces of each host; return those of all hosts, with reasons."""
        own = [[host, *region, why] for (host, region), why in damaged.items()]
        union = {}
        for rows in self._exchange(json.dumps(own)):
            for host, leaf, (start, shape), why in json.loads(rows):
                union[host, (leaf, (tuple(start), tuple(shape)))] = why
        return union

    def _restore_persistent(
        self, step: int, now: TreeState, cast: bool
    ) -> tuple[SavedState | None, str]:
        """Return the restored state and ""; or None and the reason why the step cannot be read."""
        persistent, me = self._opened.persistent, self._peers.index
        reading: StepReading | None = None
        saved: list[Leaf] = []
        own: list[Any] | None = None
        failed = ""
        record: dict[str, Any] = {}
        foreign_state: tuple[Any, str] | None = None
        try:
            record = persistent.record(step)
            if not record:
                guest = foreign.Guest(self._directory)
                foreign_state = guest.restore(step, now, cast=cast)
            if "leaves" in record:
                saved = [Leaf.from_json(leaf) for leaf in record["leaves"]]
                where = f"of step {step} in {self._directory}"
                tree.check_same(saved, now.leaves, where, cast=cast)
                now = now.as_saved(saved)
            if record and isinstance(persistent, Persistent):
                now.make_room()
                reading = persistent.read(step, now, me)
                if self._opened.verify and (files := record.get("digests")):
                    own = persistent.digests(step, files)
        except StepUnreadable as error:
            failed = str(error)
        reasons = enumerate(self._exchange(failed))
        fault = next((f"Host {host}: {why}" for host, why in reasons if why), "")
        if foreign_state is not None and not fault:
            return SavedState(
                foreign_state[0], [], Restored(step, "persistent"), foreign_state[1]
            ), ""
        if fault or reading is None or not isinstance(persistent, Persistent):
            return None, f"{failed or fault} {_NEXT}"
        values = reading.spread(now, me)
        if own is not None:
            read_again = functools.partial(persistent.read_alone, step, now)
            verification = Verification(self._peers, self._exchange, saved, read_again)
            if differing := verification.find_differing(own, now, values):
                more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
                return None, (
                    f"step {step} in {self._directory} is damaged: leaf {differing[0]}{more} "
                    f"differs from what was saved. {_NEXT}"
                )
        state = now.with_values(values.__getitem__)
        where = self._directory
        if reading.readers:
            where += (
                f", which {len(reading.readers)} of {self._peers.count} hosts have read for all"
            )
        return SavedState(state, record.get("data") or [], Restored(step, "persistent"), where), ""

    def _exchange(self, text: str) -> list[str]:
        return opening.exchange(self._peers, f"restoring/{next(self._numbers)}", text)


def _is_unfinished(whole: CompleteStep, steps: list[int], now: TreeState) -> bool:
    """True if a local step must still be saved to the persistent tier. False if the restore casts
    arrays: their numbers would differ from the saved ones."""
    leaves = now.as_saved(whole.leaves).leaves
    is_cast = any(one.dtype != was.dtype for one, was in zip(leaves, whole.leaves, strict=True))
    return whole.metrics is not None and whole.step not in steps and not is_cast


def _is_same_step(one: CompleteStep, other: CompleteStep | None) -> bool:
    return other is not None and (one.step, one.writer) == (other.step, other.writer)


def _explain_damage(
    whole: CompleteStep, damaged: Mapping[tuple[int, Region], str], *, has_copy: bool
) -> str:
    if not damaged:
        return ""
    (host, (leaf, _)), why = next(iter(sorted(damaged.items())))
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    action = "A copy of another host is used." if has_copy else f"No other host has a copy. {_NEXT}"
    return f"host {host}: {why.rstrip('.')} (leaf {whole.leaves[leaf].name}{more}). {action}"
