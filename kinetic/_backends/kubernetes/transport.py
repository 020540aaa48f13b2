"""Connections to an API server: trusted certificates, and the caller's certificate.

In: an `Access` and a `Proof`. Out: urllib3's pools.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinetic._backends.kubernetes.credentials import Proof
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._system import proxies
from kinetic.errors import PreflightError

if TYPE_CHECKING:
    from urllib3 import PoolManager

CONNECTIONS = 32
"""Kept open at once; more are opened as needed."""
ALIVE_AFTER_S = 15
"""The kernel probes a connection that was silent for this long, three times."""


def open_pools(access: Access, proof: Proof) -> PoolManager:
    """Return pools of connections to a server.

    Raises:
        PreflightError: the certificates of the kubeconfig, or the proxy, cannot be used.
    """
    settings: dict[str, Any] = {"maxsize": CONNECTIONS, "socket_options": _socket_options()}
    parts = urlsplit(access.server)
    if parts.scheme == "https":
        settings["ssl_context"] = _tls(access, proof)
        if access.server_name:
            settings["server_hostname"] = access.server_name
            settings["assert_hostname"] = access.server_name if access.verify else False
        elif not access.verify:
            settings["assert_hostname"] = False
    named_by = f"the kubeconfig's context {access.context} (proxy-url)"
    return proxies.open_pools(access.server, access.proxy, named_by, **settings)


def _socket_options() -> list[tuple[int, int, int]]:
    """A watch may be silent for a minute; a laptop that was asleep, or has changed networks, should
    not take that long to see that its connection is dead."""
    from urllib3.connection import HTTPConnection

    found = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS
    for name, value in ((idle, ALIVE_AFTER_S), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            found.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return found


def _tls(access: Access, proof: Proof) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=access.ca.decode() or None)
        # Python 3.13 sets it, and authorities of old clusters lack what it asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not access.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if proof.certificate:
            # Python reads keys from files only
            with tempfile.TemporaryDirectory() as folder:
                chain = Path(folder) / "client.pem"
                chain.touch(mode=0o600)
                chain.write_bytes(proof.certificate + b"\n" + proof.key)
                context.load_cert_chain(chain)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"The certificates of the kubeconfig's context {access.context} cannot be used: "
            f"{error}."
        ) from error
    return context
