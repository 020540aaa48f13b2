"""The address of a job's debugger: a record that the leader keeps up to date. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kinetic._core.documents import Record
from kinetic._core.values import dataclass


class DebuggerState(StrEnum):
    """The state of the debugger on the leader."""

    WAITING = "waiting"
    """The debugger listens, and the function has not started on any host."""
    RELEASED = "released"
    """The debugger listens, and the function has started, with or without an editor."""
    CLOSED = "closed"
    """The leader's function has ended."""


@dataclass(frozen=True)
class Debugger(Record, called="The record of the job's debugger"):
    """The debugger of one attempt at a job.

    Attributes:
        state: whether the debugger listens, and the function has started.
        port: port on the leader's loopback address.
        tree: folder of the job's source on the leader.
        client_root: folder of that source on the caller's machine; "" when none was sent.
        closes_at: when the function stops waiting for an editor, in seconds since the epoch.
        attached: True if an editor attached before the function started.
        address: address of the leader's machine, for the other hosts.
    """

    state: DebuggerState
    port: int
    tree: str
    client_root: str
    closes_at: float
    attached: bool = False
    address: str = ""

    @property
    def listens(self) -> bool:
        """True if an editor can attach."""
        return self.state is not DebuggerState.CLOSED


def launch_configuration(
    debugger: Debugger, *, name: str, port: int, local_root: str = ""
) -> dict[str, Any]:
    """Return the content of a `launch.json` of Visual Studio Code that attaches over `port` of the
    caller's machine. `local_root` is the folder of the source there; by default `client_root`."""
    local = local_root or debugger.client_root
    attach: dict[str, Any] = {
        "name": name,
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "justMyCode": True,
    }
    if local:
        attach["pathMappings"] = [{"localRoot": local, "remoteRoot": debugger.tree}]
    return {"version": "0.2.0", "configurations": [attach]}
