"""The user at the other end of a loopback TCP connection: only the owner of a job may attach to its
debugger. A connection whose user is unknown is refused."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

_NO_INODE = "0"
"""Inode of a socket that its owner has closed. The kernel then reports root as the owner."""
_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


def is_own(connection: socket.socket) -> bool:
    """True if the other end belongs to this user, or to root, who can do anything anyway."""
    return uid_of(connection) in (0, os.geteuid())


def uid_of(connection: socket.socket) -> int:
    """Return the id of the user at the other end of a loopback connection; -1 if unknown."""
    family = connection.family
    if family not in _TABLES:
        return -1
    own, peer = (
        _to_hex(address, family) for address in (connection.getsockname(), connection.getpeername())
    )
    for line in Path(_TABLES[family]).read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == (peer, own) and fields[9] != _NO_INODE:
            return int(fields[7])
    return -1


def _to_hex(address: tuple[str, int], family: int) -> str:
    """Format an address like the kernel's table: 32-bit words in the byte order of this machine."""
    packed = socket.inet_pton(family, address[0])
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{text}:{address[1]:04X}"


def accept_own_only(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection from this user or root, and close all others."""
    while True:
        connection, address = _accept(listener)
        if connection.family == socket.AF_UNIX or is_own(connection):
            return connection, address
        connection.close()


_accept = socket.socket.accept


def main() -> None:
    """Run the Python program in the first argument, with the other arguments, so that its sockets
    accept connections of this user and root only."""
    socket.socket.accept = accept_own_only  # type: ignore[method-assign, assignment]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
