"""What a checkpointer is told, checked: when to save, folders, what to keep, metrics.

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
    """Return the absolute path of a folder; a URI as it is."""
    text = os.fspath(path)
    return text if persistent.is_bucket(text) else str(Path(text).absolute())


def _beyond_the_job(option: str, path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder in which checkpoints stay; a URI as it is.

    Raises:
        UsageError: it lies in the job's work folder, as a relative path does.
    """
    text, work = absolute(path), slices.read_variable(preemption.VARIABLE)
    if work and Path(os.path.realpath(text)).is_relative_to(os.path.realpath(work)):
        raise UsageError(
            f"{option}={os.fspath(path)!r} lies in the work folder, which is removed with the job: "
            "the next one would begin at step 0. Give an absolute path or a URI that later jobs "
            "share; without it, checkpoints go below $KINETIC_OUTPUT_DIR, which output_dir= names."
        )
    return text


def persistent_folder(path: str | os.PathLike[str] | None) -> str:
    """Return the path or URI of the persistent tier.

    Raises:
        UsageError: there is none, or it would be removed with the job.
    """
    if path is not None:
        if not os.fspath(path):
            raise UsageError("directory= is empty: give the path of a folder, or a URI.")
        return _beyond_the_job("directory", path)
    output = slices.read_variable("KINETIC_OUTPUT_DIR")
    if not output:
        raise UsageError(
            "Checkpointer() does not know where to save: outside of a job there is no "
            "KINETIC_OUTPUT_DIR. Give it directory=."
        )
    return persistent.join_path(output, _FOLDER)


def folder_in_memory(path: str | os.PathLike[str] | None, directory: str) -> Path | None:
    """Return this host's folder for the local checkpoints of one training; a job may have several.
    None where no memory of the machine is kept between attempts: outside of jobs, and for the only
    process of a single controller on a cluster."""
    if path is None:
        memory = slices.read_variable("KINETIC_LOCAL_DIR")
    else:
        memory = _beyond_the_job("local_directory", path)
    if not memory:
        return None
    return Path(memory, _FOLDER, hashlib.sha256(directory.encode()).hexdigest()[:12])


def check_keep(
    newest: int | None, every: int | None, best: str | None, best_is: str, count: int
) -> Keep:
    """Return which persistent checkpoints stay.

    Raises:
        UsageError: an option cannot work.
    """
    for name, value in (("keep", newest), ("keep_every", every), ("keep_best", count)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageTypeError(f"{name}= is a number of checkpoints or steps; it is {value!r}.")
        if value is not None and value < 1:
            raise UsageError(f"{name}= must be at least 1; it is {value}.")
    if best_is not in ("min", "max"):
        raise UsageError(f'best_is= is "min" or "max"; it is {best_is!r}.')
    return Keep(newest, every, best or "", best_is, count)


def read_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as numbers.

    Raises:
        UsageTypeError: one is something else.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        content = value.addressable_data(0) if hasattr(value, "addressable_data") else value
        try:
            numbers[str(name)] = float(content)
        except (TypeError, ValueError) as error:
            raise UsageTypeError(f"metrics= takes numbers; {name!r} is {a_type(value)}.") from error
    return numbers


@dataclass(frozen=True)
class Cadence:
    """When a step is saved, and in which tier.

    Attributes:
        every: the persistent tier has the steps that this divides; None for none of them.
        every_s: ... and one after so many seconds without; None for never.
        local_every: the local tier has the steps that this divides; None to have no such tier.
    """

    every: int | None
    every_s: float | None
    local_every: int | None

    def is_persistent(self, step: int, *, is_requested: bool) -> bool:
        """Whether a step goes to the persistent tier."""
        return is_requested or (self.every is not None and step % self.every == 0)

    def is_local(self, step: int) -> bool:
        """Whether a step goes to the local tier."""
        return self.local_every is not None and step % self.local_every == 0


def check_cadence(every: object, at_least_every: Duration | None, local_every: object) -> Cadence:
    """Check the options of a checkpointer.

    Args:
        every: steps, or a length of time with a unit ("10m", a timedelta).
        at_least_every: a length of time, or None.
        local_every: steps, or None.

    Raises:
        UsageError: one of them cannot work.
    """
    every_s = _seconds("at_least_every", at_least_every)
    if isinstance(every, float):  # `steps / 10` is one, and means steps
        raise UsageTypeError(
            f'every= is a number of steps, an int, or a length of time with a unit, such as "10m"; '
            f"it is {every!r}."
        )
    if isinstance(every, int | None) and not isinstance(every, bool):
        steps = _steps("every", every)
    else:
        spent = _seconds("every", every)
        assert spent is not None  # every=None is above
        steps, every_s = None, spent
    return Cadence(steps, every_s, _steps("local_every", local_every))


def _steps(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{name}= is a number of steps, or None; it is {value!r}.")
    if value < 1:
        raise UsageError(f"{name}= must be at least 1 step; it is {value}. None switches it off.")
    return value


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = in_seconds(value)
    except ValueError:
        seconds = None
    if seconds is None or not seconds > 0:
        raise UsageError(
            f'{name}= is a length of time, such as "10m", "1h30m" or a timedelta; it is {value!r}.'
        )
    return seconds
