"""Checkpoints that other programs have written with Orbax: read, never written.

In: a folder, a state as a pattern. Out: the same state with the saved content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kinetic._in_job.checkpoint import tree
from kinetic._in_job.checkpoint.persistent import OrbaxTree, StepUnreadable, explain_errors
from kinetic._in_job.checkpoint.tree import Leaf, TreeState
from kinetic._store.checkpoints import ORBAX, Checkpoints, Step
from kinetic.errors import CheckpointError, NotFound


def is_foreign(directory: str) -> bool:
    """Whether a folder has checkpoints of other programs, and none of kinetic's; or is one
    checkpoint itself, which nothing can be added to."""
    return bool(Checkpoints(directory).program)


class Guest:
    """The checkpoints of a folder that is only read; the same methods as `Persistent`.

    Args:
        directory: with checkpoints of another program, or of another training.
    """

    def __init__(self, directory: str) -> None:
        self._checkpoints = Checkpoints(directory)
        self._directory = directory

    def steps(self) -> list[int]:
        """Return the committed steps; -1 stands for one without a number.

        Raises:
            CheckpointError: nothing that is there can be read.
        """
        try:
            steps = [each.step for each in self._checkpoints.steps() if each.is_committed]
        except NotFound as error:
            raise CheckpointError(str(error)) from error
        if not steps and self._checkpoints.program not in ("", ORBAX):
            raise CheckpointError(
                f"{self._directory} has checkpoints of {self._checkpoints.program}, which are not "
                "in the format of Orbax: kinetic leaves them alone. Read them with that program, "
                "and give this training a folder of its own, with directory= or output_dir=."
            )
        return steps

    def record(self, step: int) -> dict[str, Any]:
        """Nothing is known of what others have written."""
        return {}

    def restore(self, step: int, now: TreeState, *, cast: bool) -> tuple[Any, str]:
        """Return a state with the content of a step, and whose that is.

        Args:
            step: that is there.
            now: how the state is laid out.
            cast: whether numbers may be lost by a cast.

        Raises:
            StepUnreadable: it is damaged, or was not committed.
            CheckpointError: it cannot be read, or it is not clear what of it is the state.
            CheckpointMismatch: it does not fit.
        """
        try:
            guest_step = self._checkpoints.step(step)
        except NotFound as error:
            raise StepUnreadable(
                f"step {step} in {self._directory} cannot be read: it was not committed, or has "
                "lost its files.",
                step=step,
            ) from error
        path = self._checkpoints.path(guest_step)
        where = f"of {guest_step.layout.program or 'kinetic'} in {path}"
        if guest_step.layout.item is None:
            raise CheckpointError(self._is_unclear(guest_step, path))
        item = f"{path}/{guest_step.layout.item}".rstrip("/")
        with explain_errors("read", item, step):
            files = OrbaxTree(item)
        if guest_step.leaves is not None:  # as kinetic describes them
            names = list(now.in_files())
            saved = [Leaf.from_json(leaf) for leaf in guest_step.leaves]
        else:
            is_array = now.joined == [""] and len(files.names) == 1  # alone, it has no key
            names = files.names if is_array else now.joined
            own = dict(zip(names, now.leaves, strict=True))
            saved = [_leaf(*each, own) for each in zip(files.names, files.about, strict=True)]
        tree.check_same(saved, now.leaves, where, cast=cast)
        now.make_room()
        now = now.as_saved(saved)
        with explain_errors("read", item, step):
            values = files.read(dict(zip(names, now.in_files().values(), strict=True)))
        whose = guest_step.layout.program or "kinetic"
        return now.with_values(values.__getitem__), f"{path}, a checkpoint of {whose}"

    def _is_unclear(self, step: Step, path: str) -> str:
        trees = ", ".join(step.layout.trees)
        what = f"several pytrees ({trees})" if trees else "no pytree that is known here"
        return (
            f"{path} is a checkpoint of {step.layout.program} with {what}, so it is not clear what "
            "the state is. Read it with orbax.checkpoint, and give this training a folder of its "
            "own, with directory= or output_dir=."
        )

    def continue_after(self, step: int) -> None:
        """Nothing is written here."""

    def check(self) -> None:
        """Say that nothing is written here.

        Raises:
            CheckpointError: always.
        """
        program = self._checkpoints.program or "another training"
        raise CheckpointError(
            f"{self._directory} has checkpoints of {program}: they are read, and nothing is "
            "written beside them. Give this training a folder of its own, with directory= or "
            "output_dir=, and let it begin with them: "
            f"restore(state, start_from={self._directory!r})."
        )

    def save(self, *_: Any) -> bool:
        """Never: see `check`."""
        self.check()
        return False

    def wait(self) -> None:
        """Nothing is being written."""

    def close(self) -> None:
        """Nothing is held."""


def _leaf(name: str, about: Any, now: Mapping[str, Leaf]) -> Leaf:
    """What Orbax knows of a leaf; `now`: those of the state, by Orbax's names. The data of a typed
    key are an array to it."""
    import numpy as np

    dtype, like = np.dtype(about.dtype), now.get(name, Leaf(name))
    if type(about).__name__ == "ScalarMetadata":
        return Leaf(like.name, value=dtype.type(0).item())
    saved = Leaf(like.name, tuple(about.shape), dtype.name)
    is_key = (saved.shape, saved.dtype) == (like.shape, like.dtype)
    return replace(saved, key=like.key) if is_key else saved
