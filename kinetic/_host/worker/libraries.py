"""Installed packages that plain calls of a session import, for the workers of later calls.

A worker reports which of their modules its call has imported. A fork server of the host imports
them once, and forks the workers of later calls. Modules of the project are never among them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any

from kinetic._core.variables import THREADS
from kinetic._host.worker import jaxworld, joining
from kinetic._host.worker.start import Start
from kinetic._pickling import library_settings
from kinetic._system import processes

INSTALLED = ("/site-packages", "/dist-packages")
"""Endings of the paths of folders with installed packages."""
_FOLDERS = tuple(f"{entry}/" for entry in sys.path if entry.endswith(INSTALLED))
_LEVELS = 3
"""Modules below this depth are not reported: modules above import them, or few functions do."""
_QUIET = {"JAX_PLATFORMS": "cpu", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables for imports in the fork server: without the first, importing could take the chips from
a call; without the second, pandas would start a thread (it imports Arrow)."""
_preloaded: set[str] = set()
"""Names of the packages that have been imported for this process."""


def list_imports(start: Start, before: Collection[str]) -> dict[str, Any]:
    """Return the arguments of `preload` for what the call has imported since `before`, as a part of
    the worker's last message."""
    names: list[str] = []
    with contextlib.suppress(Exception):  # The function may have put anything into sys.modules.
        for name, module in [*sys.modules.items()] if start.packages else ():
            file = getattr(module, "__file__", None)
            is_new = name not in before and name.count(".") < _LEVELS
            if is_new and str(file).startswith((*_FOLDERS, f"{start.packages}/")):
                names.append(name)
    request = {"names": names, "env": start.env, "cwd": start.cwd, "packages": start.packages}
    return {"imports": request} if names else {}


def preload(request: dict[str, Any]) -> int:
    """Import modules in this fork server as a call has imported them. Leave out the packages after
    whose import a fork would not be safe, and those that end the process."""
    own, modules = os.getpid(), dict[str, list[str]]()
    if os.getsid(0) != own:
        processes.yield_precedence()
    os.environ.update({k: v for k, v in request["env"].items() if not k.startswith(THREADS)})
    os.environ.update(_QUIET)
    if "jax" in sys.modules:
        joining.configure({"jax_platforms": "cpu"})
    with contextlib.suppress(OSError):  # The folder of the call may be gone.
        os.chdir(request["cwd"])
    if request["packages"] not in sys.path:
        sys.path.append(request["packages"])
    importlib.invalidate_caches()
    for name in request["names"]:
        modules.setdefault(name.partition(".")[0], []).append(name)
    for package, names in modules.items():
        if (trial := processes.fork()) == 0:
            processes.die_with_parent(own)
            processes.exit_with(functools.partial(_import, names))
        if os.waitpid(trial, 0)[1] == 0:
            _import(names)
            _preloaded.add(package)
    if not jaxworld.is_fork_safe():
        os._exit(1)  # The agent goes on with its first fork server.
    library_settings.mark_handlers()
    sys.path_importer_cache.clear()
    gc.freeze()
    return 0


def _import(names: list[str]) -> int:
    for name in names:
        with contextlib.suppress(Exception):  # A function that imports it gets the error.
            importlib.import_module(name)
    return 0 if jaxworld.is_fork_safe() else 1


def drop_hidden(start: Start) -> None:
    """Forget preloaded packages that the project hides by modules of its own."""
    folders = {*start.sys_path, *start.editable} - {start.packages} if _preloaded else set[str]()
    entries = [entry for folder in filter(os.path.isdir, folders) for entry in os.listdir(folder)]
    hidden = _preloaded & {entry.partition(".")[0] for entry in entries}
    _preloaded.difference_update(hidden)
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]
