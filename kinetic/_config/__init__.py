"""What the caller's machine is set to, and where each value came from."""

from kinetic._config.settings import Setting, Settings, load

__all__ = ["Setting", "Settings", "load"]
