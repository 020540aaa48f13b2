"""The C library, opened once: a fork of a process that has it need not open it again.

In: nothing. Out: `LIBC`, whose functions leave their error in `ctypes.get_errno()`.
"""

from __future__ import annotations

import ctypes

LIBC = ctypes.CDLL(None, use_errno=True)
