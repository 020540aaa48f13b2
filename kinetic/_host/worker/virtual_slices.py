"""A stand-in for Pathways: one process whose virtual devices are in slices that can be lost.

JAX's "proxy" backend gets virtual devices. Each line in a pipe in the host's folder
(`layout.SLICES_PIPE`) names a slice to lose. From then on its arrays fail as they do after Pathways
has lost a slice.

The arrays on a lost slice are replaced by XLA's own error arrays. So computations with them fail in
XLA itself, when a thread waits for the result, with a runtime error whose text has DATA_LOSS.
Arrays that are put on the slice while it is away are replaced within `SWEEP_S`. All arithmetic is
done by the CPU: values that were copied to the host before the loss are right.

This module needs interfaces of JAX that are not public; `check` names the missing ones.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kinetic._core import layout
from kinetic._host.worker.joining import JoinError, World
from kinetic._system import pipes

PATIENCE_S = 0.2
"""Seconds to wait until no thread uses an array, before arrays are replaced."""
SWEEP_S = 0.02
"""Seconds between two searches for arrays on lost slices."""
STARTING_S = 1.0
"""Least number of seconds for which a lost slice is away: real machines have to start."""
_LOST = "_kinetic_lost"
"""Attribute of a replaced array: its former content, which lives as long as the array."""


class VirtualSlices:
    """The slices of this process, of which some may be lost.

    Args:
        pipe: path of the pipe in which a line with a slice's number loses that slice.
        away_s: seconds for which a lost slice stays away.
        slices: number of slices.
    """

    def __init__(self, pipe: Path, away_s: float, slices: int) -> None:
        self.turns = _Turns()
        self._away_s = max(away_s, STARTING_S)
        self._slices = slices
        self._back_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._fd = pipes.listen(pipe)

    def list_lost(self) -> frozenset[int]:
        """Return the slices that are away."""
        with self._lock:
            return frozenset(self._back_at)

    def watch(self) -> None:
        """Start the thread that reads the pipe and replaces arrays."""
        threading.Thread(target=self._watch, name="kinetic-virtual-slices", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # The function has closed the descriptor.
            while True:
                pause_s = SWEEP_S if self._back_at else None
                if select.select([self._fd], [], [], pause_s)[0]:
                    self._lose(os.read(self._fd, 4096).decode(errors="replace").split())
                self._sweep()

    def _lose(self, named: Collection[str]) -> None:
        lost = {int(word) for word in named if word.isdigit() and int(word) < self._slices}
        with self._lock:
            self._back_at |= dict.fromkeys(lost, time.monotonic() + self._away_s)

    def _sweep(self) -> None:
        lost = self.list_lost()
        if lost and not self.turns.act_alone(lambda: self._replace_arrays(lost)):
            return
        with self._lock:
            now = time.monotonic()
            self._back_at = {each: at for each, at in self._back_at.items() if at > now}

    def _replace_arrays(self, slices: Collection[int]) -> None:
        import jax
        from jax._src import xla_bridge

        if not xla_bridge.backends_are_initialized():
            return
        for array in jax.live_arrays():
            # Another thread may delete the array meanwhile.
            with contextlib.suppress(RuntimeError, ValueError):
                lost = sorted({d.slice_index for d in array.sharding.device_set} & {*slices})
                if lost and not hasattr(array, _LOST):
                    _replace(array, lost)


class _Turns:
    """A lock: arrays are replaced only while no thread uses one in JAX's native code. That code
    runs without the GIL, and would go on to use an array after it was freed."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # A fork has none of its parent's threads.

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._own = threading.local()

    def wrap(self, use: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `use`, a function on arrays, while no array is replaced."""

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._own, "inside", False):
                return use(*args, **kwargs)
            with self._changed:
                self._changed.wait_for(lambda: not self._closed)
                self._inside += 1
            self._own.inside = True
            try:
                return use(*args, **kwargs)
            finally:
                self._own.inside = False
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

        return in_turn

    def act_alone(self, act: Callable[[], None]) -> bool:
        """Call `act` while no thread uses an array; return False if some still do so after
        `PATIENCE_S`. A longer wait could deadlock: such a thread may wait for a computation that
        calls back a function which needs an array itself."""
        with self._changed:
            self._closed = True
            try:
                if not self._changed.wait_for(lambda: not self._inside, PATIENCE_S):
                    return False
                self._own.inside = True  # Otherwise `act` would wait for itself.
                act()
                return True
            finally:
                self._own.inside = False
                self._closed = False
                self._changed.notify_all()


def _replace(array: Any, lost: Collection[int]) -> None:
    import jax
    from jax.experimental import transfer

    like = jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding, weak_type=array.weak_type
    )
    names = ", ".join(map(str, lost))
    content, error = (
        transfer.make_error_array(like, f"DATA_LOSS: slice {names} is down (simulated)")
        for _ in range(2)
    )
    # Keep the content: NumPy arrays may be views into it.
    content._replace_with(array)
    setattr(content, _LOST, True)
    array._replace_with(error)
    setattr(array, _LOST, content)


def install(world: World, machines: int, away_s: float) -> VirtualSlices:
    """Give JAX's backend "proxy" virtual devices, before it starts. Slices are lost by writing
    their numbers into the pipe `layout.SLICES_PIPE` in the host's folder.

    Args:
        world: the world of this process.
        machines: number of machines of all slices.
        away_s: seconds for which a lost slice stays away.

    Raises:
        JoinError: this version of JAX lacks an interface.
    """
    missing = check()
    if missing:
        import jax

        raise JoinError(
            f"Virtual slices cannot be lost with JAX {jax.__version__}: it has no "
            f"{' and no '.join(missing)}. Use another version of JAX, or a fixed number of slices."
        )
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.extend.backend import ifrt_proxy

    def client(*target_and_options: Any) -> Any:
        return xla_bridge.make_cpu_client()

    ifrt_proxy.get_client = client
    per_machine = math.ceil(world.devices / machines)
    xla_client.Device.task_id = property(lambda device: device.id // per_machine)
    pipe = Path(world.file).parent / layout.SLICES_PIPE
    slices = VirtualSlices(pipe, away_s, world.slices)
    _take_turns(slices.turns)
    slices.watch()
    return slices


def _take_turns(turns: _Turns) -> None:
    for owner, name in _uses():
        use = getattr(owner, name)
        setattr(
            owner, name, turns.wrap(use) if callable(use) else property(turns.wrap(use.__get__))
        )


def _uses() -> list[tuple[Any, str]]:
    """List the functions of JAX that release the GIL while they use an array, as objects and names
    of attributes."""
    from jax._src import array
    from jax._src.lib import xla_client

    return [
        (array.ArrayImpl, "block_until_ready"),
        (array.ArrayImpl, "_single_device_array_to_np_array_did_copy"),
        (array.ArrayImpl, "_copy_single_device_array_to_host_async"),
        (array.ArrayImpl, "_arrays"),
        (xla_client, "batched_block_until_ready"),
    ]


def check() -> list[str]:
    """Return the names of the interfaces for lost slices that this version of JAX lacks."""
    import jax
    from jax._src import array, xla_bridge
    from jax.experimental import transfer

    wanted = [
        (array.ArrayImpl, "_replace_with"),
        (xla_bridge, "make_cpu_client"),
        (transfer, "make_error_array"),
        *_uses(),
    ]
    missing = [name for owner, name in wanted if not hasattr(owner, name)]
    if not missing and jax.__version_info__ < (0, 10, 1):
        return ["make_error_array that works"]  # It raises AttributeError in these versions.
    return missing
