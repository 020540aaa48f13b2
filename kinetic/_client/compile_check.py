"""`compile_check`: after a run on a simulated slice, the compiler of the real one looks at its
programs.

In: the reference of a job, its board. Out: `CheckReport`; what it did meanwhile, as lines.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from kinetic._client.board import console
from kinetic._client.board.reader import JobBoard
from kinetic._client.compiling import FOLDER, CompileProgress, find_flags, find_price
from kinetic._compile import topologies
from kinetic._compile.checked import CheckReport, ProgramCheck
from kinetic._compile.processes import Compilers
from kinetic._compile.report import summarize
from kinetic._config import settings
from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic.errors import KineticError, StoreError, UsageError


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
    plan, root = board.plan(ref), board.store.as_folder()
    if root is None or plan is None or not plan.options.compile_check:
        raise UsageError(
            f"{ref.job_id} kept no programs: run it with compile_check=True, on a slice that is "
            "simulated on this machine."
        )
    chosen = settings.load()
    target = topologies.make_target(plan.topology, plan.options.most_slices, chosen.compile_python)
    topologies.find_compiler(target.python)
    compilers = Compilers(
        target,
        chosen.cache_dir / FOLDER,
        watch=CompileProgress(),
        price=find_price(chosen, plan.topology),
        flags=find_flags(),
    )
    folder = root / layout.programs(ref.job_id, attempt)
    check = ProgramCheck(folder, target, compilers, client_root=plan.client_root)
    if check.count:
        tell(f"kinetic: compiling for {plan.topology.name}: {check.count} of its programs …")
    try:
        for report in check.compile():
            tell(f"kinetic: {summarize(report)}")
    except KeyboardInterrupt as interrupt:
        again = f'kinetic.attach("{ref.job_id}").compile_report()'
        told = f"kinetic: the compilers were ended; {again} goes on with what they had done."
        console.tell_last(interrupt, told)
        raise
    with contextlib.suppress(StoreError):  # pages show it; here it is returned
        text = json.dumps(check.report.to_json())
        board.store.put(layout.compile_report(ref.job_id), text.encode())
    return check.report


def show_report(make: Callable[[], CheckReport]) -> None:
    """Print the report below what the function printed; a fault of it costs neither the function's
    value nor its error."""
    try:
        console.notice(str(make()), once=False)
    except KineticError as error:
        console.notice(f"kinetic: compile_check: {error}", once=False)
