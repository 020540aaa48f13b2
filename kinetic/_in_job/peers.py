"""What the processes of a job say to each other about checkpoints: the door to JAX's coordination
service and to its collectives.

In: bytes, keys, names of barriers. Out: what the others said.

There is no public interface to the key-value store of JAX's coordination service. Where its client
is not what we know, a process that is not alone says so at once (`of_this_world`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from kinetic.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

_worlds = itertools.count()
"""Counts the groups of this process: all processes of a world make them in the same order."""
_SHORTEST_MS = 1


class Peers(Protocol):
    """The processes of a job. `gather` and `broadcast` are collective and belong to the main
    thread; the rest may be called from any thread.

    Attributes:
        index: of this process.
        count: how many there are.
    """

    index: int
    count: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each process gave."""
        ...

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        """Return the bytes that the source has; the others give an array of the same size."""
        ...

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Wait until all processes are here.

        Raises:
            TimeoutError: they were not in time, or one of them is lost.
        """
        ...

    def set(self, key: str, value: str) -> None:
        """Set a key, which may be set already."""
        ...

    def get(self, key: str, limit_s: float) -> str | None:
        """Wait until a key is set; None when that takes too long."""
        ...

    def get_all(self, folder: str) -> dict[str, str]:
        """Return the keys below this one, without it, and their values."""
        ...

    def forget(self, key: str) -> None:
        """Delete a key, and those below it."""
        ...


class Alone:
    """The only process."""

    index = 0
    count = 1

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._changed = threading.Condition()

    def gather(self, data: bytes) -> list[bytes]:
        """Return it."""
        return [data]

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        """Return it."""
        return data

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Nobody is waited for."""

    def set(self, key: str, value: str) -> None:
        """Keep it."""
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> str | None:
        """Return it, or None after the time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._messages, limit_s)
            return self._messages.get(key)

    def get_all(self, folder: str) -> dict[str, str]:
        """Return what is there."""
        with self._changed:
            texts = dict(self._messages)
        return {
            key.removeprefix(f"{folder}/"): value
            for key, value in texts.items()
            if key.startswith(f"{folder}/")
        }

    def forget(self, key: str) -> None:
        """Delete it."""
        with self._changed:
            for stored_key in [k for k in self._messages if k == key or k.startswith(f"{key}/")]:
                del self._messages[stored_key]


class WorldPeers:
    """The processes of the world that JAX has joined."""

    def __init__(self, client: Any, index: int, count: int, name: str) -> None:
        self.index = index
        self.count = count
        self._client = client
        self._name = name

    def gather(self, data: bytes) -> list[bytes]:
        """Gather with two collectives: of the sizes, then of the content."""
        import numpy as np
        from jax.experimental import multihost_utils

        sizes = multihost_utils.process_allgather(np.array([len(data)], np.int64)).reshape(-1)
        # Few different sizes: each is compiled once.
        room = 1 << max(int(sizes.max()) - 1, 1023).bit_length()
        own = np.zeros(room, np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        gathered = np.asarray(multihost_utils.process_allgather(own)).reshape(self.count, room)
        return [gathered[index, : int(size)].tobytes() for index, size in enumerate(sizes.tolist())]

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        """Send over the devices' network."""
        import numpy as np
        from jax.experimental import multihost_utils

        sent = multihost_utils.broadcast_one_to_all(data, is_source=self.index == source)
        return np.asarray(sent)

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Wait at a barrier of the coordination service, which needs no device."""
        try:
            self._client.wait_at_barrier(f"{self._name}/{name}", _ms(limit_s))
        except Exception as error:
            raise TimeoutError(f"not all hosts came to {name!r}: {error}") from error

    def set(self, key: str, value: str) -> None:
        """Set it in the coordination service."""
        self._client.key_value_set(f"{self._name}/{key}", value, allow_overwrite=True)

    def get(self, key: str, limit_s: float) -> str | None:
        """Wait in the coordination service."""
        try:
            return str(self._client.blocking_key_value_get(f"{self._name}/{key}", _ms(limit_s)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def get_all(self, folder: str) -> dict[str, str]:
        """Ask the coordination service."""
        prefix = f"{self._name}/{folder}/"
        entries = self._client.key_value_dir_get(prefix)
        return {str(key).removeprefix(prefix): str(value) for key, value in entries}

    def forget(self, key: str) -> None:
        """Delete it in the coordination service, where that is still there."""
        with contextlib.suppress(Exception):
            self._client.key_value_delete(f"{self._name}/{key}")


def of_this_world() -> Peers:
    """Return the processes that JAX has joined.

    Raises:
        CheckpointError: this JAX has no coordination service that we know.
    """
    import jax

    count = jax.process_count()
    if count == 1:
        return Alone()
    from jax._src import distributed

    client = getattr(getattr(distributed, "global_state", None), "client", None)
    if client is None or not _is_known(client):
        raise CheckpointError(
            f"kinetic.Checkpointer does not know the coordination service of JAX "
            f"{jax.__version__}, which the hosts of a job need to agree on a step. Use another "
            "version of JAX, or one process."
        )
    return WorldPeers(client, jax.process_index(), count, f"kinetic/checkpoints/{next(_worlds)}")


def find_world(name: str) -> WorldPeers | None:
    """Return the processes that this one has joined, under a name that they all use; None if it has
    joined none, or as far as this JAX has no coordination service that we know."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state: Any = getattr(distributed, "global_state", None)
    client, count = getattr(state, "client", None), getattr(state, "num_processes", None) or 1
    if client is None or count == 1 or not _is_known(client):
        return None
    return WorldPeers(client, int(state.process_id), count, name)


def _is_known(client: Any) -> bool:
    needed = ("wait_at_barrier", "key_value_set", "blocking_key_value_get", "key_value_dir_get")
    return all(hasattr(client, name) for name in needed)


def _ms(limit_s: float) -> int:
    return max(int(limit_s * 1000), _SHORTEST_MS)
