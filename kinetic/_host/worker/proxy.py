"""Devices of Pathways: a single controller reaches them through the proxy beside it.

In: the world of a single controller. Out: a JAX with the devices of all machines.
"""

from __future__ import annotations

import sys

from kinetic._host.worker.joining import JoinError, World


def register() -> bool:
    """Register Pathways with JAX; return whether its package is installed."""
    try:
        import pathwaysutils
    except ImportError as error:
        print(  # noqa: T201
            f"kinetic: JAX cannot reach the devices of Pathways: {error}. The image, or the "
            "project's requirements, must have pathwaysutils.",
            file=sys.stderr,
        )
        return False
    pathwaysutils.initialize()
    return True


def await_devices(world: World) -> None:
    """Wait until the devices of all machines are there: the function starts with all or not at all.
    The gang's `start_timeout` ends the wait.

    Raises:
        JoinError: Pathways cannot be reached, or devices are missing.
    """
    import jax

    try:
        found = len(jax.devices())
    except RuntimeError as error:
        raise JoinError(f"Pathways cannot be reached: {error}") from error
    if found < world.devices:  # A chip may be more than one device.
        raise JoinError(f"Pathways has {found} devices, and the job asked for {world.devices}.")
