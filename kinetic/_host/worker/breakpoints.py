"""Breakpoints in a job: they stop in a debug job, and raise a short error in any other.

Plain Python would print a prompt, read the end of the worker's empty standard input, and raise
`bdb.BdbQuit` at the next line. The hooks cover `breakpoint()`, `pdb.set_trace()`, ipdb and IPython.
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
    "PYTHONBREAKPOINT=0 in env= skips calls of breakpoint()."
)
_PDB = "pdb.set_trace"
_DEBUGGERS = {
    "pdb": f"{_PDB}()",
    "ipdb.__main__": "ipdb.set_trace()",
    "IPython.core.debugger": "set_trace()",
}
"""Modules that have a `set_trace`, and its call as people write it. Notebooks hide
`bdb.BdbQuit`."""


def set_up(channel: Channel, start: Start) -> None:
    """In a debug job, wait until the debugger is ready (on the leader) or the leader goes on (other
    hosts). In any other job, make breakpoints raise an error."""
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
    """Make breakpoints raise an error. `wanted`: PYTHONBREAKPOINT, which may name a hook."""
    if wanted in ("", _PDB):
        sys.breakpointhook = functools.partial(_refuse_debugger, "breakpoint()")
    for module, words in _DEBUGGERS.items():
        replace = functools.partial(_replace_debugger, module, words)
        if module in sys.modules:
            replace()
        else:
            sys.meta_path.insert(0, Awaiting(module, replace))


def _replace_debugger(module: str, words: str) -> None:
    setattr(sys.modules[module], "set_trace", functools.partial(_refuse_debugger, words))  # noqa: B010 - mypy forbids the assignment


def _refuse_debugger(words: str, *args: Any, **kwargs: Any) -> NoReturn:
    with hide_frames:
        raise UsageError(f"{words}: {ADVICE}")
