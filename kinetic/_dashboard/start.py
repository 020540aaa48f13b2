"""Public: `kinetic.dashboard()`, and whether there is what it needs.

In: settings. Out: a running server; one for each process.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from kinetic._core.tracebacks import hide_frames
from kinetic._system.distribution import make_install_command
from kinetic.errors import PreflightError

if TYPE_CHECKING:
    from kinetic._dashboard.server import DashboardServer

_PACKAGES = ("jinja2", "starlette", "uvicorn")
_started: dict[int, DashboardServer] = {}
"""By process: a fork has none."""


def check_packages() -> None:
    """Check that the packages of the extra are installed.

    Raises:
        PreflightError: they are not.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PreflightError(
            f"The dashboard needs {', '.join(missing)}: {make_install_command('dashboard')}"
        )


def dashboard(port: int = 0) -> DashboardServer:
    """Serve the pages of all jobs on this machine's loopback address, from this process, until it
    ends. In a notebook, the cell shows them.

    Args:
        port: to listen on; 0 takes any free one.

    Returns:
        The server, with `url` and `close()`; the same one for each call, until it is closed.

    Raises:
        PreflightError: the extra `dashboard` is not installed.
        UsageError: the port is taken.
    """
    with hide_frames:
        check_packages()
        from kinetic._client.access import open_access
        from kinetic._dashboard.server import DashboardServer

        server = _started.get(os.getpid())
        if server is None or not server.is_running or port not in (0, server.port):
            server = DashboardServer(open_access({}), port, is_framed=True)
            server.start()
            _started[os.getpid()] = server
        return server
