"""Access to the jobs of a store, for the command line and the dashboard."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kinetic._client.board.reader import JobBoard
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store import index

if TYPE_CHECKING:
    from kinetic._backends.base import Backend
    from kinetic._client.handle import JobHandle
    from kinetic._core.place import Place
    from kinetic._store.base import Store


@dataclass(frozen=True)
class JobAccess:
    """A store, with functions that return the backend and the handle of each of its jobs.

    Attributes:
        store: holds the jobs' references and records.
        backend_of: returns the backend that runs a job.
        handle_of: returns the `JobHandle` of a job.
        now: returns the time, in seconds since the epoch.
    """

    store: Store
    backend_of: Callable[[JobRef], Backend]
    handle_of: Callable[[JobRef], JobHandle[Any]]
    now: Callable[[], float] = time.time

    @functools.cached_property
    def board(self) -> JobBoard:
        """The reader of the jobs' states."""
        return JobBoard(self.store, self.backend_of, self.now)

    def find(self, text: str) -> JobRef:
        """Return the job whose id is this text, or the only job whose id starts with it."""
        return index.find(self.store, text)


def open_access(flags: Mapping[str, str | None]) -> JobAccess:
    """Return access to the configured store; command-line `flags` override settings. Jobs with the
    same place and store share one `Backend` object."""
    from kinetic._config import settings as configuration
    from kinetic._store.open import open_store

    store = open_store(configuration.load(flags=flags).store)
    backends: dict[tuple[Place, str], Backend] = {}

    def backend_of(ref: JobRef) -> Backend:
        from kinetic._backends import registry

        key = (ref.place, ref.store_uri)
        if key not in backends:
            backends[key] = registry.backend_of(ref)
        return backends[key]

    def handle_of(ref: JobRef) -> JobHandle[Any]:
        from kinetic._client.handle import JobHandle

        return JobHandle(ref, backend_of(ref), store)

    return JobAccess(store, backend_of, handle_of)
