"""Ports of a host that are kept free for frameworks.

In: an identity. Out: sockets that hold the ports, and how other hosts reach this one.
"""

from __future__ import annotations

import socket

from kinetic._host.identity import Identity


def reserve(who: Identity) -> tuple[list[socket.socket], str]:
    """Return how the other hosts reach this one; the leader also reserves a port for JAX, and one
    for other frameworks.

    The sockets stay bound without listening until the end: frameworks bind the same port with
    SO_REUSEPORT or SO_REUSEADDR, and the kernel gives it to no other process.
    """
    if who.host != 0:
        return [], who.address
    ports = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2)]
    for port in ports:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            port.setsockopt(socket.SOL_SOCKET, option, 1)
        port.bind((who.address if who.simulated else "", 0))
    numbers = ",".join(str(port.getsockname()[1]) for port in ports)
    return ports, f"{who.address}:{numbers}"
