"""The real compiler of a slice that nobody has to rent: `kinetic.compile_for`, and `compile_check`
after a run on a simulated slice; and what is said while it is waited for.

In: the name of an accelerator; a job. Out: `CompileSlice`, `CheckReport`; lines on stderr.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Callable
from typing import TextIO

from kinetic._client.board import console
from kinetic._client.board.reader import JobBoard
from kinetic._compile import topologies
from kinetic._compile.checked import CheckReport, ProgramCheck
from kinetic._compile.processes import Compilers, Compiling
from kinetic._compile.report import summarize
from kinetic._compile.slice import CompileSlice
from kinetic._config import settings
from kinetic._config.settings import Settings
from kinetic._core import layout
from kinetic._core.accelerators.prices import Price, price_of
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.duration import Duration, patience_s
from kinetic._core.ref import JobRef
from kinetic._core.tracebacks import hide_frames
from kinetic._store.base import folder_of
from kinetic.errors import KineticError, StoreError, UsageError

FOLDER = "compiled"
"""Below the cache folder: reports of what was compiled."""
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_QUIET_S = 30.0


def compile_for(accelerator: str, *, slices: int = 1, timeout: Duration = "10m") -> CompileSlice:
    """Return slices to compile for, with their own compiler, on a machine without them.

    As a context, `kinetic.make_mesh` makes meshes of their devices:

        with kinetic.compile_for("tpu-v6e-16", slices=2) as slice:
            mesh = kinetic.make_mesh(ici={"fsdp": 16})
            report = slice.compile(step, *shapes_with_shardings)
        print(report)

    Args:
        accelerator: the name of a TPU slice, as for `kinetic.run`.
        slices: how many of them.
        timeout: the longest that one compile may take.

    Raises:
        UsageError: there is no such slice, or no compiler for it that runs without the chip.
    """
    with hide_frames:
        chosen = settings.load()
        target = topologies.make_target(resolve(accelerator), slices)
        limit_s = patience_s(timeout)
    return CompileSlice(
        target,
        chosen.cache_dir / FOLDER,
        timeout_s=limit_s,
        watch=CompileProgress(),
        find_price=functools.partial(find_price, chosen),
        find_flags=find_flags,
    )


def find_price(chosen: Settings, topology: Topology) -> Price | None:
    """Return what a slice costs by these settings; None where that is not known."""
    return price_of(topology, chosen.prices)


def find_flags() -> dict[str, str]:
    """Return the variables that compilers heed, as they are at this moment."""
    environ = settings.variables()
    return {name: environ[name] for name in FLAGS if name in environ}


def check_programs(
    board: JobBoard, ref: JobRef, attempt: int, tell: Callable[[str], None]
) -> CheckReport:
    """Compile the programs of an attempt for the slice that was simulated, and keep the report
    with the job.

    Args:
        board: with the job's records.
        ref: the job.
        attempt: whose programs.
        tell: is called with each line about what is going on.

    Raises:
        UsageError: the job kept no programs.
        PreflightError: there is no compiler here.
    """
    ref.check_version()
    plan, root = board.plan(ref), folder_of(board.store)
    if root is None or plan is None or not plan.options.compile_check:
        raise UsageError(
            f"{ref.job_id} kept no programs: run it with compile_check=True, on a slice that is "
            "simulated on this machine."
        )
    chosen = settings.load()
    target = topologies.make_target(plan.topology, plan.options.most_slices)
    topologies.find_compiler()
    compilers = Compilers(
        target,
        chosen.cache_dir / FOLDER,
        watch=CompileProgress(),
        price=find_price(chosen, plan.topology),
        flags=find_flags(),
    )
    folder = root / layout.AttemptKeys(ref.job_id, attempt).programs
    check = ProgramCheck(folder, target, compilers, client_root=plan.client_root)
    if check.count:
        tell(f"kinetic: compiling for {plan.topology.name}: {check.count} of its programs …")
    try:
        for report in check.compile():
            tell(f"kinetic: {summarize(report)}")
    except KeyboardInterrupt as interrupt:
        call = f'kinetic.attach("{ref.job_id}").compile_report()'
        words = f"kinetic: the compilers were ended; {call} goes on with what they had done."
        console.print_last(interrupt, words)
        raise
    with contextlib.suppress(StoreError):  # pages show it; here it is returned
        text = json.dumps(check.report.to_json())
        board.store.put(layout.JobKeys(ref.job_id).compile_report, text.encode())
    return check.report


def show_report(make: Callable[[], CheckReport]) -> None:
    """Print the report below what the function printed; a fault of it costs neither the function's
    value nor its error."""
    try:
        console.notice(str(make()), repeat=True)
    except KineticError as error:
        console.notice(f"kinetic: compile_check: {error}", repeat=True)


class CompileProgress:
    """Says on stderr what is compiled, and for how long now: in one line that is redrawn on a
    terminal; elsewhere in a line after half a minute, after a whole one, after two, after four."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redraws = console.can_redraw(self._stream)
        self._is_drawn = False
        self._due_s = _QUIET_S

    def __call__(self, waiting: Compiling | None) -> None:
        """Show what is waited for; None: take it away, others have something to say."""
        if waiting is None:
            self._write("\r\033[K" if self._is_drawn else "")
            self._is_drawn = False
            return
        if waiting.elapsed_s < _QUIET_S:
            self._due_s = _QUIET_S
        if self._redraws:
            self._is_drawn = True
            columns = shutil.get_terminal_size().columns
            self._write(f"\r{name_waiting(waiting)[: columns - 1]}\033[K")
        elif waiting.elapsed_s >= self._due_s:
            self._due_s *= 2
            self._write(f"{name_waiting(waiting)}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)
            self._stream.flush()


def name_waiting(waiting: Compiling) -> str:
    """Return the line: what is compiled, and since when."""
    rest = f", {waiting.left} more to come" if waiting.left else ""
    return f"kinetic: compiling {', '.join(waiting.names)}{rest}: {waiting.elapsed_s:.0f} s"
