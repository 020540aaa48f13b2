"""`kinetic.dashboard()`: starts the dashboard's server in this process, once."""

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
_servers: dict[int, DashboardServer] = {}
"""Servers by process id: a forked process must not use its parent's server."""


def check_packages() -> None:
    """Check that the packages of the extra are installed.

    Raises:
        PreflightError: a package is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PreflightError(
            f"The dashboard needs packages that are not installed: {', '.join(missing)}. Install "
            f"them: {make_install_command('dashboard')}"
        )


def dashboard(port: int = 0) -> DashboardServer:
    """Serve pages about all jobs on this machine's loopback address, until this process ends.

    A notebook shows the pages in the cell's output.

    Args:
        port: The port to listen on; 0 for any free port.

    Returns:
        The server, with `url` and `close()`; the same server for each call until it is closed.

    Raises:
        PreflightError: The extra `dashboard` is not installed.
        UsageError: The port is in use.

    Example:
        ```python
        print(kinetic.dashboard().url)
        ```
    """
    with hide_frames:
        check_packages()
        from kinetic._client.access import open_access
        from kinetic._dashboard.server import DashboardServer

        server = _servers.get(os.getpid())
        if server is None or not server.is_running or port not in (0, server.port):
            server = DashboardServer(open_access({}), port, is_framed=True)
            server.start()
            _servers[os.getpid()] = server
        return server
