"""Checks of a checkpointer's arguments: cadence, folders, retention, metrics.

In: arguments as users write them. Out: `Cadence`, paths, `Keep`, numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._core import preemption
from kinetic._core.duration import Duration, in_seconds
from kinetic._core.values import dataclass
from kinetic._in_job import slices
from kinetic._in_job.checkpoint import persistent
from kinetic._in_job.checkpoint.keeping import Keep
from kinetic.errors import UsageError, UsageTypeError, a_type

_FOLDER = "checkpoints"


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder; a URI unchanged."""
    text = os.fspath(path)
    return text if persistent.is_bucket(text) else str(Path(text).absolute())


def _outside_work_folder(option: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder that outlives the job; a URI unchanged.

    Raises:
        UsageError: The path is in the job's work folder, as relative paths are.
    """
    text, work = absolute(path), slices.read_variable(preemption.VARIABLE)
    if work and Path(os.path.realpath(text)).is_relative_to(os.path.realpath(work)):
        raise UsageError(
            f"{option}={os.fspath(path)!r} is in the work folder, which is removed with the job: "
            "the next job would begin at step 0. Give an absolute path or a URI that later jobs "
            f"share, or omit {option}= and set output_dir= of the job."
        )
    return text


def persistent_folder(path: str | os.PathLike[str] | None) -> str:
    """Return the path or URI of the persistent tier.

    Raises:
        UsageError: No folder is configured, or it would be removed with the job.
    """
    if path is not None:
        if not os.fspath(path):
            raise UsageError(
                "directory= must be the path of a folder, or a URI; got an empty path."
            )
        return _outside_work_folder("directory", path)
    output = slices.read_variable("KINETIC_OUTPUT_DIR")
    if not output:
        raise UsageError(
            "Checkpointer() has no folder to save to: KINETIC_OUTPUT_DIR is not set outside jobs. "
            "Pass directory= to Checkpointer()."
        )
    return persistent.join_path(output, _FOLDER)


def folder_in_memory(path: str | os.PathLike[str] | None, directory: str) -> Path | None:
    """Return this host's folder for the local tier: below `path`, or below the job's folder in
    memory; None without either: outside jobs, and in a single controller on a cluster."""
    if path is None:
        memory = slices.read_variable("KINETIC_LOCAL_DIR")
    else:
        memory = _outside_work_folder("local_directory", path)
    if not memory:
        return None
    return Path(memory, _FOLDER, hashlib.sha256(directory.encode()).hexdigest()[:12])


def check_keep(
    newest: int | None, every: int | None, best: str | None, best_is: str, count: int
) -> Keep:
    """Check the options that say which persistent checkpoints to keep.

    Raises:
        UsageError: An option is out of range.
    """
    for name, value in (("keep", newest), ("keep_every", every), ("keep_best", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageTypeError(f"{name}= must be a whole number; got {value!r}.")
        if value is not None and value < 1:
            raise UsageError(f"{name}= must be at least 1; got {value}.")
    if best_is not in ("min", "max"):
        raise UsageError(f'best_is= must be "min" or "max"; got {best_is!r}.')
    return Keep(newest, every, best or "", best_is, count)


def read_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        UsageTypeError: A metric is not a number.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        content = value.addressable_data(0) if hasattr(value, "addressable_data") else value
        try:
            numbers[str(name)] = float(content)
        except (TypeError, ValueError) as error:
            raise UsageTypeError(
                f"metrics={{{name!r}: …}} must be a number; got {a_type(value)}."
            ) from error
    return numbers


@dataclass(frozen=True)
class Cadence:
    """Rules that decide when a step is saved, and to which tier.

    Attributes:
        every: Steps divisible by this go to the persistent tier; None for no such rule.
        every_s: After this many seconds without a persistent save, the next step is saved; None for
            no such rule.
        local_every: Steps divisible by this go to the local tier; None for no local tier.
    """

    every: int | None
    every_s: float | None
    local_every: int | None

    def is_persistent(self, step: int, *, is_requested: bool) -> bool:
        return is_requested or (self.every is not None and step % self.every == 0)

    def is_local(self, step: int) -> bool:
        return self.local_every is not None and step % self.local_every == 0


def check_cadence(every: object, at_least_every: Duration | None, local_every: object) -> Cadence:
    """Check the options that say when to save.

    Args:
        every: Steps, or a length of time with a unit ("10m", a timedelta).
        at_least_every: A length of time, or None.
        local_every: Steps, or None.

    Raises:
        UsageError: An option is out of range, or has the wrong type.
    """
    every_s = _parse_seconds("at_least_every", at_least_every)
    if isinstance(every, float):  # Probably `steps / 10`: steps are meant, not seconds.
        raise UsageTypeError(
            f'every= must be a whole number of steps, or a duration with a unit such as "10m"; got '
            f"{every!r}."
        )
    if isinstance(every, int | None) and not isinstance(every, bool):
        steps = _check_steps("every", every)
    else:
        interval_s = _parse_seconds("every", every)
        assert interval_s is not None  # It would be None only for every=None.
        steps, every_s = None, interval_s
    return Cadence(steps, every_s, _check_steps("local_every", local_every))


def _check_steps(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{name}= must be a whole number of steps, or None; got {value!r}.")
    if value < 1:
        raise UsageError(
            f"{name}= must be at least 1 step; got {value}. To switch these saves off, set "
            f"{name}=None."
        )
    return value


def _parse_seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = in_seconds(value)
    except ValueError:
        seconds = None
    if seconds is None or not seconds > 0:
        raise UsageError(
            f'{name}= must be a duration above zero, such as "10m", "1h30m" or a timedelta; got '
            f"{value!r}."
        )
    return seconds
