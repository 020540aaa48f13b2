"""Callbacks on the import of a module: finders for `sys.meta_path` that wrap its loader."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # Not from typing, which takes time to import.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Awaiting:
    """A finder that calls a function after the import of one module."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' spec of the module, with a loader that calls back after its
        execution."""
        if name != self._name:
            return None
        specs = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec: Any = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self._act()

            spec.loader.exec_module = exec_module
        return spec


_awaited: dict[str, list[Callable[[], object]]] = {}


def act_when_imported(name: str, act: Callable[[], object]) -> None:
    """Call `act` once a module has been imported. All callbacks of a module share one finder: two
    finders would call each other without end."""

    def act_all() -> None:
        while _awaited[name]:
            _awaited[name].pop(0)()

    if name in sys.modules:
        act()
        return
    if name not in _awaited:
        sys.meta_path.insert(0, Awaiting(name, act_all))
    _awaited.setdefault(name, []).append(act)
