"""The first module that a Python program on a host imports: it attaches `joining` to JAX as soon
as the program imports JAX.

It reads KINETIC_WORLD. It shadows the user's own sitecustomize, and so runs that file at the end.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost every start some milliseconds


TYPE_CHECKING = False  # Not from typing, which takes time to import.
if TYPE_CHECKING:
    from typing import Any


def _load(spec: Any) -> Any:
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attach() -> None:
    file = os.path.join(os.path.dirname(_FOLDER), "joining.py")  # noqa: PTH118, PTH120
    _load(spec_from_file_location("kinetic_joining", file)).attach_program(_world, _pid)


_world, _pid = os.environ.get("KINETIC_WORLD"), os.getpid()
if _world:
    _file = os.path.join(_FOLDER, "kinetic_awaiting.py")  # noqa: PTH118
    _awaiting = _load(spec_from_file_location("kinetic_awaiting", _file))
    sys.meta_path.insert(0, _awaiting.Awaiting("jax.distributed", _attach))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]  # noqa: PTH100
_own = PathFinder.find_spec("sitecustomize")
if _own is not None and _own.loader is not None:
    _load(_own)
