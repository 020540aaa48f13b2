"""The protocol of calls to an API server, with plain documents: verbs on `Resource`s.

Errors are those of `kinetic._backends.kubernetes.errors`. `connection.HttpApi` implements it.
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
    """The objects in the answer to a list call.

    Attributes:
        items: the objects; the server leaves out their `kind`.
        pages: how many requests the list took.
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
        text: the whole version, such as v1.33.4-gke.100.
        major, minor: as numbers; 0 if they cannot be parsed.
    """

    text: str
    major: int = 0
    minor: int = 0


class Api(Protocol):
    """Calls to one API server.

    Promises:
        1. Each call has time limits, and is repeated with back-off after 429, 5xx and lost
           connections. After the last try it raises `BackendUnavailable`.
        2. A call renews expired credentials once.
        3. Permanent failures raise a `PreflightError` from `errors`, missing objects `NotFound`.
        4. `create` creates one object, even if the first answer was lost.
        5. Threads may share an instance.
    """

    server: str
    namespace: str

    def now(self) -> float:
        """Return the time by the server's clock, in seconds since the epoch. Timestamps in objects
        are by that clock; the clocks of laptops may be wrong."""
        ...

    def create(self, resource: Resource, document: Document, *, dry_run: bool = False) -> Document:
        """Create an object and return it as stored by the server; with `dry_run`, only validate it.

        Raises:
            Conflict: an object with this name exists that this call did not create.
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
        """Delete an object and the objects that it owns; return True if the object existed.

        Args:
            resource, name: the object.
            propagation: with Background the object disappears at once and its dependents soon
                after; with Foreground it disappears after all its dependents.
            uid: delete the object only if it still has this uid; "" for any.
            grace_s: how long a pod may take to end, 0 for no time; None for the time in its spec.
        """
        ...

    def open_port(self, pod: str, port: int) -> socket.socket:
        """Connect to a port of the loopback address of a pod. If nothing listens on the port,
        reading from the socket ends at once."""
        ...

    def may(self, verb: str, resource: Resource, *, namespace: str | None = None) -> bool:
        """True if the caller may use a verb of RBAC, such as "create", on this kind of object."""
        ...

    def knows(self, resource: Resource) -> bool:
        """True if the server knows this kind of object."""
        ...

    def version(self) -> Version:
        """Return the server's version."""
        ...

    def close(self) -> None:
        """Close idle connections."""
        ...


@dataclass(frozen=True)
class CallLimits:
    """The time limits of calls, in seconds.

    Attributes:
        connect_s: the longest wait for a connection.
        read_s: the longest wait for the next bytes of a response.
        tries: the largest number of tries of a call.
        first_s, most_s: the longest pause before the second try, and the longest before any try.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    tries: int = 5
    first_s: float = 0.25
    most_s: float = 8.0


def waits_s(tries: int, patience: CallLimits, seed: random.Random) -> float:
    """Return the pause in seconds after `tries` failed tries, within `patience`. The pause is
    random, so that callers do not all retry at the same moment; its upper limit doubles with each
    try."""
    most = min(patience.most_s, patience.first_s * 2.0 ** (tries - 1))
    return most * (0.5 + seed.random() / 2)
