"""Compiling for a TPU slice with its own compiler, on a machine without TPUs:
`kinetic.compile_for`, and `compile_check` after a run on a simulated slice."""

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
from kinetic._core import layout
from kinetic._core.accelerators.prices import price_of
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.duration import Duration, patience_s
from kinetic._core.ref import JobRef
from kinetic._core.tracebacks import hide_frames
from kinetic._store.base import folder_of
from kinetic.errors import KineticError, StoreError, UsageError

FOLDER = "compiled"
"""Subfolder of the cache folder, for compile reports."""
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_QUIET_S = 30.0


def compile_for(accelerator: str, *, slices: int = 1, timeout: Duration = "10m") -> CompileSlice:
    """Compile for TPU slices with their own compiler, on a machine without TPUs.

    Inside the `with` block, `kinetic.make_mesh` builds meshes from the slices' devices.

    Args:
        accelerator: The name of a TPU slice, as for `kinetic.run`.
        slices: The number of slices.
        timeout: The longest that one compile may take: seconds, "90s", "1h30m" or a `timedelta`.

    Raises:
        UsageError: No accelerator has this name, or its compiler does not run without the chip.

    Example:
        <!-- not run: the compiler takes many seconds -->
        ```python
        with kinetic.compile_for("tpu-v6e-16", slices=2) as slice:
            mesh = kinetic.make_mesh(ici={"fsdp": 16})
            report = slice.compile(step, *shapes_with_shardings)
        print(report)
        ```
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
        find_price=functools.partial(price_of, own=chosen.prices),
        find_flags=find_flags,
    )


def find_flags() -> dict[str, str]:
    """Return the environment variables that change what the compiler does, with their values."""
    environ = settings.variables()
    return {name: environ[name] for name in FLAGS if name in environ}


def check_programs(
    board: JobBoard, ref: JobRef, attempt: int, tell: Callable[[str], None]
) -> CheckReport:
    """Compile an attempt's programs for the real slice that the job simulated; store the report.

    Args:
        board: reads the job's records.
        ref: the job.
        attempt: the attempt whose programs to compile.
        tell: called with each line of progress.

    Raises:
        UsageError: the job stored no programs.
        PreflightError: the compiler is not installed on this machine.
    """
    ref.check_version()
    plan, root = board.plan(ref), folder_of(board.store)
    if root is None or plan is None or not plan.options.compile_check:
        raise UsageError(
            f"{ref.job_id} stored no programs to compile. Run it with compile_check=True, on a "
            "slice that is simulated on this machine."
        )
    chosen = settings.load()
    target = topologies.make_target(plan.topology, plan.options.most_slices)
    topologies.find_compiler()
    compilers = Compilers(
        target,
        chosen.cache_dir / FOLDER,
        watch=CompileProgress(),
        price=price_of(plan.topology, chosen.prices),
        flags=find_flags(),
    )
    folder = root / layout.AttemptKeys(ref.job_id, attempt).programs
    check = ProgramCheck(folder, target, compilers, client_root=plan.client_root)
    if check.count:
        programs = "1 program" if check.count == 1 else f"{check.count} programs"
        tell(f"kinetic: compiling {programs} for {plan.topology.name} …")
    try:
        for report in check.compile():
            tell(f"kinetic: {summarize(report)}")
    except KeyboardInterrupt as interrupt:
        call = f'kinetic.attach("{ref.job_id}").compile_report()'
        words = f"kinetic: the compilers were stopped; {call} compiles the remaining programs."
        console.print_last(interrupt, words)
        raise
    with contextlib.suppress(StoreError):  # Only the dashboard reads the stored report.
        text = json.dumps(check.report.to_json())
        board.store.put(layout.JobKeys(ref.job_id).compile_report, text.encode())
    return check.report


def show_report(make: Callable[[], CheckReport]) -> None:
    """Make a compile report and print it on stderr. If that fails, print the error: raising it
    would hide the function's value or exception."""
    try:
        console.notice(str(make()), repeat=True)
    except KineticError as error:
        console.notice(
            f"kinetic: compile_check= could not compile the job's programs: {error}", repeat=True
        )


class CompileProgress:
    """Progress of a compile on stderr: on a terminal one line that is redrawn, elsewhere a new line
    after 30 s, 1 min, 2 min, 4 min, and so on."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redraws = console.can_redraw(self._stream)
        self._is_drawn = False
        self._due_s = _QUIET_S

    def __call__(self, waiting: Compiling | None) -> None:
        """Show the running compile. None clears the line, so that other output can be printed."""
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
    """Return the line about a running compile: its programs and its elapsed seconds."""
    rest = f", {waiting.remaining} more to come" if waiting.remaining else ""
    return f"kinetic: compiling {', '.join(waiting.names)}{rest}: {waiting.elapsed_s:.0f} s"
