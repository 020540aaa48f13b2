"""Many calls of one function: the function is pickled once, each call's arguments as if they had been pickled along with it.

In: a function, later arguments, cloudpickle as lent by `payload`. Out: bytes. Called by `payload`.

A pickler remembers what it has written, and writes a reference where it meets that again. Each call starts from a copy of what
the pickler remembered after the function: whatever function and arguments share (classes, globals, objects) is shared on the
host too, as in a single pickle. The unpickler reads both, one after the other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO


class FunctionPickler:
    """Pickles a function, and arguments that belong to it."""

    def __init__(self, func: Callable[..., Any], file: BinaryIO, make_pickler: Callable[[BinaryIO], Any]) -> None:
        self._make = make_pickler
        self._base = make_pickler(file)
        self._base.dump(func)

    def dump(self, arguments: object, file: BinaryIO) -> None:
        """Write arguments, to be loaded after the function by the same unpickler."""
        pickler = self._make(file)
        pickler.memo = self._base.memo
        pickler.globals_ref = dict(self._base.globals_ref)  # cloudpickle's: functions of a module share their globals
        pickler.dump(arguments)


def load(
    function: memoryview, arguments: memoryview, make_unpickler: Callable[[BinaryIO], pickle.Unpickler] = pickle.Unpickler
) -> tuple[Any, Any]:
    """Rebuild what `FunctionPickler` wrote."""
    unpickler = make_unpickler(io.BytesIO(b"".join((function, arguments))))
    return unpickler.load(), unpickler.load()
