"""Which loaded modules are the project's own, and so travel by value.

In: the project's root. Out: a span of time in which its modules are pickled by value. Called by `payload`, lending cloudpickle.

The registry is the process's, so spans of several threads are counted and the last one out clears up; what the user registered
stays.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_LOCK = threading.Lock()
_SPANS: Counter[str] = Counter()
_FOREIGN = ("/site-packages/", "/dist-packages/", "/.venv/", "/venv/", "/.tox/", "/node_modules/")


@contextmanager
def by_value(modules: Sequence[ModuleType], registry: Any) -> Iterator[None]:
    """Have these modules pickled by value meanwhile. `registry` is the cloudpickle module."""
    ours: list[ModuleType] = []
    try:
        with _LOCK:
            theirs = registry.list_registry_pickle_by_value() - _SPANS.keys()
            for module in modules:
                if module.__name__ not in theirs:
                    registry.register_pickle_by_value(module)
                    _SPANS[module.__name__] += 1
                    ours.append(module)
        yield
    finally:
        with _LOCK:
            for module in ours:
                _leave(module, registry)


def project_modules(root: Path) -> list[ModuleType]:
    """Return the loaded modules whose file lies below the root, without installed ones and without kinetic itself."""
    top = f"{os.path.realpath(root).rstrip('/')}/"
    places = (f"{place}/" for place in (str(Path(os.__file__).parent), sys.prefix))
    foreign = tuple(place for place in places if not top.startswith(place))
    real = functools.cache(os.path.realpath)  # Of folders: there are few.
    return [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__" and name.partition(".")[0] != "kinetic" and _lies_below(name, module, top, foreign, real)
    ]


def portable(modules: Sequence[ModuleType], fails: Callable[[object], object]) -> list[ModuleType]:
    """Leave out the modules that cannot travel whole, and the packages above them, which would take them along."""
    left_out = {module.__name__ for module in modules if fails(module)}
    above = {name[:at] for name in left_out for at, letter in enumerate(name) if letter == "."}
    return [module for module in modules if module.__name__ not in left_out | above]


def _lies_below(name: str, module: object, top: str, foreign: tuple[str, ...], real: Callable[[str], str]) -> bool:
    if not isinstance(module, ModuleType):
        return False
    fields = ModuleType.__getattribute__(module, "__dict__")  # Asking a lazy module itself would load it.
    file = fields.get("__file__")
    if not isinstance(file, str) or fields.get("__name__") != name or file.startswith(foreign):
        return False
    place = f"{real(file.rpartition('/')[0])}/"
    return place.startswith(top) and not any(part in place[len(top) - 1 :] for part in _FOREIGN)


def _leave(module: ModuleType, registry: Any) -> None:
    name = module.__name__
    _SPANS[name] -= 1
    if not _SPANS[name]:
        del _SPANS[name]
        with suppress(ValueError):  # Somebody took it out by hand.
            registry.unregister_pickle_by_value(module)
