"""How code is pickled by value: as cloudpickle does it, with the name of its file.

In: live objects. Out: a pickle. Tracebacks, debuggers and notebook cells need the name; from
version 3.1.3 on cloudpickle writes another in its place, so that pickles do not depend on where a
function was defined.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, BinaryIO, ClassVar

import cloudpickle

_FILE = 10
"""The place of `filename` among the arguments of `CodeType`, in Python 3.11 and later."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, (*parts[:_FILE], code.co_filename, *parts[_FILE + 1 :])


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child(
        {CodeType: _reduce_code}
    )


def dump(value: object, file: BinaryIO) -> None:
    """Pickle a value into a file."""
    CodePickler(file).dump(value)
