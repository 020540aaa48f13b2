"""Who is at the other end of a TCP connection of this machine: only the owner of a job may attach
to its debugger.

In: connected sockets. Out: whether they are the same user's.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

_NOBODYS = "0"
"""The inode of a socket that its owner has closed: the kernel then says root."""


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is this user's, or root's, who can do everything anyway."""
    return uid_of(connection) in (0, os.geteuid())


def uid_of(connection: socket.socket) -> int:
    """The user at the other end of a loopback connection; -1 when the kernel does not tell."""
    here, there = (
        _as_kernel_says(connection.getsockname()),
        _as_kernel_says(connection.getpeername()),
    )
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == (there, here) and fields[9] != _NOBODYS:
            return int(fields[7])
    return -1


def _as_kernel_says(address: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"


def accept_own_only(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Wait for a connection of this user's, or root's; hang up on all others."""
    while True:
        connection, address = _accept(listener)
        if connection.family != socket.AF_INET or is_own(connection):
            return connection, address
        connection.close()


_accept = socket.socket.accept


def main() -> None:
    """Run the program in the folder that the first argument names, with its own arguments."""
    socket.socket.accept = accept_own_only  # type: ignore[method-assign, assignment]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
