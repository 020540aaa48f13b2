"""What agents and people say to the coordinator of one gang: the table of its methods and messages.

In: frozen values. Out: their bytes (JSON), and back. Every call may be repeated without harm. It
carries metadata: the job's token and id and, from agents, the attempt and the start of all hosts.
Over TCP the connection is TLS with a certificate of the job's own.
"""

from __future__ import annotations

import json
from typing import Any

from kinetic._core import documents
from kinetic._core.endpoint import Endpoint
from kinetic._core.gang.messages import Heartbeat, HostAssignment, HostView
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Stacks of 1,024 hosts are some 10 MB; gRPC's own limit is 4 MB."""
_MAX_WAITING_CALLS = 1 << 16
_LONGEST_WAIT_S = 600
_WINDOW_BYTES = 1 << 16
_MOST_CONNECTIONS = 4096
"""Three of each host in the largest gangs."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A stranger is refused when its metadata is there: of its message, no more than one window is
    # in memory by then, and the probe would make windows larger.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.max_metadata_size", _WINDOW_BYTES),
    # Agents keep a stream open, so that no connection of theirs is idle.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
    # Two coordinators on one port would share its calls; the second must fail instead.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Beyond 1,000 calls that wait for a busy server, gRPC cancels some at random, and each that has
    # waited for 30 s: hosts of a large gang join, and report, all at once.
    ("grpc.server.max_pending_requests", _MAX_WAITING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_WAITING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", _LONGEST_WAIT_S),
)
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # The coordinator is never behind the proxy of http_proxy.
    ("grpc.enable_http_proxy", 0),
    # The client retries by itself; reconnecting must not wait for gRPC's back-off of a minute.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, how long one attempt to connect may take, TLS included.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A leader's name is known some time after its pod: gRPC would ask again only after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
)
KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000))
"""Notices a peer that vanished silently (its machine lost power). On one machine, where none does,
it would only cut off a leader that is busy."""


AUTHORIZATION, JOB, ATTEMPT = "authorization", "kinetic-job", "kinetic-attempt"
RESTARTS = "kinetic-restarts"
"""Metadata of every call: the token, and which job, attempt and start of all hosts the caller
belongs to."""


def metadata_of(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a caller."""
    pairs = [(AUTHORIZATION, f"Bearer {endpoint.token}"), (JOB, endpoint.job_id)]
    if endpoint.attempt:
        pairs.append((ATTEMPT, str(endpoint.attempt)))
    if endpoint.restarts is not None:
        pairs.append((RESTARTS, str(endpoint.restarts)))
    return tuple(pairs)


@dataclass(frozen=True)
class JoinRequest:
    """An agent is there.

    Attributes:
        host: index in the gang.
        incarnation: identifies this start of it.
        address: how other hosts reach it.
        ran_s: for how long its function has run; 0.0 if it has not begun.
    """

    host: int
    incarnation: str
    address: str
    ran_s: float = 0.0


@dataclass(frozen=True)
class WatchRequest:
    """An agent wants to see every change of its view."""

    host: int


@dataclass(frozen=True)
class StacksAnswer:
    """What the threads of a host do, for the request with this number."""

    host: int
    request: int
    text: str


@dataclass(frozen=True)
class PlaceRequest:
    """An agent asks for its place in the next attempt.

    Attributes:
        index: the host's index among all hosts of the job.
        start: which start of the host asks, from 1.
    """

    index: int
    start: int


@dataclass(frozen=True)
class Method:
    """One RPC: its name, and the types of request and reply."""

    name: str
    request: Any
    reply: Any = None
    streams: bool = False

    @property
    def path(self) -> str:
        """The full name in gRPC."""
        return f"/kinetic.Coordinator/{self.name}"


JOIN = Method("Join", JoinRequest, HostView)
WATCH = Method("Watch", WatchRequest, HostView, streams=True)
HEARTBEAT = Method("Heartbeat", Heartbeat, int)
"""Answered with the version of the views."""
REPORT = Method("Report", HostReport)
STACKS = Method("Stacks", StacksAnswer)
PLACE = Method("Place", PlaceRequest, HostAssignment | None)
"""Answered once there is a place; None if nothing follows."""
DUMP_STACKS = Method("DumpStacks", float, dict[int, str])
"""How many seconds hosts may take; their stacks."""
CANCEL = Method("Cancel", str)
SNAPSHOT = Method("Snapshot", None, dict[str, Any])
"""Answered with `Gang.snapshot()`."""


def write(message: Any) -> bytes:
    """Encode a message; bytes are one that was encoded before, for all watchers."""
    if isinstance(message, bytes):
        return message
    return json.dumps(documents.to_document(message), separators=(",", ":")).encode()


def read(data: bytes, kind: Any) -> Any:
    """Decode a message of this type.

    Raises:
        CorruptRecord: it is none; the field that is wrong is named.
    """
    return documents.read(kind, data, "A message of the gang")
