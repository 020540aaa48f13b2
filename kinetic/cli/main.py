"""The entry point of the command line: how its process begins and ends.

In: the words after `kinetic`. Out: an exit code. It imports next to nothing before the garbage
collector is held off: collections would be a twentieth of the time of a short command.
"""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from kinetic._system import streams

_GARBAGE_THRESHOLD = 50_000
"""New objects before the collector looks for cycles: most commands end earlier, and nearly all
objects made by imports stay alive."""


def main() -> NoReturn:
    """Run the command line of this process."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    streams.replace_closed()
    streams.escape()
    from kinetic.cli import root

    _exit(root.call(sys.argv[1:]))


def _exit(code: int) -> NoReturn:
    """End this process without tearing down its modules, which takes a sixth of the time of a short
    command."""
    import atexit
    import os
    import threading
    from contextlib import suppress

    measured = sys.getprofile() is not None or sys.gettrace() is not None
    if threading.active_count() == 1 and not measured:
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):  # Python itself reports what cannot be flushed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)
