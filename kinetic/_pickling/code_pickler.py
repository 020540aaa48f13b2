"""How code is pickled by value: as cloudpickle does it, with the name of its file, and the
qualified names of classes.

In: live objects. Out: a pickle. Tracebacks, debuggers and notebook cells need a file's name; from
version 3.1.3 on cloudpickle writes another in its place, so that pickles do not depend on where a
function was defined. By its qualified name a class is told from another one of its module.
"""

from __future__ import annotations

import dataclasses
from types import CodeType
from typing import Any, BinaryIO, ClassVar

import cloudpickle

_FILE = 10
"""The place of `filename` among the arguments of `CodeType`, in Python 3.11 and later."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, (*parts[:_FILE], code.co_filename, *parts[_FILE + 1 :])


_SENTINELS = {
    type(dataclasses.MISSING): lambda _: "MISSING",
    type(dataclasses.KW_ONLY): lambda _: "KW_ONLY",
}
"""Dataclasses know them by identity."""


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file, and classes with their qualified names."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child(
        {CodeType: _reduce_code} | _SENTINELS
    )

    def reducer_override(self, obj: Any) -> Any:
        """Decide how an object is pickled."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, arguments, *rest = reduced
            if make.__name__ == "_make_skeleton_class":
                metaclass, name, bases, fields, *more = arguments
                fields = {**fields, "__qualname__": obj.__qualname__}
                return make, (metaclass, name, bases, fields, *more), *rest
        return reduced


def dump(value: object, file: BinaryIO) -> None:
    """Pickle a value into a file."""
    CodePickler(file).dump(value)
