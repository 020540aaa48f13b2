"""Attaching a debugger, under the name by which scripts import it.

In: a `PortForward` of a job. Out: its end.
"""

from kinetic._client.debugging import PortForward, cleanup_port_forward

__all__ = ["PortForward", "cleanup_port_forward"]
