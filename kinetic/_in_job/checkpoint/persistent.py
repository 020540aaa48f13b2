"""The persistent tier: Orbax's files in a folder that all hosts share, or in a bucket.

In: a state, a folder. Out: `STEP/`, as Orbax's `CheckpointManager` writes it: visible when it is
whole. The only module that imports Orbax.
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
"""Names of what a checkpoint holds: the state, what is known about it, digests of its parts."""
_BROKEN, _ENDED = "JaxRuntimeError", "CANCELLED"
"""What waits for other hosts gets this error when its world ends."""
_COMMITTED = "commit_success.txt"
"""What a step in a bucket has when it is whole."""
_OF_ALL_STEPS = "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED"
_LIMIT_S = 600
"""How long Orbax lets the hosts wait for each other."""


_ORBAX = "/orbax/checkpoint/"
_ENDS_SAVES = "save_finalize"
"""How the name of Orbax's thread begins that ends a save."""
_REMOVED = "kinetic-removed.json"
"""Beside the steps: those of ours that are being removed, of which a kill may leave a part."""
_log = logging.getLogger(__name__)


class StepUnreadable(CheckpointError):
    """A step is damaged: an older one may do."""


class StepReading(NamedTuple):
    """What a process has read of a step.

    Attributes:
        values: of the leaves; None where another process has read them for all.
        shared: where those come from, by the number of the leaf.
    """

    values: list[Any]
    shared: Mapping[int, ArraySource]

    @property
    def readers(self) -> frozenset[int]:
        """The processes that have read for others; none if each has read for itself."""
        return frozenset(reader for each in self.shared.values() for reader in each.readers)

    def spread(self, now: TreeState, process: int) -> list[Any]:
        """Return the values of all leaves, laid out as those of a state; collective."""
        values = [*self.values]
        likes = [now.values[n] for n in self.shared]
        read = [values[n] if process in s.readers else None for n, s in self.shared.items()]
        for n, value in zip(
            self.shared, replicas.spread_arrays(likes, [*self.shared.values()], read), strict=True
        ):
            values[n] = value
        return values


class OrbaxTree:
    """A pytree that Orbax has written. Errors are Orbax's.

    Args:
        path: of its folder.
        like: one with the same nodes, if it is known: finding out takes time.

    Attributes:
        names: what Orbax calls its leaves.
        about: what is known of each.
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
        """Return all leaves, typed keys as plain arrays. `wanted`: how each is laid out, by Orbax's
        names; Orbax's placeholder for one that is not read."""
        import jax

        if not wanted:
            return []
        ocp = orbax()
        item = jax.tree_util.tree_unflatten(self._structure, [wanted[name] for name in self.names])
        how = ocp.checkpoint_utils.construct_restore_args(item)
        # This handler reads what each of Orbax's handlers of pytrees has written.
        restored = ocp.PyTreeCheckpointHandler().restore(
            self._path, args=ocp.args.PyTreeRestore(item, restore_args=how)
        )
        values = dict(zip(self.names, jax.tree_util.tree_leaves(restored), strict=True))
        data = jax.random.key_data
        return [data(v) if tree.is_key(v) else v for v in map(values.__getitem__, wanted)]


class Persistent:
    """Orbax's manager of a folder; every method is collective, except `steps`.

    Args:
        directory: the folder.
        keep: which steps stay.
        process: this one.

    Raises:
        PreflightError: Orbax is not installed, or too old.
        CheckpointError: the folder cannot be used.
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
        of_others = _steps_of_others(directory)
        policy = keeping.policy_of(keep, of_others, ocp.checkpoint_managers)
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            preservation_policy=keeping.Undamaged(
                policy, keep.newest is None, self._damaged, self._note_removal
            ),
            best_fn=keeping.metric_of(keep),
            best_mode=keep.best_is,
            async_options=ocp.AsyncOptions(timeout_secs=_LIMIT_S, barrier_sync_fn=_meet),
        )
        with explain_errors("opened", directory):
            if process == 0:
                _replace_damaged_metrics(directory)
            self._manager = ocp.CheckpointManager(
                directory, options=options, handler_registry=_registry(process)
            )
            self._newest = max(self.steps(), default=-1)

    def steps(self) -> list[int]:
        """Return the committed steps."""
        return sorted(int(step) for step in self._manager.all_steps())

    def record(self, step: int) -> dict[str, Any]:
        """Return what is known about a step; empty for one that another program has written.

        Raises:
            StepUnreadable: it is damaged.
        """
        with explain_errors("read", self._directory, step):
            folder = self._manager.directory / str(step) / RECORD
            if not folder.exists():
                return {}
            return digests.check_signed(orbax().JsonCheckpointHandler().restore(folder) or {})

    def continue_after(self, step: int) -> None:
        """Let a training go on after this step, since what is newer is damaged. Nothing of that is
        removed before the training has come as far again."""
        self._damaged.update(each for each in self.steps() if each > step)
        self._newest = max((each for each in self.steps() if each <= step), default=-1)

    def digests(self, step: int, files: int) -> list[Any]:
        """Return this process's share of the digests of a step; all processes have all of them.

        Args:
            step: the step.
            files: how many processes have written them.

        Raises:
            StepUnreadable: they are damaged.
        """
        import jax

        rows = []
        with explain_errors("read", self._directory, step):
            for number in range(self._process, files, jax.process_count()):
                file = self._manager.directory / str(step) / DIGESTS / _file(number)
                rows += digests.check_signed(json.loads(file.read_text()))[DIGESTS]
        return rows

    def save(
        self,
        step: int,
        state: Any,
        record: Mapping[str, Any],
        metrics: Mapping[str, float],
        digests_here: ShardDigests | None = None,
    ) -> bool:
        """Begin to save; return whether this was a new step. Waits for the save before. The step
        gets its name when the digests of all processes are there."""
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
        if digests_here is not None:
            items[DIGESTS] = ocp.args.JsonSave(digests_here)
        self.wait()
        self._saving = step
        with self._explain_writing():
            # The caller decides; Orbax would refuse what is older than a damaged step.
            args = ocp.args.Composite(**items)
            self._mark.set(step)
            try:
                self._manager.save(step, args=args, metrics=dict(metrics), force=True)
            finally:
                self._mark.clear_after(worlds.is_saving, _LIMIT_S)
        self._newest = step
        return True

    def read(self, step: int, now: TreeState, process: int) -> StepReading:
        """Read what this process has to, for itself and for others. It waits for no other: any of
        them may find damage.

        Raises:
            StepUnreadable: the step is damaged.
        """
        import jax

        sources = {n: replicas.source_of(value) for n, value in now.arrays()}
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
        """Return one leaf as it was saved, in this process's memory; None if it is damaged."""
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
        except ValueError:  # Nodes without leaves may be other ones than then.
            return OrbaxTree(path).read(wanted)

    def _note_removal(self, steps: list[int]) -> None:
        if self._process == 0:
            (self._manager.directory / _REMOVED).write_text(json.dumps(steps))

    def has(self, step: int) -> bool:
        """Whether a step is committed, as far as this process sees it now."""
        with contextlib.suppress(OSError):
            folder = self._manager.directory / str(step)
            return bool((folder / _COMMITTED if is_bucket(self._directory) else folder).exists())
        return False

    def check(self) -> None:
        """Raise what a save in the background has met."""
        with self._explain_writing():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until all that was saved is committed."""
        with self._explain_writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and free what the manager holds."""
        with self._explain_writing():
            self._manager.close()

    @contextlib.contextmanager
    def _explain_writing(self) -> Iterator[None]:
        """Name the step that is being saved in an error."""
        done = "written" if self._saving is None else f"written (step {self._saving})"
        try:
            with explain_errors(done, self._directory):
                yield
        except CheckpointError as error:
            error.step = self._saving
            self._mark.clear()
            raise


def _meet(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier. A host on which a save has failed waits for nobody: the others wait at an
    earlier one, and would do so until the time is over."""
    error = sys.exc_info()[1]
    if error is not None and threading.current_thread().name.startswith(_ENDS_SAVES):
        raise error
    orbax().multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Orbax's log says what is said nowhere else: not that a save was cut off
    because the hosts' world has ended, which the leader tells. Of an error of its own, one line is
    left of many pages: who waits for the save gets it with its traceback."""
    error = raised = record.exc_info[1] if record.exc_info else None
    while error is not None:
        if type(error).__name__ == _BROKEN and str(error).startswith(_ENDED):
            return False
        error = error.__cause__ or error.__context__
    if raised is not None and _ORBAX in record.pathname:
        words, why = record.getMessage(), str(raised)
        record.msg, record.args = words if why in words else f"{words}: {why}", None
        record.exc_info = record.exc_text = None
    return True


def orbax() -> Any:
    """Return Orbax, ready for use.

    Raises:
        PreflightError: it is not installed, or too old.
    """
    if importlib.util.find_spec("orbax") is None or not _has("orbax.checkpoint"):
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


def _has(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _parse_flags() -> None:
    """Let absl's flags be read, as Orbax does: where nobody has parsed them it raises on some hosts
    only, and the others wait. A program may still parse them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _file(process: int) -> str:
    return f"host-{process}.json"


def _registry(process: int) -> Any:
    """Where digests are written: each process has a file of its own."""
    ocp = orbax()

    class DigestHandler(ocp.JsonCheckpointHandler):  # type: ignore[misc, name-defined]
        """Makes and writes digests in the background, beside the state."""

        async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Any]:
            args.item.fetch()

            async def write() -> None:
                signed = digests.sign({DIGESTS: args.item.compute()})
                (directory / _file(process)).write_text(json.dumps(signed))

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name=DIGESTS)]

    handler = DigestHandler(_file(process))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(DIGESTS, ocp.args.JsonSave, handler)
    registry.add(DIGESTS, ocp.args.JsonRestore, handler)
    return registry


def _remove_empty_steps(directory: str) -> None:
    """Remove folders of steps with nothing in them: Orbax would take each for a checkpoint."""
    for folder in Path(directory).glob("[0-9]*"):
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # there is something
                folder.rmdir()


def _replace_damaged_metrics(directory: str) -> None:
    """Let steps of which only the metrics are damaged count as ones without: Orbax would not open
    the folder. The other processes are waited for before it reads them."""
    from etils import epath

    for file in epath.Path(directory).glob("*/metrics/metrics"):
        step = file.parent.parent
        if not step.name.isdigit() or not (step / RECORD).exists():
            continue  # another program's
        try:
            is_damaged = not isinstance(json.loads(file.read_text()), dict)
        except ValueError:
            is_damaged = True
        if is_damaged:
            _log.warning(
                "the metrics of step %s in %s are damaged: none count", step.name, directory
            )
            file.write_text("{}")


def _steps_of_others(directory: str) -> list[int]:
    """The steps that another program has saved here, which stay; ours that were being removed
    when a process was killed may look like them."""
    from etils import epath

    folder = epath.Path(directory)
    with explain_errors("opened", directory):
        steps = (
            [each for each in folder.iterdir() if each.name.isdigit()] if folder.exists() else []
        )
        of_others = {int(each.name) for each in steps if not (each / RECORD).exists()}
        if of_others and (folder / _REMOVED).exists():
            with contextlib.suppress(ValueError):
                of_others -= {*json.loads((folder / _REMOVED).read_text())}
        return sorted(of_others)


@contextlib.contextmanager
def explain_errors(done: str, directory: str, step: int | None = None) -> Iterator[None]:
    """Make a vendor's errors ours; `step`: one that is being read, which may be damaged."""
    try:
        yield
    except (CheckpointError, PreflightError):
        raise
    except CorruptRecord as error:
        raise StepUnreadable(_of_step(step, directory, f"{error}."), step=step) from error
    except Exception as error:
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and _is_echo(error):
            raise  # a peer is lost, and the gang knows why
        advice = _advice(error)
        if step is not None and not _would_hit_others(error):
            raise StepUnreadable(
                _of_step(step, directory, _first_line(error)), step=step
            ) from error
        what = "" if step is None else f" (step {step})"
        raise CheckpointError(
            f"The folder of checkpoints {directory} could not be {done}{what}: "
            f"{_first_line(error)}{advice}",
            step=step,
        ) from error


def _of_step(step: int | None, directory: str, why: str) -> str:
    return f"step {step} in {directory} cannot be read: {why}"


def _would_hit_others(error: BaseException) -> bool:
    """Whether another step would meet it, too: it is no damage."""
    kinds = (ImportError, MemoryError, PermissionError, ConnectionError, TimeoutError)
    return isinstance(error, kinds) or re.search(_OF_ALL_STEPS, str(error)) is not None


def _is_echo(error: BaseException) -> bool:
    words = str(error).lower()
    return any(word in words for word in ("barrier", "coordination", "gloo", "heartbeat", "peer"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ") + "."


def _advice(error: BaseException) -> str:
    words = str(error)
    if isinstance(error, ImportError) and "gcsfs" in words:
        return (
            " Orbax needs the package gcsfs for buckets: name it in the project's dependencies, or "
            "have it in the image."
        )
    if "No space left" in words or "Disk quota" in words:
        return " Free some space there, or keep fewer checkpoints with keep=."
    if isinstance(error, PermissionError) or "ermission denied" in words:
        return " Choose a folder that the job may write to, with output_dir= or directory=."
    return ""


def is_bucket(directory: str) -> bool:
    """Whether the directory is a URI of another kind than a folder of this machine."""
    return "://" in directory


def join_path(directory: str, name: str) -> str:
    """Return the path of something below a folder or URI."""
    return f"{directory.rstrip('/')}/{name}"
