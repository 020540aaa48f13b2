"""Connections to other machines, through the proxies that the environment or a file names.

The pools of connections are urllib3's. Each is made for one server and its proxy: do not use it for
another server.
"""

from __future__ import annotations

import base64
import importlib.util
import ipaddress
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from kinetic.errors import PreflightError

if TYPE_CHECKING:
    from urllib3 import PoolManager

_HTTP = ("http", "https")
_SOCKS = ("socks4", "socks4a", "socks5", "socks5h")
_NEAR = ("localhost", "metadata.google.internal")
"""Names that are never sent to a proxy: they would mean another machine there."""


def open_pools(address: str, proxy: str = "", named_by: str = "", **settings: Any) -> PoolManager:
    """Return pools of connections to a server.

    Args:
        address: URL of the server.
        proxy: the proxy to use; "" for the environment's proxy for this server, if any.
        named_by: source of the value of `proxy`, for messages.
        settings: arguments of urllib3's pools.

    Raises:
        PreflightError: the proxy cannot be used.
    """
    import urllib3

    server = urlsplit(address)
    if not proxy:
        proxy = find_proxy(server.scheme, server.hostname or "")
        named_by = f"the environment ({server.scheme.upper()}_PROXY)"
    if not proxy:
        return urllib3.PoolManager(**settings)
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = _split_proxy(url, named_by)
    if parts.scheme in _HTTP:
        proxy_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return urllib3.ProxyManager(proxy_url, proxy_headers=_authorize(parts), **settings)
    from urllib3.contrib.socks import SOCKSProxyManager

    return SOCKSProxyManager(url, **settings)


def find_proxy(scheme: str, host: str) -> str:
    """Return the environment's proxy for a server, or "". As in curl and kubectl, `no_proxy` may
    name networks, which Python's own functions ignore. Addresses of this machine have no proxy."""
    proxies = urllib.request.getproxies()
    if host in _NEAR or urllib.request.proxy_bypass(host):
        return ""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:  # The host is a name.
        return proxies.get(scheme, "")
    exempt = proxies.get("no", "").split(",")
    if number.is_loopback or number.is_link_local or any(_contains(net, number) for net in exempt):
        return ""
    return proxies.get(scheme, "")


def _contains(network: str, number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return number in ipaddress.ip_network(network.strip(), strict=False)
    except ValueError:
        return False


def _split_proxy(url: str, named_by: str) -> SplitResult:
    """Split the address of a proxy, for `open_pools`. Messages name its source, `named_by`, and
    never quote the address, which may have a password.

    Raises:
        PreflightError: the address is malformed or has an unknown scheme, or a SOCKS proxy needs
            PySocks, which is not installed.
    """
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise PreflightError(
            f"The proxy in {named_by} is not an address. Write it as http://HOST:PORT."
        )
    if parts.scheme in _SOCKS and importlib.util.find_spec("socks") is None:
        raise PreflightError(
            f"The proxy in {named_by} is a SOCKS proxy ({parts.scheme}://), which needs the "
            "package PySocks: pip install pysocks. Or use an HTTP proxy."
        )
    if parts.scheme not in _HTTP + _SOCKS:
        raise PreflightError(
            f"The proxy in {named_by} has the unknown scheme {parts.scheme}://. Use one of "
            f"{', '.join(_HTTP + _SOCKS)}."
        )
    return parts


def _authorize(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"proxy-authorization": f"Basic {base64.b64encode(pair).decode()}"}
