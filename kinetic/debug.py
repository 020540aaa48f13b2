"""Public: the port forward that `JobHandle.debug_attach` returns."""

from kinetic._client.debugging import PortForward, cleanup_port_forward

__all__ = ["PortForward", "cleanup_port_forward"]
