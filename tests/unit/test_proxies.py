"""Proxies with passwords: kinetic's requests use the same proxies as other programs."""

from __future__ import annotations

import importlib.util
import os

import pytest
import urllib3
from api_server_fake import Reply, Script, serving

from kinetic._ray.jobs_api import JobsApi, JobsApiLimits
from kinetic._system import proxies
from kinetic.errors import PreflightError

FAR = "http://no-such-host.invalid:8265"
BASIC = "Basic bWU6cEBzcw=="


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("host", "no_proxy", "is_direct"),
    [
        ("example.com", "", False),
        ("api.example.com", ".example.com", True),
        ("10.1.2.3", "", False),
        ("10.1.2.3", "10.0.0.0/8, 192.168.0.0/16", True),
        ("11.1.2.3", "10.0.0.0/8,x/8", False),
        ("fd00::1", "fd00::/8", True),
        ("127.0.0.1", "", True),
        ("::1", "", True),
        ("localhost", "", True),
        ("169.254.169.254", "", True),
        ("metadata.google.internal", "", True),
        ("example.com", "*", True),
    ],
)
def test_what_is_reached_without_a_proxy(monkeypatch, host, no_proxy, is_direct):
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxies.find_proxy("https", host) == ("" if is_direct else "proxy:3128")
    assert proxies.find_proxy("http", host) == ""


@pytest.mark.parametrize("form", ["http://me:p%40ss@{}", "me:p%40ss@{}"])
def test_a_proxy_is_given_its_password(form):
    script = Script([Reply(200), Reply(407)])
    with serving(script) as url:
        proxy = form.format(url.removeprefix("http://"))
        pools = proxies.open_pools(FAR, proxy)
        assert pools.request("GET", f"{FAR}/x", retries=False).status == 200
        with pytest.raises(urllib3.exceptions.ProxyError, match="407"):
            pools.request("GET", "https://no-such-host.invalid/x", retries=False)
        pools.clear()
    assert script.request_lines() == [f"GET {FAR}/x", "CONNECT no-such-host.invalid:443"]
    assert script.proxy_authorization == [BASIC, BASIC]


def test_a_dashboard_of_ray_is_reached_with_the_password_of_the_proxy(monkeypatch):
    script = Script([Reply(200, {"ray_version": "2.99"})])
    with serving(script) as url:
        monkeypatch.setenv("HTTP_PROXY", url.replace("http://", "me:p%40ss@"))
        api = JobsApi(FAR, limits=JobsApiLimits(tries=1))
        assert api.version() == "2.99"
        api.close()
    assert script.proxy_authorization == [BASIC]


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks5://me:secret@proxy:1080", "is a SOCKS proxy .* pip install pysocks"),
        ("ftp://me:secret@proxy", "has the unknown scheme ftp://"),
        ("http://me:secret@", "is not an address"),
        ("http://me:secret@proxy:many", "is not an address"),
    ],
)
def test_a_proxy_that_is_of_no_use_is_named_without_its_password(monkeypatch, proxy, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(PreflightError, match=rf"\(HTTP_PROXY\) {words}") as caught:
        proxies.open_pools(FAR)
    assert "secret" not in str(caught.value)


def test_a_proxy_that_speaks_socks():
    pytest.importorskip("socks")
    from urllib3.contrib.socks import SOCKSProxyManager

    assert isinstance(proxies.open_pools(FAR, "socks5h://127.0.0.1:1"), SOCKSProxyManager)
