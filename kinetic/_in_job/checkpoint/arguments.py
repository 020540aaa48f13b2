"""What a checkpointer is told, checked: folders, what to keep, metrics.

In: arguments as users write them. Out: paths, `Keep`, numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._in_job import slices
from kinetic._in_job.checkpoint import persistent
from kinetic._in_job.checkpoint.keeping import Keep
from kinetic.errors import UsageError, UsageTypeError, a_type

_FOLDER = "checkpoints"


def absolute(given: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder; a URI as it is."""
    text = os.fspath(given)
    return text if persistent.is_bucket(text) else str(Path(text).absolute())


def persistent_folder(given: str | os.PathLike[str] | None) -> str:
    """Return the path or URI of the persistent tier.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        if not os.fspath(given):
            raise UsageError("directory= is empty: give the path of a folder, or a URI.")
        return absolute(given)
    output = slices.read_variable("KINETIC_OUTPUT_DIR")
    if not output:
        raise UsageError(
            "Checkpointer() does not know where to save: outside of a job there is no "
            "KINETIC_OUTPUT_DIR. Give it directory=."
        )
    return persistent.join_path(output, _FOLDER)


def folder_in_memory(given: str | os.PathLike[str] | None, directory: str) -> Path | None:
    """Return this host's folder for the local checkpoints of one training; a job may have several.
    None where no memory of the machine is kept between attempts: outside of jobs, and for the only
    process of a single controller on a cluster."""
    told = slices.read_variable("KINETIC_LOCAL_DIR") if given is None else Path(given).absolute()
    if not told:
        return None
    return Path(told, _FOLDER, hashlib.sha256(directory.encode()).hexdigest()[:12])


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
    found = {}
    for name, value in (metrics or {}).items():
        here = value.addressable_data(0) if hasattr(value, "addressable_data") else value
        try:
            found[str(name)] = float(here)
        except (TypeError, ValueError) as error:
            raise UsageTypeError(f"metrics= takes numbers; {name!r} is {a_type(value)}.") from error
    return found
