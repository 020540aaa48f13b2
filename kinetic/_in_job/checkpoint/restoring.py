"""The way back: the newest whole step of either tier, and what is said of those that are damaged.

In: both tiers, the hosts, the state of today. Out: the same state with the saved content, on all
hosts of the same step; or an error, where steps were saved and none can be read.
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

_WAYS = (
    "To begin a new training, choose another folder with directory= or output_dir=; to restore one "
    "of these steps, bring back its files from a copy, or say verify=False if you know that they "
    "are right, as where the copies of one array differed between devices."
)


_NEXT = "The newest whole step that is left is restored."


class Restored(NamedTuple):
    """What `restore` has found.

    Attributes:
        step: that was saved; -1 for a checkpoint without a number.
        tier: "local" or "persistent".
        received_from: hosts that have sent local parts to this one.
    """

    step: int
    tier: Literal["local", "persistent"]
    received_from: tuple[int, ...] = ()


class SavedState(NamedTuple):
    """A state that was saved.

    Attributes:
        state: laid out as today's.
        data: the positions of iterators, by host.
        restored: which one it is.
        where: in words.
        whole: the local step that it is; None where it comes from the persistent tier.
        is_start: whether another training or program has saved it, elsewhere.
        unfinished: the local step that it is, if it was to be in the persistent tier, too, and is
            not: its hosts were lost before that was done.
    """

    state: Any
    data: list[Any]
    restored: Restored
    where: str
    whole: CompleteStep | None = None
    is_start: bool = False
    unfinished: CompleteStep | None = None


class Restoring:
    """Restores; collective.

    Args:
        opened: both tiers.
        peers: the hosts.
        directory: of the persistent tier, for messages.
        warn: takes what those who read the job's output should know; called on all hosts.
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
        """Return the newest step that seems to be there; None if there is none."""
        steps, local, _ = opening.look(self._opened, self._peers)
        whole = pieces.newest(local)
        return max([*steps, *([] if whole is None else [whole.step])], default=None)

    def restore(
        self, now: TreeState, *, cast: bool = False, start_from: str | None = None
    ) -> SavedState | None:
        """Return the newest whole step; None if nothing was saved.

        Args:
            now: a state that is laid out as the result.
            cast: whether arrays may lose numbers.
            start_from: a folder that is read where nothing was saved; None for none.

        Raises:
            CheckpointMismatch: what was saved does not fit it.
            CheckpointError: none of the steps that were saved can be read.
        """
        steps, local, faults = opening.look(self._opened, self._peers)
        why: list[str] = []
        while (whole := pieces.newest(local)) is not None or steps:
            if whole is not None and whole.step >= max(steps, default=-1):
                saved, damaged = self._from_memory(whole, now, cast)
                if saved is not None and _is_unfinished(whole, steps, now):
                    saved = saved._replace(unfinished=whole)
                local = pieces.without(local, whole, damaged)
                reason = _of_damage(whole, damaged, is_left=_is(whole, pieces.newest(local)))
            else:
                saved, reason = self._from_folder(max(steps), now, cast)
                steps = [step for step in steps if step != max(steps)]
            if saved is not None:
                for (host, step), text in faults.items():
                    if step >= saved.restored.step:  # Else something newer was there.
                        self._warn(f"host {host}: {text}. It is not used.")
                self._opened.persistent.continue_after(saved.restored.step)
                return saved
            self._warn(reason)
            why.append(reason)
        why += [f"On host {host} {text}." for (host, _), text in faults.items()]
        if why:
            raise CheckpointError(
                f"No step that was saved can be restored. {' '.join(why)} {_WAYS}"
            )
        return None if start_from is None else self._from_elsewhere(start_from, now, cast)

    def _from_elsewhere(self, directory: str, now: TreeState, cast: bool) -> SavedState:
        guest = foreign.Guest(directory)
        if not (steps := guest.steps()):
            raise CheckpointError(f"There is no checkpoint to start from at {directory}.")
        state, where = guest.restore(max(steps), now, cast=cast)
        return SavedState(state, [], Restored(max(steps), "persistent"), where, is_start=True)

    def _from_memory(
        self, whole: CompleteStep, now: TreeState, cast: bool
    ) -> tuple[SavedState | None, dict[tuple[int, Region], str]]:
        """The step, or which of its pieces are damaged."""
        assert self._opened.local is not None
        tree.check_same(whole.leaves, now.leaves, f"of step {whole.step} in memory", cast=cast)
        now.make_room()
        now = now.as_saved(whole.leaves)
        assembly = LocalRestore(self._opened.local, self._peers, whole)
        assembly.fetch(now)
        state = now.with_values(lambda n: assembly.value(now.leaves[n], now.values[n]))
        damaged = self._union(assembly.damaged)
        if damaged:
            return None, damaged
        restored = Restored(whole.step, "local", tuple(sorted(assembly.received_from)))
        return SavedState(state, whole.data, restored, "the hosts' memory", whole), {}

    def _union(self, damaged: dict[tuple[int, Region], str]) -> dict[tuple[int, Region], str]:
        """What all hosts together have seen."""
        own = [[host, *region, why] for (host, region), why in damaged.items()]
        union = {}
        for rows in self._exchange(json.dumps(own)):
            for host, leaf, (start, shape), why in json.loads(rows):
                union[host, (leaf, (tuple(start), tuple(shape)))] = why
        return union

    def _from_folder(self, step: int, now: TreeState, cast: bool) -> tuple[SavedState | None, str]:
        """The step, or why it cannot be read."""
        persistent, me = self._opened.persistent, self._peers.index
        reading: StepReading | None = None
        saved: list[Leaf] = []
        own: list[Any] | None = None
        failed = ""
        record: dict[str, Any] = {}
        of_others: tuple[Any, str] | None = None
        try:
            record = persistent.record(step)
            if not record:
                guest = foreign.Guest(self._directory)
                of_others = guest.restore(step, now, cast=cast)
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
        all_said = enumerate(self._exchange(failed))
        fault = next((f"Host {host}: {why}" for host, why in all_said if why), "")
        if of_others is not None and not fault:
            return SavedState(of_others[0], [], Restored(step, "persistent"), of_others[1]), ""
        if fault or reading is None or not isinstance(persistent, Persistent):
            return None, f"{failed or fault} {_NEXT}"
        values = reading.spread(now, me)
        if own is not None:
            read_again = functools.partial(persistent.read_alone, step, now)
            verification = Verification(self._peers, self._exchange, saved, read_again)
            if differing := verification.find_differing(own, now, values):
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                return None, (
                    f"step {step} in {self._directory} is damaged: leaf {differing[0]}{more} is "
                    f"not what was saved. {_NEXT}"
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
    """Whether a step was due in the persistent tier, too, and is not there. Not where its arrays
    were cast: the numbers of today are not those that were due."""
    leaves = now.as_saved(whole.leaves).leaves
    is_cast = any(one.dtype != was.dtype for one, was in zip(leaves, whole.leaves, strict=True))
    return whole.metrics is not None and whole.step not in steps and not is_cast


def _is(one: CompleteStep, other: CompleteStep | None) -> bool:
    return other is not None and (one.step, one.writer) == (other.step, other.writer)


def _of_damage(
    whole: CompleteStep, damaged: Mapping[tuple[int, Region], str], *, is_left: bool
) -> str:
    if not damaged:
        return ""
    (host, (leaf, _)), why = next(iter(sorted(damaged.items())))
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    then = (
        "A copy of another host is used."
        if is_left
        else "No other host has a copy: the newest whole step that is left is restored."
    )
    return f"host {host}: {why.rstrip('.')} (leaf {whole.leaves[leaf].name}{more}). {then}"
