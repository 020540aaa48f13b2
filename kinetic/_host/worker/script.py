"""The caller's script on a host: its globals, and the names of its files.

In: the function, what it is started with. Out: a `__main__` that others can look into, file names.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from kinetic._host.worker.start import Start

_INSTALLED = ("/site-packages", "/dist-packages")


def adopt(func: Any, start: Start) -> None:
    """Give `__main__` the globals of the caller's script: plain pickle, and so multiprocessing,
    looks functions up there by name.

    If the script itself was shipped, processes that multiprocessing spawns can import it as on the
    caller's machine.
    """
    while isinstance(func, functools.partial):
        func = func.func
    code = getattr(func, "__code__", None)
    if code is None or func.__module__ not in ("__main__", "__mp_main__"):
        return
    main = sys.modules["__main__"]
    vars(main).update(
        {name: value for name, value in func.__globals__.items() if not name.startswith("__")}
    )
    script = (
        code.co_filename.replace(f"{start.client_root.rstrip('/')}/", f"{start.tree}/", 1)
        if start.client_root
        else ""
    )
    if script.startswith(f"{start.tree}/") and Path(script).is_file():
        main.__file__ = script


def import_path(start: Start, inherited: list[str]) -> list[str]:
    """Return the import path: the tree's places first; what is installed editable for the caller
    where this interpreter has it from the caller's disk, or else before what is installed."""
    root = start.client_root.rstrip("/")
    here = {root + place[len(start.tree) :]: place for place in start.editable}
    found = [
        here.pop(os.path.realpath(each), each) if here and each else each for each in inherited
    ]
    installed = (number for number, each in enumerate(found) if each.endswith(_INSTALLED))
    before = next(installed, len(found))
    found[before:before] = here.values()
    return [*(place for place in start.sys_path if place not in found), *found]


def source_map(start: Start) -> tuple[str, str] | None:
    """The file names for code that was sent by value: those of the tree on this host, for a
    debugger and for tracebacks.

    Where the caller's own files exist their names stay, so that all hosts of a simulated slice run
    the same code.
    """
    is_leader = start.world.process == 0
    wanted = start.client_root and (
        (start.debugger and is_leader) or not Path(start.client_root).is_dir()
    )
    return (start.client_root, start.tree) if wanted else None
