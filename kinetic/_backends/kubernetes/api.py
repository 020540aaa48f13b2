"""The seam to the API server: plain documents in and out.

In: verbs on `Resource`s. Out: documents; errors of
`kinetic._backends.kubernetes.errors`. Implemented by `connection.HttpApi`.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from kinetic._backends.kubernetes.resources import Resource
from kinetic._core.values import dataclass

Document = dict[str, Any]


@dataclass(frozen=True)
class ObjectList:
    """Objects at one moment.

    Attributes:
        items: the objects; they have no kind.
        pages: in so many requests.
    """

    items: Sequence[Document]
    pages: int = 1


@dataclass(frozen=True)
class Selector:
    """A selection of objects of a kind.

    Attributes:
        labels, fields: selectors as kubectl takes them; "" for all.
        namespace: None for the namespace of the connection; "" for all namespaces.
    """

    labels: str = ""
    fields: str = ""
    namespace: str | None = None


@dataclass(frozen=True)
class Version:
    """The server's version.

    Attributes:
        text: such as v1.33.4-gke.100.
        major, minor: as numbers; 0 if they cannot be parsed.
    """

    text: str
    major: int = 0
    minor: int = 0


class Api(Protocol):
    """Calls to one API server.

    Promises:
        1. Each call has time limits, and is repeated with back-off where that is safe: after 429,
           5xx and lost connections. After that it raises `BackendUnavailable`.
        2. Expired credentials are renewed once for each call.
        3. Permanent failures raise `PreflightError` (`errors`), missing objects `NotFound`.
        4. `create` makes one object, even if its first answer was lost.
        5. Threads may share it.
    """

    server: str
    namespace: str

    def now(self) -> float:
        """Return the seconds since the epoch by the server's clock, as its answers report it:
        timestamps in objects are by that clock, and laptops' clocks may be wrong."""
        ...

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """Create an object and return it as the server stored it; with `dry_run`, as it would.

        Raises:
            Conflict: an object with this name exists, and this call did not create it.
        """
        ...

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document:
        """Return an object."""
        ...

    def list(self, resource: Resource, selection: Selector = Selector()) -> ObjectList:  # noqa: B008
        """Return all selected objects."""
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
        """Delete an object with what it owns; return whether it was there.

        Args:
            resource, name: the object.
            propagation: Background: it is gone at once, what it owns soon after. Foreground: it is
                gone once everything that it owns is.
            uid: delete it only if it still has this uid; "" for any.
            grace_s: how long a pod may take to end, 0 for not at all; None for the time in its
                spec.
        """
        ...

    def open_port(self, pod: str, port: int) -> socket.socket:
        """Connect to a port of the loopback address of a pod. Its socket ends if nothing listens
        there."""
        ...

    def may(self, verb: str, resource: Resource, *, namespace: str | None = None) -> bool:
        """Whether the caller has a permission."""
        ...

    def knows(self, resource: Resource) -> bool:
        """Whether the server knows this kind of object, as far as the caller may ask."""
        ...

    def version(self) -> Version:
        """Return the server's version."""
        ...

    def close(self) -> None:
        """Close idle connections."""
        ...


@dataclass(frozen=True)
class CallLimits:
    """How long calls wait, in seconds.

    Attributes:
        connect_s: for a connection.
        read_s: for the next bytes of an answer.
        tries: how often a call is made before giving up.
        first_s, most_s: the longest wait before the second, and before any later try.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    tries: int = 5
    first_s: float = 0.25
    most_s: float = 8.0


def waits_s(tries: int, patience: CallLimits, seed: random.Random) -> float:
    """Return how long to wait after this many tries: up to twice as long each time, at random, so
    that many callers do not return at the same moment."""
    most = min(patience.most_s, patience.first_s * 2.0 ** (tries - 1))
    return most * (0.5 + seed.random() / 2)
