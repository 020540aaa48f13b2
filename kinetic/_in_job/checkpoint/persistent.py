"""The persistent tier: Orbax's files in a folder that all hosts share, or in a bucket.

A step is a folder that Orbax's `CheckpointManager` writes; it is visible only when complete. The
only module that imports Orbax.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._host.worker import worlds
from kinetic._in_job.checkpoint import digests, keeping, replicas, tree
from kinetic._in_job.checkpoint.keeping import Keep
from kinetic._in_job.checkpoint.replicas import ArraySource
from kinetic._in_job.checkpoint.saving_mark import SavingMark
from kinetic._in_job.checkpoint.tree import Leaf, TreeState
from kinetic._in_job.checkpoint.verifying import ShardDigests
from kinetic.errors import CheckpointError, CorruptRecord, PreflightError

STATE, RECORD, DIGESTS = "state", "kinetic", "digests"
"""Names of a checkpoint's items: the state, kinetic's record of it, the digests of its parts."""
_BROKEN, _ENDED = "JaxRuntimeError", "CANCELLED"
"""Type and first word of the error that a host gets if it waits while another host is lost."""
_COMMITTED = "commit_success.txt"
"""File that marks a step in a bucket as complete."""
_SYSTEMIC_ERRORS = (
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED"
)
_LIMIT_S = 600
"""Longest time in seconds for which Orbax lets hosts wait for each other."""


_ORBAX = "/orbax/checkpoint/"
_ENDS_SAVES = "save_finalize"
"""Start of the name of the thread in which Orbax finishes a save."""
_REMOVED = "kinetic-removed.json"
"""File with the numbers of steps being removed. If the process is killed, parts of them remain."""
_log = logging.getLogger(__name__)


class StepUnreadable(CheckpointError):
    """A step is damaged. An older step may be readable."""


class StepReading(NamedTuple):
    """The leaves of a step that one process has read.

    Attributes:
        values: Values of all leaves; None for a leaf that this process receives from another one.
        shared: The source of each leaf that a few processes read for all, by number of the leaf.
    """

    values: list[Any]
    shared: Mapping[int, ArraySource]

    @property
    def readers(self) -> frozenset[int]:
        """Processes that have read for other processes; empty if each has read for itself."""
        return frozenset(reader for source in self.shared.values() for reader in source.readers)

    def spread(self, now: TreeState, process: int) -> list[Any]:
        """Send the shared leaves to all processes, which must all call this. Return the values of
        all leaves, laid out like those of `now`."""
        values = [*self.values]
        likes = [now.values[n] for n in self.shared]
        read = [values[n] if process in s.readers else None for n, s in self.shared.items()]
        for n, value in zip(
            self.shared, replicas.spread_arrays(likes, [*self.shared.values()], read), strict=True
        ):
            values[n] = value
        return values


class OrbaxTree:
    """A pytree that Orbax has written. Its methods raise Orbax's errors.

    Args:
        path: Folder of the pytree.
        like: A pytree of the same structure, if known: reading that from the metadata takes time.

    Attributes:
        names: Orbax's names of the leaves.
        about: Orbax's metadata of each leaf.
    """

    def __init__(self, path: Any, like: Any = None) -> None:
        import jax
        from etils import epath

        self._path = epath.Path(path)
        if like is None:
            metadata = orbax().PyTreeCheckpointHandler().metadata(self._path)
            like = getattr(metadata, "tree", metadata)
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(like)
        self.names = [tree.join_keys(path) for path, _ in with_paths]
        self.about = [about for _, about in with_paths]

    def read(self, wanted: Mapping[str, Any]) -> list[Any]:
        """Return all leaves; typed JAX keys as plain arrays. `wanted` maps Orbax's names to the
        layout of each leaf, or to Orbax's placeholder to skip the leaf."""
        import jax

        if not wanted:
            return []
        ocp = orbax()
        item = jax.tree_util.tree_unflatten(self._structure, [wanted[name] for name in self.names])
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        # This handler reads what any of Orbax's handlers of pytrees has written.
        restored = ocp.PyTreeCheckpointHandler().restore(
            self._path, args=ocp.args.PyTreeRestore(item, restore_args=restore_args)
        )
        values = dict(zip(self.names, jax.tree_util.tree_leaves(restored), strict=True))
        data = jax.random.key_data
        return [data(v) if tree.is_key(v) else v for v in map(values.__getitem__, wanted)]


class Persistent:
    """Wrapper of Orbax's manager of a folder. All hosts must call each method, except `steps`,
    `has`, `record`, `digests`, `read` and `read_alone`.

    Args:
        directory: Path or URI of the folder.
        keep: The steps to keep.
        process: Index of this process.

    Raises:
        PreflightError: Orbax is not installed, or too old.
        CheckpointError: The folder cannot be used.
    """

    def __init__(self, directory: str, keep: Keep, process: int = 0) -> None:
        ocp = orbax()
        self._process = process
        logging.getLogger("absl").addFilter(is_news)
        self._directory = directory
        self._newest = -1
        self._saving: int | None = None
        self._mark = SavingMark("persistent")
        self._damaged: set[int] = set()
        if process == 0 and not is_bucket(directory):
            _remove_empty_steps(directory)
        foreign_steps = _list_foreign_steps(directory)
        policy = keeping.make_policy(keep, foreign_steps, ocp.checkpoint_managers)
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            preservation_policy=keeping.Undamaged(
                policy, keep.newest is None, self._damaged, self._note_removal
            ),
            best_fn=keeping.make_rank(keep),
            best_mode=keep.best_is,
            async_options=ocp.AsyncOptions(timeout_secs=_LIMIT_S, barrier_sync_fn=_wait_at_barrier),
        )
        with explain_errors("opened", directory):
            if process == 0:
                _replace_damaged_metrics(directory)
            self._manager = ocp.CheckpointManager(
                directory, options=options, handler_registry=_make_registry(process)
            )
            self._newest = max(self.steps(), default=-1)

    def steps(self) -> list[int]:
        """Return the committed steps."""
        return sorted(int(step) for step in self._manager.all_steps())

    def record(self, step: int) -> dict[str, Any]:
        """Return kinetic's record of a step; empty if another program has written the step.

        Raises:
            StepUnreadable: The step is damaged.
        """
        with explain_errors("read", self._directory, step):
            folder = self._manager.directory / str(step) / RECORD
            if not folder.exists():
                return {}
            return digests.check_signed(orbax().JsonCheckpointHandler().restore(folder) or {})

    def continue_after(self, step: int) -> None:
        """Note that all steps newer than this one are damaged. Such a step stays until training
        saves it again, or saves a later step."""
        steps = self.steps()
        self._damaged.update(newer for newer in steps if newer > step)
        self._newest = max((older for older in steps if older <= step), default=-1)

    def digests(self, step: int, files: int) -> list[Any]:
        """Return this process's share of a step's digests; all shares together are complete.

        Args:
            step: The step.
            files: Number of processes that have written digests.

        Raises:
            StepUnreadable: The digests are damaged.
        """
        import jax

        rows = []
        with explain_errors("read", self._directory, step):
            for number in range(self._process, files, jax.process_count()):
                file = self._manager.directory / str(step) / DIGESTS / _name_file(number)
                rows += digests.check_signed(json.loads(file.read_text()))[DIGESTS]
        return rows

    def save(
        self,
        step: int,
        state: Any,
        record: Mapping[str, Any],
        metrics: Mapping[str, float],
        own_digests: ShardDigests | None = None,
    ) -> bool:
        """Wait for the previous save, then begin this one. The step becomes visible when the
        digests of all processes are written.

        Returns:
            False if the step exists already.
        """
        if step <= self._newest:
            return False
        if step in self._damaged:
            with explain_errors("written", self._directory):
                self._note_removal([step])
                self._manager.delete(step)
            self._damaged.discard(step)
        ocp = orbax()
        items = {
            STATE: ocp.args.StandardSave(state),
            RECORD: ocp.args.JsonSave(digests.sign(record)),
        }
        if own_digests is not None:
            items[DIGESTS] = ocp.args.JsonSave(own_digests)
        self.wait()
        self._saving = step
        with self._explain_writing():
            # force=True: otherwise Orbax refuses a step older than a damaged one.
            args = ocp.args.Composite(**items)
            self._mark.set(step)
            try:
                self._manager.save(step, args=args, metrics=dict(metrics), force=True)
            finally:
                self._mark.clear_after(worlds.is_saving, _LIMIT_S)
        self._newest = step
        return True

    def read(self, step: int, now: TreeState, process: int) -> StepReading:
        """Read the leaves that this process needs, or will send to other processes. Nothing is sent
        yet, because only some processes may find damage.

        Raises:
            StepUnreadable: The step is damaged.
        """
        import jax

        sources = {n: replicas.choose_source(value) for n, value in now.arrays()}
        shared = {n: source for n, source in sources.items() if source is not None}
        wanted = now.in_files()
        names = list(wanted)
        for n, source in shared.items():
            like = now.values[n]
            described = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=source.sharding)
            wanted[names[n]] = described if process in source.readers else orbax().PLACEHOLDER
        with explain_errors("read", self._directory, step):
            return StepReading(self._read_tree(step, now, wanted), shared)

    def read_alone(self, step: int, now: TreeState, saved: Leaf) -> Any:
        """Read the leaf `saved` as a NumPy array, in its saved shape and type; None if damaged."""
        import numpy as np

        wanted = dict.fromkeys(now.in_files(), orbax().PLACEHOLDER)
        number = next(n for n, leaf in enumerate(now.leaves) if leaf.name == saved.name)
        wanted[[*wanted][number]] = np.broadcast_to(np.zeros((), saved.dtype), saved.shape)
        try:
            with explain_errors("read", self._directory, step):
                return self._read_tree(step, now, wanted)[number]
        except StepUnreadable:
            return None

    def _read_tree(self, step: int, now: TreeState, wanted: Mapping[str, Any]) -> list[Any]:
        path = self._manager.directory / str(step) / STATE
        try:
            return OrbaxTree(path, now.plain()).read(wanted)
        except ValueError:  # Empty containers may differ from the saved ones.
            return OrbaxTree(path).read(wanted)

    def _note_removal(self, steps: list[int]) -> None:
        if self._process == 0:
            (self._manager.directory / _REMOVED).write_text(json.dumps(steps))

    def has(self, step: int) -> bool:
        """True if this process sees that a step is committed."""
        with contextlib.suppress(OSError):
            folder = self._manager.directory / str(step)
            return bool((folder / _COMMITTED if is_bucket(self._directory) else folder).exists())
        return False

    def check(self) -> None:
        """Raise the error of a save that has failed in the background."""
        with self._explain_writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until all saves are committed."""
        with self._explain_writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until all saves are committed, and release the manager."""
        with self._explain_writing():
            self._manager.close()

    @contextlib.contextmanager
    def _explain_writing(self) -> Iterator[None]:
        """Name the step being saved in errors raised within this block."""
        action = "written" if self._saving is None else f"written (step {self._saving})"
        try:
            with explain_errors(action, self._directory):
                yield
        except CheckpointError as error:
            error.step = self._saving
            self._mark.clear()
            raise


def _wait_at_barrier(*, key: str, timeout_ms: int) -> None:
    """Wait at Orbax's barrier. Raise the error of a failed save at once: the other hosts wait at an
    earlier barrier until a time limit, and never reach this one."""
    error = sys.exc_info()[1]
    if error is not None and threading.current_thread().name.startswith(_ENDS_SAVES):
        raise error
    orbax().multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def is_news(record: logging.LogRecord) -> bool:
    """Filter Orbax's log: True for records to keep.

    Drop records about saves that failed because another host was lost: the leader reports that.
    Reduce tracebacks to one line: the caller that waits for the save gets the full error.
    """
    error = raised = record.exc_info[1] if record.exc_info else None
    while error is not None:
        if type(error).__name__ == _BROKEN and str(error).startswith(_ENDED):
            return False
        error = error.__cause__ or error.__context__
    if raised is not None and _ORBAX in record.pathname:
        message, why = record.getMessage(), str(raised)
        record.msg, record.args = message if why in message else f"{message}: {why}", None
        record.exc_info = record.exc_text = None
    return True


def orbax() -> Any:
    """Return the module `orbax.checkpoint`, ready for use.

    Raises:
        PreflightError: Orbax is not installed, or too old.
    """
    if importlib.util.find_spec("orbax") is None or not _is_installed("orbax.checkpoint"):
        raise PreflightError(
            "kinetic.Checkpointer needs Orbax, which is not installed on this host: "
            "pip install orbax-checkpoint. On a cluster, name it in the project's dependencies."
        )
    _parse_flags()
    import orbax.checkpoint as ocp

    if not hasattr(ocp, "checkpoint_managers"):
        raise PreflightError(
            f"kinetic.Checkpointer needs a newer Orbax than {ocp.__version__}: "
            "pip install --upgrade orbax-checkpoint."
        )
    return ocp


def _is_installed(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _parse_flags() -> None:
    """Mark absl's flags as parsed. Otherwise Orbax raises on some hosts, and other hosts wait for
    them forever. A program can still parse its flags."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _name_file(process: int) -> str:
    return f"host-{process}.json"


def _make_registry(process: int) -> Any:
    """Return Orbax's handlers, and one for digests. Each process writes its digests to a file of
    its own; `process` is the number of this one."""
    ocp = orbax()

    class DigestHandler(ocp.JsonCheckpointHandler):  # type: ignore[misc, name-defined]
        """Computes and writes digests in the background, in parallel with the state."""

        async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Any]:
            args.item.fetch()

            async def write() -> None:
                signed = digests.sign({DIGESTS: args.item.compute()})
                (directory / _name_file(process)).write_text(json.dumps(signed))

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name=DIGESTS)]

    handler = DigestHandler(_name_file(process))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(DIGESTS, ocp.args.JsonSave, handler)
    registry.add(DIGESTS, ocp.args.JsonRestore, handler)
    return registry


def _remove_empty_steps(directory: str) -> None:
    """Remove empty folders of steps, which Orbax would take for checkpoints."""
    for folder in Path(directory).glob("[0-9]*"):
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # A folder with files cannot be removed.
                folder.rmdir()


def _replace_damaged_metrics(directory: str) -> None:
    """Replace damaged metrics of kinetic's steps by empty ones, so that Orbax can open the folder.
    Other processes read the metrics only after a barrier."""
    from etils import epath

    for file in epath.Path(directory).glob("*/metrics/metrics"):
        step = file.parent.parent
        if not step.name.isdigit() or not (step / RECORD).exists():
            continue  # Saved by another program.
        try:
            is_damaged = not isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            is_damaged = True
        if is_damaged:
            _log.warning(
                "the metrics of step %s in %s are damaged and were removed", step.name, directory
            )
            file.write_text("{}")


def _list_foreign_steps(directory: str) -> list[int]:
    """List the steps in this folder that another program has saved, which must stay. Remains of
    kinetic's own steps whose removal was interrupted are left out."""
    from etils import epath

    folder = epath.Path(directory)
    with explain_errors("opened", directory):
        steps = (
            [path for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
        )
        foreign_steps = {int(path.name) for path in steps if not (path / RECORD).exists()}
        if foreign_steps and (folder / _REMOVED).exists():
            with contextlib.suppress(ValueError):
                foreign_steps -= {*json.loads((folder / _REMOVED).read_text())}
        return sorted(foreign_steps)


@contextlib.contextmanager
def explain_errors(action: str, directory: str, step: int | None = None) -> Iterator[None]:
    """Turn Orbax's errors into kinetic's. If `step` is being read, errors that may come from damage
    become `StepUnreadable`."""
    try:
        yield
    except (CheckpointError, PreflightError):
        raise
    except CorruptRecord as error:
        raise StepUnreadable(
            _explain_unreadable(step, directory, f"{error}."), step=step
        ) from error
    except Exception as error:
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and _is_echo(error):
            raise  # Another host is lost: the leader reports the cause.
        advice = _advise(error)
        if step is not None and not _is_systemic(error):
            raise StepUnreadable(
                _explain_unreadable(step, directory, _first_line(error)), step=step
            ) from error
        which = "" if step is None else f" (step {step})"
        raise CheckpointError(
            f"The folder of checkpoints {directory} could not be {action}{which}: "
            f"{_first_line(error)}{advice}",
            step=step,
        ) from error


def _explain_unreadable(step: int | None, directory: str, why: str) -> str:
    return f"step {step} in {directory} cannot be read: {why}"


def _is_systemic(error: BaseException) -> bool:
    """True if the error would occur with any step, such as a missing right: no sign of damage."""
    kinds = (ImportError, MemoryError, PermissionError, ConnectionError, TimeoutError)
    return isinstance(error, kinds) or re.search(_SYSTEMIC_ERRORS, str(error)) is not None


def _is_echo(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("barrier", "coordination", "gloo", "heartbeat", "peer"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ") + "."


def _advise(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, ImportError) and "gcsfs" in text:
        return (
            " Orbax needs the package gcsfs for buckets: add it to the project's dependencies, or "
            "to the image."
        )
    if "No space left" in text or "Disk quota" in text:
        return " Free some space there, or keep fewer checkpoints with keep=."
    if isinstance(error, PermissionError) or "ermission denied" in text:
        return " Choose a folder that the job may write to, with output_dir= or directory=."
    return ""


def is_bucket(directory: str) -> bool:
    """True if the directory is a URI; False if it is a folder on this machine."""
    return "://" in directory


def join_path(directory: str, name: str) -> str:
    """Return the path of an entry below a folder or URI."""
    return f"{directory.rstrip('/')}/{name}"
