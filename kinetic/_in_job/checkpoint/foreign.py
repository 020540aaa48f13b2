"""Read-only access to checkpoints that other programs have written with Orbax."""

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
    """True if kinetic must not write to a folder: it has checkpoints of other programs but none of
    kinetic's, or is itself a single checkpoint."""
    return bool(Checkpoints(directory).program)


class Guest:
    """Read-only stand-in for `Persistent`, for checkpoints of another program or training run.

    Args:
        directory: Path or URI of the folder with the checkpoints.
    """

    def __init__(self, directory: str) -> None:
        self._checkpoints = Checkpoints(directory)
        self._directory = directory

    def steps(self) -> list[int]:
        """Return the committed steps; -1 stands for a checkpoint without a number.

        Raises:
            CheckpointError: The folder is missing, or its checkpoints are not in Orbax's format.
        """
        try:
            steps = [step.step for step in self._checkpoints.steps() if step.is_committed]
        except NotFound as error:
            raise CheckpointError(str(error)) from error
        if not steps and self._checkpoints.program not in ("", ORBAX):
            raise CheckpointError(
                f"kinetic cannot read the checkpoints in {self._directory}, which "
                f"{self._checkpoints.program} wrote. Read them with that program, and give this "
                "training another folder, with directory= or output_dir=."
            )
        return steps

    def record(self, step: int) -> dict[str, Any]:
        """Return an empty record: other programs write none."""
        return {}

    def restore(self, step: int, now: TreeState, *, cast: bool) -> tuple[Any, str]:
        """Read a step into the structure and layout of `now`.

        Args:
            step: A committed step.
            now: The current state, with the structure and layout of the result.
            cast: Allow casts that lose precision.

        Returns:
            The state, and a description of the checkpoint for messages.

        Raises:
            StepUnreadable: The step is damaged, or was not committed.
            CheckpointError: The step cannot be read, or has several pytrees.
            CheckpointMismatch: The step does not fit `now`.
        """
        try:
            guest_step = self._checkpoints.step(step)
        except NotFound as error:
            raise StepUnreadable(
                f"step {step} in {self._directory} cannot be read: it was not committed, or its "
                "files are missing.",
                step=step,
            ) from error
        path = self._checkpoints.path(guest_step)
        where = f"of {guest_step.layout.program or 'kinetic'} in {path}"
        if guest_step.layout.item is None:
            raise CheckpointError(_explain_unclear_item(guest_step, path))
        item = f"{path}/{guest_step.layout.item}".rstrip("/")
        with explain_errors("read", item, step):
            files = OrbaxTree(item)
        if guest_step.leaves is not None:  # Written by kinetic, in another training run.
            names = list(now.in_files())
            saved = [Leaf.from_json(leaf) for leaf in guest_step.leaves]
        else:
            is_array = now.joined == [""] and len(files.names) == 1  # One array has no name.
            names = files.names if is_array else now.joined
            own = dict(zip(names, now.leaves, strict=True))
            described = zip(files.names, files.about, strict=True)
            saved = [_make_leaf(name, about, own) for name, about in described]
        tree.check_same(saved, now.leaves, where, cast=cast)
        now.make_room()
        now = now.as_saved(saved)
        with explain_errors("read", item, step):
            values = files.read(dict(zip(names, now.in_files().values(), strict=True)))
        whose = guest_step.layout.program or "kinetic"
        return now.with_values(values.__getitem__), f"{path}, a checkpoint of {whose}"

    def continue_after(self, step: int) -> None:
        """Do nothing: this folder is read-only."""

    def check(self) -> None:
        """Refuse to write to this folder.

        Raises:
            CheckpointError: Always.
        """
        program = self._checkpoints.program or "another training"
        raise CheckpointError(
            f"{self._directory} has checkpoints of {program}: kinetic can read them, but does not "
            "save to their folder. Give this training another folder, with directory= or "
            "output_dir=, and start from these checkpoints with "
            f"restore(state, start_from={self._directory!r})."
        )

    def save(self, *_: Any) -> bool:
        """Refuse to save.

        Raises:
            CheckpointError: Always.
        """
        self.check()
        return False

    def wait(self) -> None:
        """Return at once: nothing is ever being written."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _explain_unclear_item(step: Step, path: str) -> str:
    trees = ", ".join(step.layout.trees)
    content = f"several pytrees ({trees})" if trees else "no pytree that kinetic can read"
    return (
        f"{path} is a checkpoint of {step.layout.program} with {content}, so it is not clear which "
        "one is the state. Read it with orbax.checkpoint, and give this training another folder, "
        "with directory= or output_dir=."
    )


def _make_leaf(name: str, about: Any, now: Mapping[str, Leaf]) -> Leaf:
    """Return a leaf, made from Orbax's metadata `about` of the saved leaf and the leaf of the same
    name in the current state: Orbax does not record that an array was a typed key."""
    import numpy as np

    dtype, like = np.dtype(about.dtype), now.get(name, Leaf(name))
    if type(about).__name__ == "ScalarMetadata":
        return Leaf(like.name, value=dtype.type(0).item())
    saved = Leaf(like.name, tuple(about.shape), dtype.name)
    is_key = (saved.shape, saved.dtype) == (like.shape, like.dtype)
    return replace(saved, key=like.key) if is_key else saved
