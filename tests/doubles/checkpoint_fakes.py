"""Fake hosts for tests of checkpoints: threads of one process that implement `Peers`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kinetic._in_job.peers import Alone

PATIENCE_S = 100.0


class Crowd:
    """The barriers, keys and values that all fake hosts of a test share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.board = Alone()
        self.met: dict[str, threading.Barrier] = {}
        self.lock = threading.Lock()

    def barrier(self, name: str) -> threading.Barrier:
        with self.lock:
            return self.met.setdefault(name, threading.Barrier(self.count))

    def hosts(self) -> list[Together]:
        return [Together(self, index) for index in range(self.count)]


class Together:
    """A fake host; implements `Peers`."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self._crowd = crowd
        self.index = index
        self.count = crowd.count
        self._gathered = 0

    def gather(self, data: bytes) -> list[bytes]:
        self._gathered += 1
        name = f"gather/{self._gathered}"
        self.set(f"{name}/{self.index}", data.hex())
        self.wait_at_barrier(name, PATIENCE_S)
        parts = self.get_all(name)
        return [bytes.fromhex(parts[str(index)]) for index in range(self.count)]

    def broadcast(self, data: Any, source: int) -> Any:
        import numpy as np

        parts = self.gather(data.tobytes())
        return np.frombuffer(parts[source], np.uint8)

    def wait_at_barrier(self, name: str, limit_s: float) -> None:
        try:
            self._crowd.barrier(name).wait(min(limit_s, PATIENCE_S))
        except threading.BrokenBarrierError as error:
            raise TimeoutError(name) from error

    def set(self, key: str, value: str) -> None:
        self._crowd.board.set(key, value)

    def get(self, key: str, limit_s: float) -> str | None:
        return self._crowd.board.get(key, limit_s)

    def get_all(self, folder: str) -> dict[str, str]:
        return self._crowd.board.get_all(folder)

    def forget(self, key: str) -> None:
        self._crowd.board.forget(key)


def on_all(hosts: list[Together], act: Callable[[Together], Any]) -> list[Any]:
    """Call `act` for all hosts at the same time, each in a thread; return results or exceptions."""
    results: list[Any] = [None] * len(hosts)

    def run(host: Together) -> None:
        try:
            results[host.index] = act(host)
        except Exception as error:
            results[host.index] = error

    threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
        assert not thread.is_alive(), "a host waits forever"
    return results


def state(number: int) -> dict[str, Any]:
    import jax
    import numpy as np

    key = jax.random.key(number)
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4) + number,
        "half": np.full((2,), number, jax.numpy.bfloat16),
        "none": None,
        "empty": np.zeros((0, 3)),
        "key": key,
        "step": number,
        "list": [np.int64(number), True],
        "on a device": jax.numpy.arange(5.0) * number,
    }
