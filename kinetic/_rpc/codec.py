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
from kinetic._core.gang.programs import ProgramNote
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message. Stacks of 1,024 hosts have about 10 MB; gRPC's default is 4 MB."""
_MAX_WAITING_CALLS = 1 << 16
_LONGEST_WAIT_S = 600
_WINDOW_BYTES = 1 << 16
_MOST_CONNECTIONS = 4096
"""Limit of connections: the largest gangs have three for each host."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A caller without the token is refused once its metadata has arrived. Until then, its message
    # takes at most one flow-control window of memory: keep gRPC from enlarging windows.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.max_metadata_size", _WINDOW_BYTES),
    # Agents keep a stream open, so that their connections are never idle.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
    # Let a second coordinator on this port fail; by default, the two would share the calls.
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
    # Ignore http_proxy: a proxy cannot reach the coordinator.
    ("grpc.enable_http_proxy", 0),
    # The client itself retries, and must not wait for gRPC's pauses of up to a minute.
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
"""Options that detect a peer whose machine has vanished. Not used on one machine, where they would
only cut off a busy leader."""

AUTHORIZATION, JOB, ATTEMPT = "authorization", "kinetic-job", "kinetic-attempt"
RESTARTS = "kinetic-restarts"
"""Keys of every call's metadata: the token, and the caller's job, attempt and restarts."""


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
        began: monotonic time at which the function began; 0.0 if it has not. Only a host that is
            alone begins before it joins, and its leader is on the same machine.
    """

    host: int
    incarnation: str
    address: str
    began: float = 0.0


@dataclass(frozen=True)
class WatchRequest:
    """An agent's request for the state of the gang as its host sees it (view), and all changes."""

    host: int


@dataclass(frozen=True)
class StacksAnswer:
    """The Python stacks of a host, in answer to the request with this number."""

    host: int
    request: int
    text: str


@dataclass(frozen=True)
class ProgramNotes:
    """The programs that a host has run for the first time, in their order."""

    host: int
    notes: tuple[ProgramNote, ...]


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
"""The reply is the number of the gang's current state, which grows with each change."""
REPORT = Method("Report", HostReport)
STACKS = Method("Stacks", StacksAnswer)
PROGRAMS = Method("Programs", ProgramNotes)
PLACE = Method("Place", PlaceRequest, HostAssignment | None)
"""The reply comes once the host has an assignment; None if no attempt follows."""
DUMP_STACKS = Method("DumpStacks", float, dict[int, str])
"""The request is the hosts' time limit in seconds, the reply their stacks."""
CANCEL = Method("Cancel", str)
SNAPSHOT = Method("Snapshot", None, dict[str, Any])
"""The reply is `Gang.snapshot()`."""


def write(message: Any) -> bytes:
    """Encode a message. Return bytes unchanged: the server encodes views itself, once for all."""
    if isinstance(message, bytes):
        return message
    return json.dumps(documents.to_document(message), separators=(",", ":")).encode()


def read(data: bytes, kind: Any) -> Any:
    """Decode a message of this type.

    Raises:
        CorruptRecord: the bytes are not such a message; the error names the wrong field.
    """
    return documents.read(kind, data, "A message of the gang")
