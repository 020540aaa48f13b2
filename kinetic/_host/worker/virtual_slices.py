"""A stand-in for Pathways: one process whose virtual devices come in slices that can be lost.

In: the world, a pipe in which each line names a slice to lose. Out: a JAX whose "proxy" backend has
virtual devices; arrays that fail as they do once Pathways has lost their slice.

What a slice holds when it is lost is replaced by XLA's own error arrays. So whatever is computed
from it fails in XLA itself, when somebody waits for it, with a runtime error whose text has
DATA_LOSS. What comes to lie on the slice while it is away is replaced as well, at the latest after
`SWEEP_S`. The arithmetic is that of the processor throughout: what has been copied to the host in
time is right.

It needs interfaces of JAX that are not public; `check` names those that are missing.
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
"""How long a search waits for threads that wait for arrays, before it is tried again."""
SWEEP_S = 0.02
"""How often lost slices are searched for arrays."""
STARTING_S = 1.0
"""How long a slice is away at least: its machines have to start."""
_LOST = "_kinetic_lost"
"""Attribute of an array that was replaced: its former content, which lives as long as it."""


class VirtualSlices:
    """The slices of this process, of which some may be lost.

    Args:
        pipe: where a line with the number of a slice loses it.
        away_s: how long a lost slice stays away.
        slices: how many there are.
    """

    def __init__(self, pipe: Path, away_s: float, slices: int) -> None:
        self.turns = _Turns()
        self._away_s = max(away_s, STARTING_S)
        self._slices = slices
        self._back_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._fd = pipes.listen(pipe)

    def list_lost(self) -> frozenset[int]:
        """Return the slices that are lost."""
        with self._lock:
            return frozenset(self._back_at)

    def watch(self) -> None:
        """Do so in a thread of its own."""
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
            # Another thread may delete it in between.
            with contextlib.suppress(RuntimeError, ValueError):
                lost = sorted({d.slice_index for d in array.sharding.device_set} & {*slices})
                if lost and not hasattr(array, _LOST):
                    _replace(array, lost)


class _Turns:
    """Lets arrays be replaced only while no thread is inside one: JAX waits for arrays, copies them
    and takes them apart without the lock of the interpreter, and would go on with one that is
    gone."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # Its threads are not those of its parent.

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._own = threading.local()

    def wrap(self, use: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that uses arrays, in turn."""

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
        """Act while nobody is inside; return whether that came about. Not for long: who waits for
        an array may do so for a computation that calls somebody who wants to wait as well."""
        with self._changed:
            self._closed = True
            try:
                if not self._changed.wait_for(lambda: not self._inside, PATIENCE_S):
                    return False
                self._own.inside = True  # or it would wait for itself
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
    # Whoever looks into the array's memory at present (NumPy does so) must not find it freed.
    content._replace_with(array)
    setattr(content, _LOST, True)
    array._replace_with(error)
    setattr(array, _LOST, content)


def install(world: World, machines: int, away_s: float) -> VirtualSlices:
    """Have JAX's backend "proxy" made of virtual devices, before it starts. The pipe lies in the
    host's folder.

    Args:
        world: of this process.
        machines: that the slices have together.
        away_s: how long a lost slice stays away.

    Raises:
        JoinError: this JAX lacks what that takes.
    """
    missing = check()
    if missing:
        import jax

        raise JoinError(
            f"Virtual slices cannot be lost with JAX {jax.__version__}: it has no "
            f"{' and no '.join(missing)}. Use another version of JAX, or give a fixed number of "
            "slices."
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
    """Where JAX is inside an array without the lock of the interpreter."""
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
    """Return the names of what this JAX lacks for slices that can be lost."""
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
        return ["make_error_array that works"]  # It raises AttributeError there.
    return missing
