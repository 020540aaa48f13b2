"""What a breakpoint does in a job: it stops for a debugger if there is one, else it is an error of
one line.

In: a worker, whose standard input is empty. Out: a debugger, or the hooks of `breakpoint()`,
`pdb.set_trace()` and those of ipdb and IPython. Plain Python would print a prompt, read
the end of its input, and raise `bdb.BdbQuit` at the line below.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from kinetic._core.tracebacks import hide_frames
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
_DEBUGGERS = {
    "pdb": f"{_PDB}()",
    "ipdb.__main__": "ipdb.set_trace()",
    "IPython.core.debugger": "set_trace()",
}
"""Modules that have a `set_trace`, and how people write its call. Notebooks say nothing of
`bdb.BdbQuit`."""


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
    for module, words in _DEBUGGERS.items():
        replace = functools.partial(_replace_debugger, module, words)
        if module in sys.modules:
            replace()
        else:
            sys.meta_path.insert(0, Awaiting(module, replace))


def _replace_debugger(module: str, words: str) -> None:
    setattr(sys.modules[module], "set_trace", functools.partial(_refuse_debugger, words))  # noqa: B010 - mypy forbids the assignment


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    with hide_frames:
        raise UsageError(f"breakpoint(): {ADVICE}")


def _refuse_debugger(words: str, *args: Any, **kwargs: Any) -> NoReturn:
    with hide_frames:
        raise UsageError(f"{words}: {ADVICE}")
