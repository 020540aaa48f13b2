"""The interpreter that the function runs in: customized as the user's is; at its end, without pools
and files that may strike while that is reported.

In: the interpreter after the function. Out: one in which kinetic's own code runs undisturbed. What
a function has broken (builtins, modules) is not repaired: the result is lost, and the error says
so.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import site
import stat
import sys
import threading
from pathlib import Path

EXECUTORS_S = 1.0
"""How long open pools of `concurrent.futures` may take to end."""
PLAIN = str(Path(__file__).parent / "plain")
"""First on sys.path where `customize` is still to be called."""


def customize() -> None:
    """Run the user's sitecustomize and usercustomize if the zygote has left them to the workers,
    because they start threads: a fork would not have those."""
    if PLAIN not in sys.path:
        return
    sys.path.remove(PLAIN)
    for name in ("sitecustomize", "usercustomize"):
        sys.modules.pop(name, None)
    site.execsitecustomize()
    if site.ENABLE_USER_SITE:
        site.execusercustomize()


def wait_for_threads() -> None:
    """Wait for the pools of `concurrent.futures`, and for all threads that are not daemons, as
    Python does when a script ends."""
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        end()
    ours = (threading.main_thread(), threading.current_thread())
    while others := [
        thread for thread in threading.enumerate() if thread not in ours and not thread.daemon
    ]:
        for thread in others:
            with contextlib.suppress(RuntimeError):  # It is just being started.
                thread.join()


def end_executors() -> None:
    """Let `concurrent.futures` end its pools, as the interpreter does before exit handlers; there
    is no public API for it."""
    if threading.active_count() == 1:
        return  # Every pool has a thread.
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(EXECUTORS_S)


def flush_files() -> None:
    """Write out what open files still hold in memory, as Python does when a script ends: this
    process ends without that. Pipes are left alone: nobody may read them any more."""
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    with contextlib.suppress(BaseException):  # The list of all objects may need too much memory.
        for file in [item for item in gc.get_objects() if type(item) in kinds]:
            with contextlib.suppress(BaseException):
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    file.flush()
