"""Which object of a pickle cannot be rebuilt: the C unpickler does not say.

In: the unpickler that failed, and its file. Out: a sentence that names what rebuilds the object:
its class, or the function that its `__reduce__` returned. The pickle is read a second time, by the
unpickler that is written in Python: its frames tell what it was at. What ran for long is not run
again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from kinetic.errors import SetupFailed

_MOST_S = 5.0
_INTERNALS = ("cloudpickle", "kinetic.", "builtins")
"""Modules whose functions rebuild functions and classes: their names say nothing to anybody."""


class _PythonUnpickler(pickle._Unpickler):
    """Resolves names and external objects as another unpickler does."""

    def __init__(self, file: io.BytesIO, like: pickle.Unpickler) -> None:
        super().__init__(file)
        self._like = like

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the pickle."""
        return self._like.find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for an object that was left out."""
        return self._like.persistent_load(pid)


def name_culprit(
    data: bytes | memoryview, failed: pickle.Unpickler, error: BaseException, spent_s: float
) -> str:
    """Return what rebuilds the object as a sentence with a leading space; "" if that is not known,
    or if the error says enough: of a module, of a stop.

    Args:
        data: the pickles, one after the other.
        failed: the unpickler that could not load one of them.
        error: what it raised.
        spent_s: for how many seconds it ran.
    """
    if isinstance(error, (ImportError, SetupFailed, SystemExit)) or spent_s > _MOST_S:
        return ""
    reader = _PythonUnpickler(io.BytesIO(data), failed)
    try:
        while True:
            reader.load()
    except Exception as again:  # noqa: BLE001 - unpickling runs the objects' own code
        named = [*_names_of_made(again.__traceback__)]
    return f" The object that failed is rebuilt by {named[-1]}." if named else ""


def _names_of_made(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_filename == pickle.__file__ and frame.f_code.co_name.startswith("load_"):
            here = frame.f_locals
            made: Any = here.get("cls", here.get("func"))
            if "inst" in here:
                made = type(here["inst"])
            with suppress(AttributeError):
                if not made.__module__.startswith(_INTERNALS):
                    yield f"{made.__module__}.{made.__qualname__}"
        traceback = traceback.tb_next
