"""The seam to the API server: plain documents in and out.

In: verbs on `Resource`s. Out: documents, watch events; errors of
`kinetic._backends.kubernetes.answers`. Implemented by `connection.HttpApi`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kinetic._backends.kubernetes.resources import Resource
from kinetic._core.values import dataclass

Document = dict[str, Any]


@dataclass(frozen=True)
class Listing:
    """Objects as they were at one moment.

    Attributes:
        items: the objects; unlike in a watch they have no kind.
        resource_version: the moment, which a watch continues from.
    """

    items: Sequence[Document]
    resource_version: str


@dataclass(frozen=True)
class Selection:
    """Which objects of a kind.

    Attributes:
        labels, fields: selectors as kubectl takes them; "" for all.
        namespace: None for the namespace of the connection; "" for all namespaces.
    """

    labels: str = ""
    fields: str = ""
    namespace: str | None = None


@dataclass(frozen=True)
class Version:
    """What the server is.

    Attributes:
        text: such as v1.33.4-gke.100.
        major, minor: as numbers; 0 where they cannot be read.
    """

    text: str
    major: int = 0
    minor: int = 0


class EventStream(Protocol):
    """The events of a watch. Iterating raises `BackendUnavailable` when it broke off; a plain end
    says nothing about why it ended."""

    def __iter__(self) -> Iterator[Document]:
        """Yield {"type": …, "object": …} as they come."""
        ...

    def close(self) -> None:
        """End it, from any thread: whoever reads gets the end. Idempotent."""
        ...


class Api(Protocol):
    """Calls to one API server.

    Promises:
        1. Each call has time limits, and is repeated with back-off where repeating is safe: after
           429, 5xx and lost connections. Then it raises `BackendUnavailable`.
        2. Expired credentials are renewed once for each call.
        3. What will not pass raises `PreflightError` (`answers`), what is not there `NotFound`.
        4. `create` makes one object, also when its first answer was lost.
        5. Threads may share it.
    """

    server: str
    namespace: str

    def now(self) -> float:
        """Return the seconds since the epoch by the clock of the server, as its answers tell it:
        what it says of objects is of that clock, and clocks of laptops go wrong."""
        ...

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """Create an object and return it as the server has it; with `dry_run`, as it would be.

        Raises:
            Conflict: an object with this name exists, and this call has not made it.
        """
        ...

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document:
        """Return an object."""
        ...

    def list(self, resource: Resource, selection: Selection = Selection()) -> Listing:  # noqa: B008
        """Return all objects that are selected."""
        ...

    def delete(
        self,
        resource: Resource,
        name: str,
        *,
        propagation: str = "Background",
        uid: str = "",
        grace_s: int | None = None,
    ) -> bool:
        """Delete an object with what belongs to it; return whether it was there.

        Args:
            resource, name: the object.
            propagation: Background: it is gone at once, what belongs to it soon. Foreground: it is
                gone when all that belongs to it is.
            uid: delete it only if it is still this one; "" for whichever has the name.
            grace_s: how long a pod may take to end, 0 for not at all; None for what it asks for
                itself.
        """
        ...

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> Document:
        """Change an object by a JSON merge patch and return it."""
        ...

    def watch(
        self,
        resource: Resource,
        selection: Selection = Selection(),  # noqa: B008
        *,
        resource_version: str = "",
    ) -> EventStream:
        """Follow the changes after a resource version, with bookmarks. The stream ends at the
        server's will."""
        ...

    def may(self, verb: str, resource: Resource, *, namespace: str | None = None) -> bool:
        """Whether the caller has a right."""
        ...

    def knows(self, resource: Resource) -> bool:
        """Whether the server knows this kind of object, for a caller who may ask."""
        ...

    def version(self) -> Version:
        """Return what the server is."""
        ...


@dataclass(frozen=True)
class Patience:
    """How long calls wait, in seconds.

    Attributes:
        connect_s: for a connection.
        read_s: for the next bytes of an answer.
        stream_s: for the next bytes of a watch; bookmarks come once a minute.
        tries: how often a call is made before it is given up.
        first_s, most_s: the longest wait before the second, and before any later try.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    stream_s: float = 90.0
    tries: int = 5
    first_s: float = 0.25
    most_s: float = 8.0


def waits_s(tries: int, patience: Patience, seed: random.Random) -> float:
    """Return how long to wait after so many tries: up to twice as long each time, at random, so
    that many callers do not come back at once."""
    most = min(patience.most_s, patience.first_s * 2.0 ** (tries - 1))
    return most * (0.5 + seed.random() / 2)
