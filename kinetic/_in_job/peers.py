"""Communication between the processes of a job: JAX's coordination service and its collectives.

The only module that uses the key-value store of JAX's coordination service, which has no public
interface. If its client lacks a method that is needed, `connect` fails at once.
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
"""Numbers for groups of processes. All processes connect in the same order, so the numbers are
equal everywhere."""
_SHORTEST_MS = 1


class Peers(Protocol):
    """The processes of a job. All processes must call `gather` and `broadcast`, in their main
    threads. Any thread may call the other methods.

    Attributes:
        index: Index of this process.
        count: Number of processes.
    """

    index: int
    count: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all processes, by index."""
        ...

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        """Return the bytes that process `source` passes. All processes must pass the same size."""
        ...

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Wait until all processes have reached the barrier.

        Raises:
            TimeoutError: A process was late or is lost.
        """
        ...

    def set(self, key: str, value: str) -> None:
        """Set a key, or replace its value."""
        ...

    def get(self, key: str, limit_s: float) -> str | None:
        """Wait until a key is set, and return its value; None if it is not set in time."""
        ...

    def get_all(self, folder: str) -> dict[str, str]:
        """Return the values of all keys below `folder`, by key relative to it."""
        ...

    def forget(self, key: str) -> None:
        """Delete a key and all keys below it."""
        ...


class Alone:
    """Peers of a process that is the only one of its job."""

    index = 0
    count = 1

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._changed = threading.Condition()

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        return data

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Return at once: no other process exists."""

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._messages, limit_s)
            return self._messages.get(key)

    def get_all(self, folder: str) -> dict[str, str]:
        with self._changed:
            texts = dict(self._messages)
        return {
            key.removeprefix(f"{folder}/"): value
            for key, value in texts.items()
            if key.startswith(f"{folder}/")
        }

    def forget(self, key: str) -> None:
        with self._changed:
            for stored_key in [k for k in self._messages if k == key or k.startswith(f"{key}/")]:
                del self._messages[stored_key]


class WorldPeers:
    """The processes that `jax.distributed` has connected."""

    def __init__(self, client: Any, index: int, count: int, name: str) -> None:
        self.index = index
        self.count = count
        self._client = client
        self._name = name

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the sizes in one collective, then the contents in another."""
        import numpy as np
        from jax.experimental import multihost_utils

        sizes = multihost_utils.process_allgather(np.array([len(data)], np.int64)).reshape(-1)
        # Round up to a power of two: JAX compiles the collective once for each size.
        room = 1 << max(int(sizes.max()) - 1, 1023).bit_length()
        own = np.zeros(room, np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        gathered = np.asarray(multihost_utils.process_allgather(own)).reshape(self.count, room)
        return [gathered[index, : int(size)].tobytes() for index, size in enumerate(sizes.tolist())]

    def broadcast(self, data: np.ndarray[Any, Any], source: int) -> np.ndarray[Any, Any]:
        """Broadcast over the devices' network."""
        import numpy as np
        from jax.experimental import multihost_utils

        content = multihost_utils.broadcast_one_to_all(data, is_source=self.index == source)
        return np.asarray(content)

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        """Wait at a barrier of the coordination service, which needs no device."""
        try:
            self._client.wait_at_barrier(f"{self._name}/{name}", _ms(limit_s))
        except Exception as error:
            raise TimeoutError(f"not all hosts reached barrier {name!r}: {error}") from error

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(f"{self._name}/{key}", value, allow_overwrite=True)

    def get(self, key: str, limit_s: float) -> str | None:
        try:
            return str(self._client.blocking_key_value_get(f"{self._name}/{key}", _ms(limit_s)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def get_all(self, folder: str) -> dict[str, str]:
        prefix = f"{self._name}/{folder}/"
        entries = self._client.key_value_dir_get(prefix)
        return {str(key).removeprefix(prefix): str(value) for key, value in entries}

    def forget(self, key: str) -> None:
        """Delete a key and all keys below it; a no-op if the service has already shut down."""
        with contextlib.suppress(Exception):
            self._client.key_value_delete(f"{self._name}/{key}")


def connect() -> Peers:
    """Return the processes that JAX has connected, as a new group: its keys are separate from those
    of other groups.

    Raises:
        CheckpointError: The coordination service of this JAX lacks a method.
    """
    import jax

    count = jax.process_count()
    if count == 1:
        return Alone()
    from jax._src import distributed

    client = getattr(getattr(distributed, "global_state", None), "client", None)
    if client is None or not _is_supported(client):
        raise CheckpointError(
            f"kinetic.Checkpointer does not support the coordination service of JAX "
            f"{jax.__version__}, which the hosts of a job need to agree on a step. Use another "
            "version of JAX, or one process."
        )
    return WorldPeers(client, jax.process_index(), count, f"kinetic/checkpoints/{next(_worlds)}")


def find_world(name: str) -> WorldPeers | None:
    """Return the processes that JAX has connected; their keys start with `name`. Does not import
    JAX. Return None if this process is alone, or this JAX's coordination service is not
    supported."""
    if "jax" not in sys.modules:
        return None
    from jax._src import distributed

    state: Any = getattr(distributed, "global_state", None)
    client, count = getattr(state, "client", None), getattr(state, "num_processes", None) or 1
    if client is None or count == 1 or not _is_supported(client):
        return None
    return WorldPeers(client, int(state.process_id), count, name)


def _is_supported(client: Any) -> bool:
    needed = ("wait_at_barrier", "key_value_set", "blocking_key_value_get", "key_value_dir_get")
    return all(hasattr(client, name) for name in needed)


def _ms(limit_s: float) -> int:
    return max(int(limit_s * 1000), _SHORTEST_MS)
