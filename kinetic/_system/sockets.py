"""The TCP connections of this process.

In: nothing. Out: connections that are shut, so that whoever waits for them, in native code too,
gets an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def shut_between(addresses: set[str]) -> int:
    """Shut every TCP connection with one of these addresses, and those that do not leave this
    machine; return how many there were. Descriptors stay open: they belong to other code."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += _shut_connection(int(name), addresses)
    return count


def _shut_connection(fd: int, addresses: set[str]) -> bool:
    # Others are not duplicated: Python leaves the copy open when it finds no socket, and to close
    # that of a file would release the locks that this process holds on the file.
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        peer = str(connection.getpeername()[0])
        if peer not in addresses and peer != connection.getsockname()[0]:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
