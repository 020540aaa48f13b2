"""The protocol of a gang's coordinator: its methods, and its messages as JSON.

Every call may be repeated without harm. Calls carry metadata: the job's token and id and, from
agents, the attempt and the number of restarts of all hosts. Over TCP the connection uses TLS with
the job's own certificate.
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
"""Limit of a message. Stacks of 1,024 hosts have some 10 MB, and gRPC's default is 4 MB."""
_MAX_WAITING_CALLS = 1 << 16
_LONGEST_WAIT_S = 600
_WINDOW_BYTES = 1 << 16
_MOST_CONNECTIONS = 4096
"""Limit of connections: the largest gangs have three for each host."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A caller without the token is refused as soon as its metadata has arrived. Its message takes
    # at most one flow-control window of memory until then, and this probe would enlarge windows.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.max_metadata_size", _WINDOW_BYTES),
    # Agents keep a stream open, so that their connections are never idle.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
    # Two coordinators on one port would share its calls; the second must fail instead.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Hosts of a large gang join and report all at once. By default, gRPC cancels calls at random
    # when more than 1,000 wait for a busy server, and each call that has waited for 30 s.
    ("grpc.server.max_pending_requests", _MAX_WAITING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_WAITING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", _LONGEST_WAIT_S),
)
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # The coordinator cannot be reached through the proxy in http_proxy.
    ("grpc.enable_http_proxy", 0),
    # The client retries by itself; reconnecting must not wait for gRPC's back-off of a minute.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, this is the time limit of one attempt to connect, TLS included.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # DNS learns a leader's name only some time after its pod is created, and by default gRPC asks
    # DNS only every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
)
KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000))
"""Options that detect a peer that vanished silently (its machine lost power). On one machine, where
this cannot happen, they would only cut off a busy leader."""

AUTHORIZATION, JOB, ATTEMPT = "authorization", "kinetic-job", "kinetic-attempt"
RESTARTS = "kinetic-restarts"
"""Metadata of every call: the token, and the caller's job, attempt and number of restarts."""


def metadata_of(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """Return the metadata for calls to an endpoint."""
    pairs = [(AUTHORIZATION, f"Bearer {endpoint.token}"), (JOB, endpoint.job_id)]
    if endpoint.attempt:
        pairs.append((ATTEMPT, str(endpoint.attempt)))
    if endpoint.restarts is not None:
        pairs.append((RESTARTS, str(endpoint.restarts)))
    return tuple(pairs)


@dataclass(frozen=True)
class JoinRequest:
    """The announcement of an agent.

    Attributes:
        host: index in the gang.
        incarnation: identifies this start of the agent.
        address: the host's address for other hosts.
        ran_s: seconds that the function has run already; 0.0 if it has not started.
    """

    host: int
    incarnation: str
    address: str
    ran_s: float = 0.0


@dataclass(frozen=True)
class WatchRequest:
    """An agent's request for every change of its view."""

    host: int


@dataclass(frozen=True)
class StacksAnswer:
    """The stacks of a host, for the request with this number."""

    host: int
    request: int
    text: str


@dataclass(frozen=True)
class PlaceRequest:
    """An agent's request for its assignment in the next attempt.

    Attributes:
        index: the host's index among all hosts of the job.
        start: number of this start of the host, from 1.
        world: number of the world whose process the host keeps; 0 for none.
    """

    index: int
    start: int
    world: int = 0


@dataclass(frozen=True)
class Method:
    """One RPC: its name, and the types of request and reply."""

    name: str
    request: Any
    reply: Any = None
    streams: bool = False

    @property
    def path(self) -> str:
        """The method's full name in gRPC."""
        return f"/kinetic.Coordinator/{self.name}"


JOIN = Method("Join", JoinRequest, HostView)
WATCH = Method("Watch", WatchRequest, HostView, streams=True)
HEARTBEAT = Method("Heartbeat", Heartbeat, int)
"""The reply is the version of the views."""
REPORT = Method("Report", HostReport)
STACKS = Method("Stacks", StacksAnswer)
PLACE = Method("Place", PlaceRequest, HostAssignment | None)
"""The reply comes once the host has an assignment; None if no attempt follows."""
DUMP_STACKS = Method("DumpStacks", float, dict[int, str])
"""The request is the hosts' time limit in seconds, the reply their stacks."""
CANCEL = Method("Cancel", str)
SNAPSHOT = Method("Snapshot", None, dict[str, Any])
"""The reply is `Gang.snapshot()`."""


def write(message: Any) -> bytes:
    """Encode a message. Return bytes as they are: views are encoded once for all watchers."""
    if isinstance(message, bytes):
        return message
    return json.dumps(documents.to_document(message), separators=(",", ":")).encode()


def read(data: bytes, kind: Any) -> Any:
    """Decode a message of this type.

    Raises:
        CorruptRecord: the bytes are not such a message; the error names the wrong field.
    """
    return documents.read(kind, data, "A message of the gang")
