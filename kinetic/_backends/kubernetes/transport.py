"""Connections to an API server: proxies, trusted certificates, and the caller's certificate.

In: an `Access` and a `Proof`. Out: urllib3's pools.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinetic._backends.kubernetes.credentials import Proof
from kinetic._backends.kubernetes.kubeconfig import Access
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
        PreflightError: the certificates of the kubeconfig cannot be used.
    """
    import urllib3

    settings: dict[str, Any] = {"maxsize": CONNECTIONS, "socket_options": _socket_options()}
    parts = urlsplit(access.server)
    if parts.scheme == "https":
        settings["ssl_context"] = _tls(access, proof)
        if access.server_name:
            settings["server_hostname"] = access.server_name
            settings["assert_hostname"] = access.server_name if access.verify else False
        elif not access.verify:
            settings["assert_hostname"] = False
    proxy = access.proxy or _find_proxy(parts.scheme, parts.hostname or "")
    if proxy:
        return urllib3.ProxyManager(proxy, **settings)
    return urllib3.PoolManager(**settings)


def _find_proxy(scheme: str, host: str) -> str:
    """The environment's proxy for a server, or "". Python's own rules know names only, while those
    of kubectl may exempt networks: of clusters with private addresses."""
    proxies = urllib.request.getproxies()
    if urllib.request.proxy_bypass(host):
        return ""
    for exempt in proxies.get("no", "").split(","):
        with contextlib.suppress(ValueError):  # A name.
            if ipaddress.ip_address(host) in ipaddress.ip_network(exempt.strip(), strict=False):
                return ""
    return proxies.get(scheme, "")


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
