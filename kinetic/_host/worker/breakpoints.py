"""What a breakpoint does in a job: it stops for a debugger if there is one, else it is an error of
one line.

In: a worker, whose standard input is empty. Out: a debugger, or the hooks of `breakpoint()` and
`pdb.set_trace()`. Plain Python would print a prompt, read
the end of its input, and raise `bdb.BdbQuit` at the line below.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from kinetic._core.tracebacks import own_frames_hidden
from kinetic._host.worker.startup.kinetic_awaiting import Awaiting
from kinetic.errors import UsageError

if TYPE_CHECKING:
    from kinetic._host.channel import Channel
    from kinetic._host.worker.start import Start

ADVICE = (
    "a job has no terminal for a debugger. With @kinetic.run(..., debug=True) you can attach one; "
    "PYTHONBREAKPOINT=0 among the variables in env= passes over calls of breakpoint()."
)
_PDB = "pdb.set_trace"


def set_up(channel: Channel, start: Start) -> None:
    """In a debug job the leader waits for a debugger, and the other hosts for the leader."""
    if start.debugger is None:
        return _refuse(start.env.get("PYTHONBREAKPOINT", ""))
    from kinetic._host.worker import debugger

    if start.world.process == 0:
        job_id = start.env["KINETIC_JOB_ID"]
        debugger.serve(channel, **start.debugger, folder=start.scratch, job_id=job_id)
    else:
        debugger.hold(channel)
    return None


def _refuse(wanted: str) -> None:
    """Refuse breakpoints from now on, unless the job wants something else of them."""
    if wanted in ("", _PDB):
        sys.breakpointhook = _refuse_breakpoint
    if "pdb" in sys.modules:
        _replace_pdb()
    else:
        sys.meta_path.insert(0, Awaiting("pdb", _replace_pdb))


def _replace_pdb() -> None:
    setattr(sys.modules["pdb"], "set_trace", _refuse_pdb)  # noqa: B010 - mypy forbids the assignment


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    with own_frames_hidden:
        raise UsageError(f"breakpoint(): {ADVICE}")


def _refuse_pdb(*args: Any, **kwargs: Any) -> NoReturn:
    with own_frames_hidden:
        raise UsageError(f"pdb.set_trace(): {ADVICE}")
