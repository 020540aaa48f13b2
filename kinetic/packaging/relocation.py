"""Code that travelled by value, said to come from another folder: the job's tree on a host in place of the caller's project.

In: bytes of a pickle made by cloudpickle, and the two folders. Out: the value. Called by `payload`.

Code objects carry the name of the file that they were compiled from, on the caller's machine. On another machine no such file
exists: a debugger finds no breakpoint there, and a traceback no line to show.
"""

from __future__ import annotations

import pickle
from types import CodeType
from typing import Any, BinaryIO


class Relocating(pickle.Unpickler):
    """An unpickler that renames the files of code below `there` to files below `here`."""

    def __init__(self, file: BinaryIO, there: str, here: str) -> None:
        super().__init__(file)
        self._there = f"{there.rstrip('/')}/"
        self._here = f"{here.rstrip('/')}/"

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the pickle."""
        found = super().find_class(module, name)
        if name == "_builtin_type" and module.startswith("cloudpickle"):
            return lambda kind: self._make if kind == "CodeType" else found(kind)
        return found

    def _make(self, *parts: Any) -> CodeType:
        code = CodeType(*parts)
        if not code.co_filename.startswith(self._there):
            return code
        return code.replace(co_filename=self._here + code.co_filename[len(self._there) :])
