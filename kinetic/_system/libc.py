"""The C library, opened once, so that forks of this process need not open it again.

Functions of `LIBC` store their error in `ctypes.get_errno()`.
"""

from __future__ import annotations

import ctypes

LIBC = ctypes.CDLL(None, use_errno=True)
