"""The start and end of the interpreter in which the function runs: the user's customization, then
the end of its pools, threads and open files.

If the function has overwritten builtins or modules, they are not repaired: its value is lost, and
the error says so.
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
"""Seconds that each pool of `concurrent.futures` has to end."""
PLAIN = str(Path(__file__).parent / "plain")
"""Folder of empty customization modules, on sys.path until `customize` is called."""


def customize() -> None:
    """Run the user's sitecustomize and usercustomize if the zygote skipped them: they may start
    threads, which its forks would not have."""
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
            with contextlib.suppress(RuntimeError):  # The thread is just being started.
                thread.join()


def end_executors() -> None:
    """Have `concurrent.futures` end its pools, as the interpreter does before exit handlers. Python
    has no public API for that."""
    if threading.active_count() == 1:
        return  # Every pool has a thread.
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(EXECUTORS_S)


def flush_files() -> None:
    """Flush all open files, as Python does when a script ends: this process exits without that.
    Skip pipes: if nobody reads them, a flush would block."""
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    with contextlib.suppress(BaseException):  # Listing all objects may take too much memory.
        for file in [item for item in gc.get_objects() if type(item) in kinds]:
            with contextlib.suppress(BaseException):
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    file.flush()
