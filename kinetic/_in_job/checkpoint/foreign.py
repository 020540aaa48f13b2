"""Checkpoints that other programs have written with Orbax: read, never written.

In: a folder, a state as a pattern. Out: the same state with the saved content.
"""

from __future__ import annotations

from typing import Any

from kinetic._in_job.checkpoint import tree
from kinetic._in_job.checkpoint.persistent import explain_errors, orbax
from kinetic._in_job.checkpoint.tree import Leaf, TreeState
from kinetic._store.checkpoints import Checkpoints, Step
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
        if not steps and self._checkpoints.program:
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
            CheckpointError: it cannot be read, or it is not clear what of it is the state.
            CheckpointMismatch: it does not fit.
        """
        guest_step = self._checkpoints.step(step)
        path = self._checkpoints.path(guest_step)
        where = f"of {guest_step.layout.program or 'kinetic'} in {path}"
        content: _OrbaxTree
        if not guest_step.layout.program:
            content = _OwnTree(f"{path}/{guest_step.layout.item}", step, guest_step)
        elif guest_step.layout.item is None:
            raise CheckpointError(self._is_unclear(guest_step, path))
        else:
            content = _OrbaxTree(f"{path}/{guest_step.layout.item}".rstrip("/"), step)
        saved = content.leaves(now)
        tree.check_same(saved, now.leaves, where, cast=cast)
        now = now.as_saved(saved)
        values = content.values(now)
        return now.with_values(lambda n: now.values[n] if now.leaves[n].is_empty else values[n]), (
            f"{path}, a checkpoint of {guest_step.layout.program or 'kinetic'}"
        )

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


class _OrbaxTree:
    """A pytree as Orbax writes it."""

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._number = number
        self._names: list[str] = []
        self._structure: Any = None

    def leaves(self, now: TreeState) -> list[Leaf]:
        """Return its leaves, by the names that they have in the state."""
        import jax

        described = _describe_tree(self._path, self._number)
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(described)
        self._names = [tree.join_keys(path) for path, _ in with_paths]
        if len(with_paths) == len(now.leaves) == 1 and now.joined == [""]:
            self._names = [""]  # an array alone has no key
        names = dict(zip(now.joined, (leaf.name for leaf in now.leaves), strict=True))
        return [
            _leaf(names.get(name, name), about)
            for name, (_, about) in zip(self._names, with_paths, strict=True)
        ]

    def values(self, now: TreeState) -> list[Any]:
        """Return the values, laid out as those of the state."""
        import jax

        wanted = dict(zip(now.joined, now.values, strict=True))
        item = jax.tree_util.tree_unflatten(self._structure, [wanted[n] for n in self._names])
        leaves = jax.tree_util.tree_leaves(_read_tree(self._path, self._number, item))
        by_name = dict(zip(self._names, leaves, strict=True))
        return [by_name[name] for name in now.joined]


class _OwnTree(_OrbaxTree):
    """A pytree as kinetic writes it, with what it knows of its leaves."""

    def __init__(self, path: str, number: int, step: Step) -> None:
        super().__init__(path, number)
        self._step = step

    def leaves(self, now: TreeState) -> list[Leaf]:
        """Return its leaves."""
        if self._step.leaves is None:
            return super().leaves(now)
        return [Leaf.from_json(leaf) for leaf in self._step.leaves]

    def values(self, now: TreeState) -> list[Any]:
        """Return the values, laid out as those of the state."""
        if self._step.leaves is None:
            return super().values(now)
        return now.values_of(_read_tree(self._path, self._number, now.plain()))


def _leaf(name: str, about: Any) -> Leaf:
    """What Orbax knows of a leaf."""
    import numpy as np

    dtype = np.dtype(about.dtype)
    if type(about).__name__ == "ScalarMetadata":
        return Leaf(name, value=dtype.type(0).item())
    return Leaf(name, tuple(about.shape), dtype.name)


def _describe_tree(path: str, step: int) -> Any:
    """Return what Orbax knows of a pytree that it has written: types and shapes."""
    from etils import epath

    ocp = orbax()
    with explain_errors("read", path, step):
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path))
        return getattr(metadata, "tree", metadata)


def _read_tree(path: str, step: int, like: Any) -> Any:
    """Return a pytree that Orbax has written, laid out as another one."""
    ocp = orbax()
    with (
        explain_errors("read", path, step),
        # This handler reads what each of Orbax's handlers of pytrees has written.
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader,
    ):
        how = ocp.checkpoint_utils.construct_restore_args(like)
        return reader.restore(path, args=ocp.args.PyTreeRestore(like, restore_args=how))
