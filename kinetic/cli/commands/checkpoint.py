"""`kinetic checkpoint`: checkpoints of a training run, and the memory that local ones need."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import text
from kinetic._core import checkpoint_size
from kinetic._core.checkpoint_size import Size, in_gigabytes
from kinetic._store.checkpoints import ANOTHER
from kinetic.cli import exit_codes, output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import confirm, json_option, yes_option
from kinetic.errors import NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._store.checkpoints import Checkpoints, Step

_COLUMNS = ("STEP", "STATE", "AGE", "SIZE", "HOSTS", "JOB", "METRICS")
_NUMBERS = ("STEP", "AGE", "SIZE", "HOSTS")
_LEAVES = ("LEAF", "SHAPE", "TYPE", "SIZE")

_GROUP_HELP = """List, inspect and remove checkpoints, and size memory for local checkpoints.

URI is the folder or gs:// URI that `kinetic.Checkpointer` wrote to, the output folder that contains
it, or the ID of the job. Checkpoints that other programs wrote with Orbax are listed, too.

\b
Examples:
  kinetic checkpoint ls runs/42
  kinetic checkpoint inspect job-1a2b
  kinetic checkpoint rm gs://bucket/run-42 --step 100
  kinetic checkpoint size --params 70e9 --hosts 32
"""

_LS_HELP = """List checkpoints, oldest first.

An unfinished checkpoint is being written, or its job was killed while writing it. It is never
restored, and the next run of the training removes it.

\b
Examples:
  kinetic checkpoint ls runs/42
  kinetic checkpoint ls gs://bucket/run-42 --json
"""

_INSPECT_HELP = """Show the content of a checkpoint: by default, of the newest one.

\b
Examples:
  kinetic checkpoint inspect runs/42
  kinetic checkpoint inspect runs/42 --step 100 --json
"""

_RM_HELP = """Remove checkpoints.

A folder that a job is writing is refused, unless you add --force. kinetic cannot tell whether
another program is writing to the folder.

\b
Examples:
  kinetic checkpoint rm runs/42 --step 100 --step 200
  kinetic checkpoint rm runs/42 --unfinished --yes
  kinetic checkpoint rm runs/42 --all
"""

_SIZE_HELP = """Show how much memory each host needs for local checkpoints, and why.

A checkpoint has the weights and the optimizer's state, split over the hosts of a slice. Give the
number of parameters, or a URI to use the size of its newest checkpoint, also of another program. A
host keeps the last checkpoint while it writes the next, so it needs twice its part, plus a margin.

\b
Examples:
  kinetic checkpoint size --params 70e9 --hosts 32
  kinetic checkpoint size --params 8e9 --accelerator tpu-v6e-64
  kinetic checkpoint size gs://bucket/run-42 --hosts 32
"""


@click.group(
    help=_GROUP_HELP, short_help="List, inspect and remove checkpoints, and size memory for them."
)
def checkpoint() -> None:
    """Group of the commands about checkpoints."""


def _find_folder(app: AppContext, name: str) -> str:
    """Return the folder of checkpoints: `name` itself if it is a folder or a URI; if it is a job's
    id, the job's output folder."""
    if re.fullmatch(r"job-[0-9a-f]+", name) and not os.path.exists(name):  # noqa: PTH110
        folder = app.find(name).output_dir
        if not folder:
            raise NotFound(
                f"{name} has no output folder. Give the path or URI of the checkpoints instead."
            )
        return folder
    return name


def _open_checkpoints(app: AppContext, name: str) -> Checkpoints:
    from kinetic._store.checkpoints import Checkpoints

    return Checkpoints(_find_folder(app, name))


_argument = click.argument("uri", metavar="URI", shell_complete=complete_with("folders"))


@checkpoint.command("ls", help=_LS_HELP, short_help="List checkpoints.")
@json_option
@_argument
@pass_app
def ls(app: AppContext, /, *, uri: str, as_json: bool) -> None:
    """Print the checkpoints of a folder."""
    checkpoints = _open_checkpoints(app, uri)
    steps = checkpoints.steps()
    if as_json:
        leaves = [None if step.leaves is None else len(step.leaves) for step in steps]
        rows = zip(steps, leaves, strict=True)
        output.json_document([step.to_json() | {"leaves": count} for step, count in rows])
        return
    if not steps:
        others = f", only of {program}" if (program := checkpoints.program) else ""
        output.notice(f"{checkpoints.where} has no checkpoints of kinetic or Orbax{others}.")
        return
    if program := checkpoints.program:
        output.notice(f"The checkpoints in {checkpoints.where} were written by {program}.")
    now = time.time()
    output.table(_COLUMNS, [_row(step, now) for step in steps], right=_NUMBERS, cut="METRICS")


def _row(step: Step, now: float) -> tuple[str, ...]:
    return (
        str(step.step) if step.step >= 0 else "-",
        "committed" if step.is_committed else "unfinished",
        "-" if step.saved_at is None else text.age(now - step.saved_at),
        in_gigabytes(step.size_bytes),
        str(step.hosts or "-"),
        step.job_id or "-",
        _metrics(step) or "-",
    )


def _metrics(step: Step) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in (step.metrics or {}).items())


@checkpoint.command("inspect", help=_INSPECT_HELP, short_help="Show the content of a checkpoint.")
@click.option(
    "--step", metavar="N", type=click.IntRange(min=0), help="Show the checkpoint of this step."
)
@json_option
@_argument
@pass_app
def inspect(app: AppContext, /, *, uri: str, step: int | None, as_json: bool) -> None:
    """Print the arrays and values in a checkpoint."""
    checkpoints = _open_checkpoints(app, uri)
    chosen = checkpoints.step(step)
    if as_json:
        output.json_document(chosen.to_json() | {"folder": checkpoints.path(chosen)})
        return
    for name, words in _about(checkpoints, chosen):
        output.line(f"{name:<12}{words}")
    if names := checkpoints.names(chosen):
        output.line()
        output.table(_LEAVES[:1], [(name,) for name in names], wrap="LEAF")
    if chosen.leaves:
        output.line()
        rows = [_leaf(leaf) for leaf in chosen.leaves]
        output.table(_LEAVES, rows, right=("SIZE",), wrap="LEAF")


def _about(checkpoints: Checkpoints, step: Step) -> list[tuple[str, str]]:
    arrays = [leaf for leaf in step.leaves or () if "dtype" in leaf]
    saved = "" if step.saved_at is None else f"{text.age(time.time() - step.saved_at)} ago"
    job = f"{step.job_id}, {step.hosts} host{'s' * (step.hosts != 1)}" if step.job_id else ""
    is_unknown = step.layout.program == ANOTHER
    items = (*step.layout.trees, *step.layout.others) if step.layout.program else ()
    facts = [
        ("Step", str(step.step) if step.step >= 0 else "without a number"),
        ("Folder", checkpoints.path(step)),
        ("Saved", saved),
        ("By", job),
        ("Size", in_gigabytes(step.size_bytes)),
        ("Numbers", f"{sum(math.prod(leaf['shape']) for leaf in arrays):,}" if arrays else ""),
        ("Metrics", _metrics(step)),
        ("Iterators", f"the positions of {step.positions} hosts" if step.positions else ""),
        ("Program", "" if is_unknown else step.layout.program),
        ("State", "written by another program, so its leaves are unknown" if is_unknown else ""),
        ("Items", ", ".join(item for item in items if item)),
    ]
    return [(name, words) for name, words in facts if words]


_BITS = re.compile(r"(\d+)")


def _leaf(leaf: dict[str, Any]) -> tuple[str, ...]:
    if "dtype" not in leaf:
        return leaf["name"], "", "value", str(leaf.get("value"))
    bits = _BITS.search(leaf["dtype"])
    size = math.prod(leaf["shape"]) * (int(bits[1]) / 8 if bits else 1)
    return leaf["name"], str(tuple(leaf["shape"])), leaf["dtype"], in_gigabytes(size)


@checkpoint.command("rm", help=_RM_HELP, short_help="Remove checkpoints.")
@click.option(
    "--step",
    "numbers",
    metavar="N",
    type=click.IntRange(min=0),
    multiple=True,
    help="Remove the checkpoint of this step. Repeatable.",
)
@click.option("--unfinished", is_flag=True, help="Remove unfinished checkpoints.")
@click.option("--all", "everything", is_flag=True, help="Remove all checkpoints.")
@click.option("--force", is_flag=True, help="Also remove from a folder that a job is writing.")
@yes_option
@_argument
@pass_app
def rm(
    app: AppContext,
    /,
    *,
    uri: str,
    numbers: tuple[int, ...],
    unfinished: bool,
    everything: bool,
    force: bool,
    yes: bool,
) -> int:
    """Remove checkpoints; return the exit code."""
    if not (numbers or unfinished or everything):
        raise UsageError("Choose what to remove: --step N, --unfinished or --all.")
    checkpoints = _open_checkpoints(app, uri)
    steps = checkpoints.steps()
    if checkpoints.is_one:
        raise UsageError(
            f"{checkpoints.where} is a single checkpoint. Name the folder that contains it."
        )
    if (
        steps
        and not checkpoints.has_owner
        and all(step.layout.program == ANOTHER for step in steps)
    ):
        raise UsageError(
            f"{checkpoints.where} has no checkpoints of kinetic or Orbax. Remove checkpoints of "
            "another program with that program."
        )
    missing = [n for n in numbers if n not in {step.step for step in steps}]
    if missing:
        checkpoints.step(missing[0])  # Raises an error that lists the steps.
    chosen = [
        step
        for step in steps
        if everything or (unfinished and not step.is_committed) or step.step in numbers
    ]
    others = [step for step in chosen if step.is_committed and step.layout.program == ANOTHER]
    if others:
        names = ", ".join(step.name for step in others)
        output.notice(
            f"Checkpoints skipped, because neither kinetic nor Orbax wrote them: {names}."
        )
        chosen = [step for step in chosen if step not in others]
    if not chosen:
        output.notice(f"{checkpoints.where} has no checkpoints to remove.")
        return exit_codes.OK
    names = ", ".join(dict.fromkeys(str(step.step) for step in chosen))
    what = "step" if len(chosen) == 1 else "steps"
    size = in_gigabytes(sum(step.size_bytes for step in chosen))
    where = (
        f"{checkpoints.where}, written by {program}"
        if (program := checkpoints.program)
        else checkpoints.where
    )
    confirm(f"remove {what} {names} ({size}) from {where}", yes=yes)
    # Do not take the lease in another program's folder: that would leave a file there.
    if force or (program and not checkpoints.has_owner):
        checkpoints.remove(chosen)
    else:
        _remove_exclusively(checkpoints, chosen)
    output.line(f"Removed {len(chosen)} of {len(steps)} checkpoints ({size}).")
    return exit_codes.OK


def _remove_exclusively(checkpoints: Checkpoints, chosen: list[Step]) -> None:
    """Remove steps while holding the folder's lease, so that no job may write to it."""
    from kinetic._store import lease

    me = lease.Owner("", os.urandom(8).hex(), os.getpid(), socket.gethostname())
    folder_lease = lease.Lease(
        lease.open_record(checkpoints.where), f"folder of checkpoints {checkpoints.where}", me
    )
    folder_lease.acquire()
    try:
        checkpoints.remove(chosen)
    finally:
        folder_lease.release()


@checkpoint.command("size", help=_SIZE_HELP, short_help="Size the memory for local checkpoints.")
@click.option(
    "--params", metavar="N", type=float, help="Number of parameters of the model, such as 70e9."
)
@click.option(
    "--hosts", metavar="N", type=click.IntRange(min=1), help="Number of hosts of a slice."
)
@click.option(
    "--accelerator",
    "-a",
    metavar="NAME",
    shell_complete=complete_with("accelerators"),
    help="Slice whose number of hosts to use, instead of --hosts.",
)
@click.option(
    "--bytes-per-param",
    metavar="N",
    type=float,
    default=checkpoint_size.BYTES_PER_PARAMETER,
    show_default=True,
    help="Bytes per parameter: weights and the optimizer's state.",
)
@click.option(
    "--margin",
    metavar="PERCENT",
    type=click.FloatRange(min=0),
    default=checkpoint_size.MARGIN * 100,
    show_default=True,
    help="Additional room.",
)
@json_option
@click.argument("uri", metavar="[URI]", required=False, shell_complete=complete_with("folders"))
@pass_app
def size(
    app: AppContext,
    /,
    *,
    uri: str | None,
    params: float | None,
    hosts: int | None,
    accelerator: str | None,
    bytes_per_param: float,
    margin: float,
    as_json: bool,
) -> None:
    """Print the memory that a host needs for local checkpoints, with its formula."""
    if (uri is None) == (params is None):
        raise UsageError("Give either --params or the URI of checkpoints, not both.")
    if uri is not None:
        checkpoints = _open_checkpoints(app, uri)
        step = checkpoints.step(None)
        params, bytes_per_param = float(step.size_bytes), 1.0
        what = checkpoints.path(step)
    else:
        assert params is not None  # Checked above.
        what = f"{params:,.0f} parameters x {bytes_per_param:g} bytes"
    if not (0 < params < math.inf and 0 < bytes_per_param < math.inf):
        raise UsageError("--params and --bytes-per-param must be greater than 0.")
    needed = Size(params, _hosts(hosts, accelerator), bytes_per_param, margin / 100)
    quantity = checkpoint_size.quantity(needed.host_bytes)
    if as_json:
        return output.json_document(_document(needed, quantity))
    for row, formula, result in _formula(needed, what):
        output.line(f"{row:<14}{formula:<40}= {result}")
    return output.line(
        f"{in_gigabytes(needed.host_bytes)} per host: a ramdisk of at least {quantity}."
    )


def _hosts(hosts: int | None, accelerator: str | None) -> int:
    if (hosts is None) == (accelerator is None):
        raise UsageError("Give either --hosts or --accelerator, not both.")
    if hosts is not None:
        return hosts
    from kinetic._core.accelerators.resolve import resolve

    return resolve(str(accelerator)).hosts


def _formula(needed: Size, what: str) -> list[tuple[str, str, str]]:
    whole, part = in_gigabytes(needed.checkpoint_bytes), in_gigabytes(needed.part_bytes)
    two = in_gigabytes(needed.part_bytes * checkpoint_size.COPIES)
    return [
        ("Checkpoint", f"{what} ", whole),
        ("Each host", f"{whole} / {needed.hosts} hosts of a slice", part),
        ("Two copies", f"{part} x {checkpoint_size.COPIES}", two),
        ("With margin", f"{two} x {1 + needed.margin:g}", in_gigabytes(needed.host_bytes)),
    ]


def _document(needed: Size, quantity: str) -> dict[str, Any]:
    return {
        "parameters": needed.parameters,
        "bytes_per_parameter": needed.bytes_per_parameter,
        "hosts": needed.hosts,
        "margin": needed.margin,
        "checkpoint_bytes": needed.checkpoint_bytes,
        "part_bytes": needed.part_bytes,
        "host_bytes": needed.host_bytes,
        "ramdisk": quantity,
    }
