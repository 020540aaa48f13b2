"""The calls of a batch as they were when it began: the caller may change an input afterwards, and a
call may be submitted much later, or once more.

In: pickled calls, or why one cannot be pickled. Out: the same, by index.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import replace

from kinetic._pickling.call import Packed
from kinetic.errors import UsageError, text_of

IN_MEMORY_BYTES = 64 * 1024**2
"""Pickles that are larger together lie in a temporary file."""


class CallSnapshot:
    """Pickled calls, each an error if it could not be pickled. Not thread-safe."""

    def __init__(self, calls: Iterable[Packed | Exception]) -> None:
        """Take the calls.

        Raises:
            UsageError: the folder for temporary files has no room for them.
        """
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)
        weakref.finalize(self, self._file.close)
        self._calls: list[tuple[int, Packed] | Exception] = []
        end = 0
        for call in calls:
            if isinstance(call, Exception):
                self._calls.append(call)
                continue
            try:
                self._file.write(call.data)
            except OSError as error:
                raise UsageError(
                    f"The inputs do not fit into {tempfile.gettempdir()}, where they are kept "
                    f"until their jobs are submitted: {text_of(error)}. Pass paths or kinetic.Data "
                    "instead of what is large, or set TMPDIR to a folder with more room. Nothing "
                    "was submitted."
                ) from error
            # Its parts hold the input itself.
            self._calls.append((end, replace(call, data=b"", parts=tuple)))
            end += call.size_bytes

    def read_call(self, index: int) -> Packed:
        """Return one call; raises why it could not be pickled."""
        call = self._calls[index]
        if isinstance(call, Exception):
            raise call
        start, packed = call
        self._file.seek(start)
        return replace(packed, data=self._file.read(packed.size_bytes))
