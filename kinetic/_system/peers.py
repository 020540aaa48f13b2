"""Which user is at the other end of a loopback TCP connection: only the owner of a job may attach
to its debugger.

In: connected sockets. Out: whether they belong to this user.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

_NO_INODE = "0"
"""Of a socket that its owner has closed: the kernel then reports root as its owner."""


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is this user, or root, who can do anything anyway."""
    return uid_of(connection) in (0, os.geteuid())


def uid_of(connection: socket.socket) -> int:
    """The user at the other end of a loopback connection; -1 if unknown."""
    own, peer = _in_hex(connection.getsockname()), _in_hex(connection.getpeername())
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == (peer, own) and fields[9] != _NO_INODE:
            return int(fields[7])
    return -1


def _in_hex(address: tuple[str, int]) -> str:
    """An address as in /proc/net/tcp."""
    return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"


def accept_own_only(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection from this user or root; close all others."""
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
