"""Access to the dashboard, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket

import pytest

pytest.importorskip("starlette")

import dashboard_world
from dashboard_world import World, ask, path_of

import kinetic
from kinetic._config import settings
from kinetic._dashboard import start
from kinetic._dashboard.guard import is_allowed
from kinetic._dashboard.server import DashboardServer
from kinetic.errors import PreflightError, UsageError

world, server = dashboard_world.world, dashboard_world.server


@pytest.mark.parametrize(
    "path",
    ["/", "", "/jobs/job-00000001", "/{}x/", "/{}x", "/%00/", "/static/dashboard.js", "//{}/"],
)
def test_nothing_is_shown_without_the_token(server: DashboardServer, world: World, path: str):
    world.add(display_name="secret-name")
    token = path_of(server).strip("/")
    status, _, body = ask(server, path.format(token) or "/")
    assert (status, "secret-name" in body, "kinetic dashboard" in body) == (403, False, True)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "a@127.0.0.1"]
)
def test_another_name_for_this_machine_is_refused(server: DashboardServer, host: str):
    """Foreign Host headers are refused: with DNS rebinding, an attacker's page would send one."""
    assert ask(server, path_of(server), Host=host)[0] in (400, 403)
    assert ask(server, path_of(server))[0] == 200


def test_names_of_the_loopback_address_are_let_in(server: DashboardServer):
    for name in ("localhost", "127.0.0.1", "[::1]"):
        assert ask(server, path_of(server), Host=f"{name}:{server.port}")[0] == 200
        # A forwarded port (ssh -L) has another number.
        assert ask(server, path_of(server), Host=f"{name}:1")[0] == 200


def test_two_names_are_refused():
    assert not is_allowed("GET", {"host": ["127.0.0.1", "127.0.0.1"]})
    assert not is_allowed("GET", {})


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://127.0.0.1:1"])
def test_nothing_is_done_for_a_page_of_another_origin(
    server: DashboardServer, world: World, origin: str
):
    ref = world.add()
    path = f"{path_of(server)}jobs/{ref.job_id}/cancel"
    headers = {"Origin": origin} if origin else {}
    assert ask(server, path, "POST", **headers)[0] == 403
    assert world.backend.cancelled == []
    own = f"http://127.0.0.1:{server.port}"
    status, _, body = ask(server, path, "POST", Origin=own, Content_Length="0")
    assert (status, json.loads(body)["notice"]) == (200, f"{ref.job_id} is being cancelled.")
    assert world.backend.cancelled == [ref.job_id]
    assert ask(server, path, "GET")[0] == 405  # A link or an image sends GET.
    assert world.backend.cancelled == [ref.job_id]


def test_pages_run_no_scripts_but_ours_and_are_framed_by_nobody(world: World):
    for is_framed, frames in ((False, "frame-ancestors 'none'"), (True, "vscode-webview:")):
        server = DashboardServer(world.access, is_framed=is_framed)
        server.start()
        _, headers, body = ask(server, path_of(server))
        refused = ask(server, "/")[1]
        server.close()
        policy = headers["content-security-policy"]
        assert policy == refused["content-security-policy"]
        (style,) = re.findall("<style>(.*?)</style>", body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert f"default-src 'none'; script-src 'self'; style-src 'sha256-{digest}';" in policy
        assert policy.endswith(frames)
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_pages_name_no_other_address(server: DashboardServer, world: World):
    ref = world.add()
    for path in ("", f"jobs/{ref.job_id}", "batches", "capacity", "static/dashboard.js"):
        status, _, body = ask(server, path_of(server) + path)
        assert status == 200
        assert "http:" not in body.replace("http://www.w3.org/2000/svg", "")
        assert "https:" not in body
        assert path_of(server).strip("/") not in body  # Addresses are relative.


def test_the_first_address_leads_in_once(server: DashboardServer):
    """The first address works once: other users can read it in the browser's command line."""
    path = server.first_url.partition(str(server.port))[2]
    assert ask(server, path, Host="evil.example")[0] == 403
    assert ask(server, "/open/" + "0" * 32)[0] == 403
    status, headers, _ = ask(server, path)
    assert (status, headers["location"]) == (303, path_of(server))
    assert ask(server, path)[0] == 403
    assert ask(server, "/open/")[0] == 403


def test_a_slash_at_the_end_is_no_other_address(server: DashboardServer, world: World):
    """Extra slashes redirect: pages have relative links, so each page must have one address."""
    job, first = world.add().job_id, path_of(server)
    for written, meant in {
        first.rstrip("/"): first,
        f"{first.rstrip('/')}?state=failed": f"{first}?state=failed",
        f"{first}//": first,
        f"{first}batches/": f"{first}batches",
        f"{first}jobs/{job}//?attempt=1": f"{first}jobs/{job}?attempt=1",
    }.items():
        status, headers, _ = ask(server, written)
        assert (status, headers["location"]) == (307, meant)
        assert ask(server, meant)[0] == 200
    assert ask(server, first.rstrip("/"), Host="evil.example")[0] == 403


def test_what_is_no_request_is_refused_without_a_word(
    server: DashboardServer, caplog: pytest.LogCaptureFixture
):
    upgrade = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    answers = []
    for data in (b"\x16\x03\x01\x00\xb5\r\n\r\n", upgrade.encode()):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(data)
            answers.append(stranger.recv(12))
    assert answers == [b"HTTP/1.1 400", b"HTTP/1.1 403"]
    assert caplog.records == []


def test_each_server_has_a_token_of_its_own(world: World):
    servers = [DashboardServer(world.access) for _ in range(2)]
    for server in servers:
        server.close()
    assert len({server.url.split("/")[3] for server in servers}) == 2
    assert all(len(server.url.split("/")[3]) == 32 for server in servers)


def test_a_port_that_is_taken(server: DashboardServer, world: World):
    with pytest.raises(UsageError, match=f"cannot listen on port {server.port}.*--port"):
        DashboardServer(world.access, server.port)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "_PACKAGES", ("jinja2", "no_such_package"))
    words = r"not installed: no_such_package\. Install them: pip install .*\[dashboard\]"
    with pytest.raises(PreflightError, match=words) as raised:
        kinetic.dashboard()
    assert len(raised.traceback) == 1, "it is shown where it was called"


def test_a_notebook_gets_one_server_in_a_frame():
    first = kinetic.dashboard()
    try:
        assert kinetic.dashboard() is first
        assert f'<iframe src="{first.url}"' in first._repr_html_()
    finally:
        first.close()
    second = kinetic.dashboard()
    second.close()
    assert second is not first


def test_a_port_that_is_named_keeps_its_address_over_a_restart(world: World):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start_anew(port: int) -> str:
        server = DashboardServer(world.access, port)
        server.close()
        return path_of(server)

    first = start_anew(port)
    assert start_anew(port) == first
    file = settings.load().home / "dashboard" / str(port)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_text("../x")
    assert re.fullmatch("/[0-9a-f]{32}/", second := start_anew(port))
    assert second not in (first, start_anew(0))
