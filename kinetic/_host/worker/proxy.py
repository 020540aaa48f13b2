"""Devices of Pathways: a single controller reaches the devices of all machines through its proxy,
and pathwaysutils calls the function again after the loss of a slice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kinetic._host.worker import virtual_slices
from kinetic._host.worker.joining import JoinError, World
from kinetic._host.worker.start import ElasticSlices
from kinetic._host.worker.virtual_slices import VirtualSlices

MISSING = "Add pathwaysutils to the project's requirements or to the image."
POLL_S = 10.0
"""Seconds between two probes of the slices. A probe computes something on each slice."""
VIRTUAL_POLL_S = 0.25
"""Seconds between two probes of virtual slices."""


def register(world: World, slices: ElasticSlices | None) -> bool:
    """Register Pathways, or its stand-in, with JAX; return False if pathwaysutils is not installed.

    Args:
        world: the world of this process.
        slices: the slices of an elastic job; else None.

    Raises:
        JoinError: pathwaysutils is not installed, and the job is elastic.
    """
    try:
        import pathwaysutils
    except ImportError as error:
        if slices is not None:
            raise JoinError(f"{error}. {MISSING}") from error
        print(  # noqa: T201
            f"kinetic: JAX cannot reach the devices of Pathways: {error}. {MISSING}",
            file=sys.stderr,
        )
        return False
    pathwaysutils.initialize()
    if world.simulated and slices is not None:
        _use_virtual(virtual_slices.install(world, slices.machines, slices.away_s))
    return True


def await_devices(world: World, *, is_elastic: bool) -> None:
    """Wait for the devices of all machines, without which the function does not start. The gang's
    `start_timeout` ends the wait.

    Raises:
        JoinError: Pathways cannot be reached, or devices are missing.
    """
    import jax

    try:
        count = len(jax.devices())
    except RuntimeError as error:
        raise JoinError(f"Pathways cannot be reached: {error}") from error
    if count < world.devices:  # A chip may be more than one device.
        raise JoinError(f"Pathways has {count} devices, and the job asked for {world.devices}.")
    if is_elastic:
        _await_slices(world)


def _await_slices(world: World) -> None:
    """Wait until all slices respond: JAX lists their devices even if their machines are missing."""
    from pathwaysutils.elastic import elastic

    try:
        elastic.wait_for_slices(world.slices, poll_s(world), world.limit_s)
    except TimeoutError as error:
        raise JoinError(f"Not all slices answer: {error}") from error


def poll_s(world: World) -> float:
    """Return the interval in seconds at which the slices of this world are probed."""
    return VIRTUAL_POLL_S if world.simulated else POLL_S


def _use_virtual(slices: VirtualSlices) -> None:
    """Have pathwaysutils count lost virtual slices as lost. Its own probes would get an answer,
    because all virtual slices share the processor."""
    from pathwaysutils.elastic import elastic

    answering = elastic.DefaultSliceHealthChecker.validate

    def validate(checker: Any) -> frozenset[int]:
        return frozenset(answering(checker)) - slices.list_lost()

    elastic.DefaultSliceHealthChecker.validate = validate


class PathwaysSlices:
    """Finds the Pathways slices that respond, and calls a function on them.

    Args:
        world: the world of this process.
        reform_file: path of a file that exists while a slice has come back and could take part.
    """

    def __init__(self, world: World, reform_file: str) -> None:
        from pathwaysutils.elastic import manager

        class Manager(manager.Manager):  # type: ignore[misc, unused-ignore]
            """Makes `reform_file` exist while a slice is back."""

            _available: Collection[int] = frozenset()

            @property
            def available_inactive_slices(self) -> Collection[int]:
                return self._available

            @available_inactive_slices.setter
            def available_inactive_slices(self, indices: Collection[int]) -> None:
                self._available = indices
                if indices:
                    Path(reform_file).touch()
                else:
                    Path(reform_file).unlink(missing_ok=True)

        vendor = logging.getLogger("pathwaysutils.elastic")
        if vendor.level == logging.NOTSET:
            vendor.setLevel(logging.CRITICAL)  # `Controller` logs the same events.
        self._manager = Manager()
        self._poll_s = poll_s(world)

    @property
    def taking_part(self) -> tuple[int, ...]:
        """Slices that the current call uses."""
        return tuple(sorted(self._manager.active_slice_indices))

    def find_answering(self) -> tuple[int, ...]:
        """Return the slices that respond now."""
        from pathwaysutils.elastic import elastic

        return tuple(sorted(elastic.get_active_slice_indices(self._manager.slice_to_devices)))

    def wait(self, count: int, limit_s: float) -> tuple[int, ...]:
        """Wait until `count` slices respond, at most `limit_s` seconds; return those that do."""
        from pathwaysutils.elastic import elastic

        try:
            slices = elastic.wait_for_slices(
                count, self._poll_s, limit_s, self._manager.slice_to_devices
            )
        except TimeoutError:
            return self.find_answering()
        return tuple(sorted(slices))

    def call(
        self,
        func: Callable[[], Any],
        *,
        least: int,
        limit_s: float,
        begins: Callable[[], None],
        goes_on: Callable[[Exception], bool],
    ) -> Any:
        """Call the function on the slices that respond, repeatedly if need be; return its value.

        Args:
            func: the function. It raises `scale_up()` to be called again on more slices, and a
                runtime error of JAX for a lost slice.
            least: slices that each call needs.
            limit_s: seconds for which a call waits for them.
            begins: called before each call.
            goes_on: called with the exception of `func`; returns True to call it again.

        Raises:
            TimeoutError: too few slices responded in time.
            RuntimeError: `goes_on` returned False.
        """
        retry = self._manager.elastic_retry(
            minimum_slice_count=least,
            poll_interval=self._poll_s,
            timeout=limit_s,
            pre_callback=begins,
            retry_policy=lambda _, error: goes_on(error),
        )
        return retry(func)()


def scale_up() -> Exception:
    """Return the exception that ends a call so that a slice that is back can take part."""
    from pathwaysutils.elastic.manager import ScaleUpSignalError

    error: Exception = ScaleUpSignalError()
    return error
