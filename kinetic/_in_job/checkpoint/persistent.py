"""The persistent tier: Orbax's files in a folder that all hosts share, or in a bucket.

In: a state, a folder. Out: `STEP/`, as Orbax's `CheckpointManager` writes it: visible when it is
whole. The only module that imports Orbax.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kinetic._core.values import dataclass
from kinetic._in_job.checkpoint import replicas
from kinetic._in_job.checkpoint.replicas import Source
from kinetic._in_job.checkpoint.tree import State
from kinetic.errors import CheckpointError, PreflightError

STATE, RECORD = "state", "kinetic"
"""Names of what a checkpoint holds: the state, and what is known about it."""
_BROKEN, _ENDED = "JaxRuntimeError", "CANCELLED"
"""What waits for other hosts gets this error when its world ends."""
_LIMIT_S = 600
"""How long Orbax lets the hosts wait for each other."""


@dataclass(frozen=True)
class Keep:
    """Which persistent checkpoints stay.

    Attributes:
        newest: so many of the newest; None for all.
        every: and those of steps that this divides.
        best: and the best ones by the metric of this name; "" for none.
        best_is: "min" or "max".
        best_count: so many of the best.
    """

    newest: int | None = 3
    every: int | None = None
    best: str = ""
    best_is: str = "min"
    best_count: int = 1


class Persistent:
    """Orbax's manager of a folder; every method is collective, except `steps`.

    Raises:
        PreflightError: Orbax is not installed, or too old.
        CheckpointError: the folder cannot be used.
    """

    def __init__(self, directory: str, keep: Keep) -> None:
        ocp = orbax()
        logging.getLogger("absl").addFilter(is_news)
        self._directory = directory
        self._newest = -1
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            preservation_policy=_policy(keep),
            best_fn=_metric(keep),
            best_mode=keep.best_is,
            # This module's caller decides.
            should_save_fn=lambda step, latest: True,
            async_options=ocp.AsyncOptions(timeout_secs=_LIMIT_S),
        )
        with _explained("opened", directory):
            self._manager = ocp.CheckpointManager(directory, options=options)
            self._newest = max(self.steps(), default=-1)

    def steps(self) -> list[int]:
        """Return the committed steps."""
        return sorted(int(step) for step in self._manager.all_steps())

    def record(self, step: int) -> dict[str, Any]:
        """Return what is known about a step; empty for one that another program has written."""
        ocp = orbax()
        with _explained(f"read (step {step})", self._directory):
            try:
                found = self._manager.restore(
                    step, args=ocp.args.Composite(**{RECORD: ocp.args.JsonRestore()})
                )
            except (KeyError, FileNotFoundError):
                return {}
            return dict(found[RECORD] or {})

    def save(
        self, step: int, state: Any, record: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> bool:
        """Begin to save; return whether this was a new step. Waits for the save before."""
        if step <= self._newest:
            return False
        ocp = orbax()
        items = {STATE: ocp.args.StandardSave(state), RECORD: ocp.args.JsonSave(dict(record))}
        with _explained(f"written (step {step})", self._directory, step):
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=dict(metrics))
        self._newest = step
        return True

    def restore(self, step: int, now: State, process: int) -> tuple[list[Any], frozenset[int]]:
        """Return the values of a step, laid out as those of a state, and the processes that have
        read for others; none if each has read for itself."""
        sources = {n: replicas.source_of(value) for n, value in now.arrays()}
        shared = {n: source for n, source in sources.items() if source is not None}
        with _explained(f"read (step {step})", self._directory, step):
            if not shared:
                return now.values_of(self._restored(step, now.plain())), frozenset()
            found = self._read(step, now, shared, process)
            whole = [now.values[n] for n in shared]
            read = [found[n] if process in shared[n].readers else None for n in shared]
            for n, value in zip(
                shared, replicas.sent(whole, [*shared.values()], read), strict=True
            ):
                found[n] = value
        return found, frozenset(reader for each in shared.values() for reader in each.readers)

    def _restored(self, step: int, like: Any) -> Any:
        ocp = orbax()
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(like)})
        return self._manager.restore(step, args=args)[STATE]

    def _read(self, step: int, now: State, shared: Mapping[int, Source], process: int) -> list[Any]:
        """The values that this process has to read, and something in place of the others."""
        import jax

        ocp, wanted = orbax(), list(now.values)
        for n, source in shared.items():
            described = jax.ShapeDtypeStruct(
                wanted[n].shape, wanted[n].dtype, sharding=source.sharding
            )
            wanted[n] = described if process in source.readers else ocp.PLACEHOLDER
        item = now._replace(values=wanted).plain()
        # Orbax's other handler reads the same files, and leaves out what it is told to.
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(
                self._manager.directory / str(step) / STATE,
                args=ocp.args.PyTreeRestore(
                    item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
                ),
            )
        return now.values_of(found)

    def check(self) -> None:
        """Raise what a save in the background has met."""
        with _explained("written", self._directory):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until all that was saved is committed."""
        with _explained("written", self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and free what the manager holds."""
        with _explained("written", self._directory):
            self._manager.close()


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Orbax's log says what is said nowhere else: not that a save was cut off
    because the hosts' world has ended. The leader tells that, and who waits for the save gets it
    as an error; Orbax logs two tracebacks of many pages."""
    error = record.exc_info[1] if record.exc_info else None
    while error is not None:
        if type(error).__name__ == _BROKEN and str(error).startswith(_ENDED):
            return False
        error = error.__cause__ or error.__context__
    return True


def orbax() -> Any:
    """Return Orbax, ready for use.

    Raises:
        PreflightError: it is not installed, or too old.
    """
    if importlib.util.find_spec("orbax") is None or not _has("orbax.checkpoint"):
        raise PreflightError(
            "kinetic.Checkpointer needs Orbax, which is not installed on this host: "
            "pip install orbax-checkpoint, or pip install kinetic-sdk[jax]. On a cluster, name it "
            "in the project's dependencies."
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


def _metric(keep: Keep) -> Callable[[Any], float]:
    """What the best checkpoint is chosen by; one that was saved without it is the worst."""
    worst = math.inf if keep.best_is == "min" else -math.inf

    def of(metrics: Mapping[str, float] | None) -> float:
        found = float((metrics or {}).get(keep.best, worst))
        return worst if math.isnan(found) else found

    return of


def _policy(keep: Keep) -> Any:
    policies = orbax().checkpoint_managers
    newest = policies.LatestN(keep.newest)
    chosen: list[Any] = [newest]
    if keep.newest is not None and keep.every is not None:
        chosen.append(policies.EveryNSteps(keep.every))
    if keep.newest is not None and keep.best:
        chosen.append(
            policies.BestN(
                get_metric_fn=_metric(keep),
                reverse=keep.best_is == "min",
                n=keep.best_count,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(chosen)


@contextlib.contextmanager
def _explained(done: str, directory: str, step: int | None = None) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, PreflightError):
        raise
    except Exception as error:
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and _is_echo(error):
            raise  # a peer is lost, and the gang knows why
        raise CheckpointError(
            f"The folder of checkpoints {directory} could not be {done}: {_first_line(error)}"
            f"{_advice(error, directory, step)}",
            step=step,
        ) from error


def _is_echo(error: BaseException) -> bool:
    words = str(error).lower()
    return any(word in words for word in ("barrier", "coordination", "gloo", "heartbeat", "peer"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ") + "."


def _advice(error: BaseException, directory: str, step: int | None) -> str:
    words = str(error)
    if isinstance(error, KeyError) and "not found in the checkpoint" in words:
        return (
            f" A part of this step is gone. `kinetic checkpoint rm {directory} --step {step}` "
            "removes the rest; then the step before it is restored."
        )
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


def joined(directory: str, name: str) -> str:
    """Return the path of something below a folder or URI."""
    return f"{directory.rstrip('/')}/{name}"
