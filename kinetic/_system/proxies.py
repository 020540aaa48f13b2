"""Connections to other machines, by the proxies that the environment or a file names.

In: a server's address, what its pools are to be like. Out: urllib3's pools. They are told of a
proxy when they are made, so they are of use for this server only.
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
"""Names that mean another machine to a proxy."""


def open_pools(address: str, proxy: str = "", named_by: str = "", **settings: Any) -> PoolManager:
    """Return pools of connections to a server.

    Args:
        address: the server's.
        proxy: the proxy to use; "" for the environment's, if that has one for the server.
        named_by: what names `proxy`, for messages.
        settings: of urllib3's pools.

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
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return urllib3.ProxyManager(place, proxy_headers=_authorize(parts), **settings)
    from urllib3.contrib.socks import SOCKSProxyManager

    return SOCKSProxyManager(url, **settings)


def find_proxy(scheme: str, host: str) -> str:
    """Return the environment's proxy for a server, or "". Python's own rules know names only, while
    those of curl and kubectl may exempt networks, and kubectl's never lead to this machine."""
    proxies = urllib.request.getproxies()
    if host in _NEAR or urllib.request.proxy_bypass(host):
        return ""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:  # A name.
        return proxies.get(scheme, "")
    exempt = proxies.get("no", "").split(",")
    if number.is_loopback or number.is_link_local or any(_has(net, number) for net in exempt):
        return ""
    return proxies.get(scheme, "")


def _has(network: str, number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return number in ipaddress.ip_network(network.strip(), strict=False)
    except ValueError:
        return False


def _split_proxy(url: str, named_by: str) -> SplitResult:
    """Take a proxy's address apart; it may have a password, so messages do not quote it."""
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    if not has_place:
        raise PreflightError(
            f"The proxy that {named_by} names is no address. Write http://HOST:PORT."
        )
    if parts.scheme in _SOCKS and importlib.util.find_spec("socks") is None:
        raise PreflightError(
            f"The proxy that {named_by} names speaks SOCKS ({parts.scheme}://), which needs the "
            "package PySocks: pip install pysocks. Or name a proxy for HTTP."
        )
    if parts.scheme not in _HTTP + _SOCKS:
        raise PreflightError(
            f"The proxy that {named_by} names has the scheme {parts.scheme}://, which is unknown. "
            f"Write one of {', '.join(_HTTP + _SOCKS)}."
        )
    return parts


def _authorize(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"proxy-authorization": f"Basic {base64.b64encode(pair).decode()}"}
