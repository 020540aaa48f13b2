"""`kinetic dashboard`: all jobs in a browser."""

from __future__ import annotations

import contextlib

import click

from kinetic.cli import output
from kinetic.cli.context import AppContext, pass_app

_HELP = """Show all jobs in a browser.

The pages show states, hosts and logs as they change, and have buttons to cancel jobs. They are
served to this machine only, at an address that contains a secret token, until you press Ctrl-C.

\b
Examples:
  kinetic dashboard
  kinetic dashboard --port 8080 --no-open
"""


@click.command("dashboard", help=_HELP, short_help="Show all jobs in a browser.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on the loopback address. [default: any free port]",
)
@click.option("--no-open", is_flag=True, help="Only print the address; do not open a browser.")
@pass_app
def dashboard(app: AppContext, /, *, port: int, no_open: bool) -> None:
    """Serve the pages."""
    from kinetic._dashboard.start import check_packages

    check_packages()
    from kinetic._dashboard.server import DashboardServer, open_browser

    server = DashboardServer(app, port)
    output.line(server.url)
    output.notice("The dashboard is served to this machine only. Press Ctrl-C to stop it.")
    if not no_open and not open_browser(server.first_url):
        output.notice("No browser could be opened on this machine. Open the address yourself.")
    with contextlib.suppress(KeyboardInterrupt):  # The usual way to stop.
        server.run()
