"""A callback once a module has been imported, by whatever code.

In: the module's name, a function. Out: a finder for `sys.meta_path`, which itself finds nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Awaiting:
    """Waits for the import of one module."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find it, and call back after its execution."""
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
    """Act as soon as a module is there. One waits for each: two would find each other."""

    def act_all() -> None:
        while _awaited[name]:
            _awaited[name].pop(0)()

    if name in sys.modules:
        act()
        return
    if name not in _awaited:
        sys.meta_path.insert(0, Awaiting(name, act_all))
    _awaited.setdefault(name, []).append(act)
