"""JAX's compilation cache in the store: later jobs read what one job has compiled.

JAX's own cache is a folder, which the hosts of a cluster do not share. If the user has not set a
folder, this module stands in for it. JAX names a program by all that its executable depends on, and
in a gang only process 0 writes. After an error of the store, or a call that takes too long, a
process compiles everything itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kinetic._core import layout
from kinetic._host.worker import streams
from kinetic._system import machine
from kinetic.errors import NotFound

PATIENCE_S = 30.0
"""Longest time, in seconds, that a compilation waits for the store."""
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
"""JAX's event for each program that it takes from a cache."""
_saved_s: list[float] = []
"""Seconds saved by each program since the last `take_savings`."""
T = TypeVar("T")


def attach(store_uri: str, *, keeps_all: bool) -> None:
    """Have JAX, which is being imported, read and write executables in a store. Do nothing if this
    version of JAX does not allow it.

    Args:
        store_uri: the address of the store.
        keeps_all: keep programs that compile within a second, too.
    """
    import jax
    from jax import monitoring
    from jax._src import compilation_cache

    choose = getattr(compilation_cache, "_get_cache", None)
    if choose is None:
        return

    @functools.cache
    def make_cache(platform: str) -> StoreCache:
        # JAX disregards the instructions that a processor has.
        machines = f"-{machine.hash_instructions()}" if platform == "cpu" else ""
        return StoreCache(store_uri, f"{jax.__version__}-{platform}{machines}")

    def get_cache(backend: Any) -> Any:
        return choose(backend) or make_cache(backend.platform)

    compilation_cache._get_cache = get_cache
    if keeps_all:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    monitoring.register_event_duration_secs_listener(_note_duration)


def _note_duration(event: str, duration_s: float, **_: Any) -> None:
    if event == _SAVED:
        _saved_s.append(max(duration_s, 0.0))


def take_savings() -> dict[str, Any]:
    """Return the number of programs from the cache since the last call, and the seconds saved, as
    fields of the worker's last message."""
    savings = {"cache_hits": len(_saved_s), "compile_saved_s": sum(_saved_s)}
    _saved_s.clear()
    return savings


class StoreCache:
    """JAX's `CacheInterface` over a store. The keys are listed once: then a program that is not in
    the store costs no call, and all processes of a gang miss the same programs."""

    def __init__(self, store_uri: str, runtime: str) -> None:
        self._uri = store_uri
        self._runtime = runtime
        self._is_off = False

    def get(self, key: str) -> bytes | None:
        """Return an executable in JAX's format; None if the store has none."""

        def read() -> bytes | None:
            store, keys = self._opened
            return bytes(store.get(self._name(key))) if self._name(key) in keys else None

        return self._ask(read)

    def put(self, key: str, value: bytes) -> None:
        """Write an executable."""
        self._ask(lambda: self._opened[0].put(self._name(key), value))

    def _name(self, key: str) -> str:
        return layout.executable(self._runtime, key.rpartition("-")[2])

    @functools.cached_property
    def _opened(self) -> tuple[Any, set[str]]:
        """The store and its keys."""
        from kinetic._store.open import open_store  # Few functions compile.

        store = open_store(self._uri, existing=True)
        return store, set(store.list(layout.executable(self._runtime, "").rstrip("/")))

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the answer to a call; None if the store fails, now or earlier."""
        from concurrent.futures import Future  # Few functions compile.

        if self._is_off:
            return None
        answer = Future[T]()

        def ask() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001 - `result` raises it again
                answer.set_exception(error)

        threading.Thread(target=ask, name="kinetic-executables", daemon=True).start()
        try:
            return answer.result(PATIENCE_S)
        except NotFound:  # Removed since it was listed.
            return None
        except Exception as error:  # noqa: BLE001 - of the store, or of a vendor's library
            self._is_off = True
            why = f"the store did not answer within {PATIENCE_S:.0f} s"
            if not isinstance(error, TimeoutError):
                why = f"{type(error).__name__}: {error}"
            streams.say(f"kinetic: this host compiles without the cache in the store: {why}")
            return None
