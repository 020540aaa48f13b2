"""A worker that stays between the calls of a session: what is reset for the next call, and the
modules of the project that are imported anew because their files have changed.

Arrays on devices, compiled functions, `kinetic.kept` and the state of unchanged modules stay.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kinetic._host.worker import report, signals, streams

MOST_FUNCTIONS = 32
functions: dict[str, Any] = {}
"""The functions of a script or notebook that calls have rebuilt, by the digests of their records.
An unchanged function is not rebuilt for the next call, so what JAX has compiled of it stays."""
_mains: dict[str, ModuleType] = {}
"""The `__main__` whose globals each of these functions has."""
_digests: dict[str, bytes] = {}
"""Digest of the source of each module of the project, as it was imported, by name."""


def end_call(tree: str) -> None:
    """Undo those effects of a call on this process that the next call must not see."""
    streams.flush()
    streams.renew()
    metrics: Any = sys.modules.get("kinetic._in_job.metrics")
    if metrics is not None:
        metrics.forget()
    report.earlier_threads.update(threading.enumerate())
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signals.reset()
    note_modules(tree)


def note_modules(tree: str) -> None:
    """Note the files of the project's modules that have been imported since the last call."""
    for name, file in _find_modules(tree, sys.modules.keys() - _digests.keys()).items():
        with contextlib.suppress(OSError):
            _digests[name] = _digest(file)


def choose_main(digest: str) -> None:
    """Set `__main__` to the module whose globals the function with this digest has; for a new
    function, note that this is the present `__main__`."""
    if not digest:
        return
    if digest in functions:
        sys.modules["__main__"] = sys.modules["__mp_main__"] = _mains[digest]
        return
    for oldest in list(_mains)[: 1 - MOST_FUNCTIONS]:
        del _mains[oldest]
        functions.pop(oldest, None)
    _mains[digest] = sys.modules["__main__"]


def drop_changed_modules(tree: str) -> list[str]:
    """Remove the project's modules whose files have changed, and the modules that use them, so that
    the call imports them anew. Return their names.

    Args:
        tree: folder of the project on this host, with the new files.
    """
    noted = _find_modules(tree, _digests)
    stale = {name for name, file in noted.items() if _has_changed(name, file)}
    if not stale:
        return []
    modules = _find_modules(tree, list(sys.modules))
    imports = {name: _read_imports(name, file) for name, file in modules.items()}
    while more := {
        name
        for name in modules
        if name not in stale and (imports[name] & stale or _uses(sys.modules[name], stale))
    }:
        stale |= more
    for name in stale:
        sys.modules.pop(name, None)
        _digests.pop(name, None)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
    functions.clear()
    importlib.invalidate_caches()
    return sorted(stale)


def _find_modules(tree: str, names: Iterable[str]) -> Mapping[str, Path]:
    """Return the files of imported modules with these names that are below `tree`, by name."""
    files: dict[str, Path] = {}
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and file.startswith(f"{tree}/") and name != "__main__":
            files[name] = Path(file)
    return files


def _has_changed(name: str, file: Path) -> bool:
    try:
        return _digest(file) != _digests[name]
    except OSError:
        return True


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _read_imports(name: str, file: Path) -> set[str]:
    """Return the names that a module imports when it runs: modules, and what is in them. Imports
    within functions are left out: the next call of the function repeats them."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
        nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
        while nodes:
            node = nodes.pop()
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                source = importlib.util.resolve_name(relative, package)
                names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


def _uses(module: ModuleType, names: set[str]) -> bool:
    """True if a module has one of these modules, or something that they define, as a variable. In a
    package, a variable that was set by importing one of its own modules does not count."""
    return any(
        value.__name__ in names and value.__name__ != f"{module.__name__}.{variable}"
        if isinstance(value, ModuleType)
        else getattr(value, "__module__", None) in names
        for variable, value in list(vars(module).items())
    )
