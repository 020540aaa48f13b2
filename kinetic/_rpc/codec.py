"""The coordinator's methods and messages on the wire: one table for the server and its clients.

In: frozen values. Out: protobuf messages, and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import Activity, Heartbeat, HostView, Place
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass
from kinetic._rpc import coordinator_pb2 as pb
from kinetic.errors import CorruptRecord

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Stacks of 1,024 hosts are some 10 MB; gRPC's own limit is 4 MB."""
_MAX_WAITING_CALLS = 1 << 16
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
    # Beyond 1,000 calls that wait for a busy server, gRPC cancels some at random: hosts of a large
    # gang join, and report, all at once.
    ("grpc.server.max_pending_requests", _MAX_WAITING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_WAITING_CALLS),
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
    # Notice a peer that vanished silently (its machine lost power).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


AUTHORIZATION, JOB, ATTEMPT = "authorization", "kinetic-job", "kinetic-attempt"
"""Metadata of every call: the token, and which job and attempt the caller belongs to."""


def metadata_of(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a caller."""
    pairs = ((AUTHORIZATION, f"Bearer {endpoint.token}"), (JOB, endpoint.job_id))
    return (*pairs, (ATTEMPT, str(endpoint.attempt))) if endpoint.attempt else pairs


@dataclass(frozen=True)
class Method:
    """One RPC: its name, and how request and reply are serialized."""

    name: str
    request: Any
    reply: Any
    streams: bool = False

    @property
    def path(self) -> str:
        """The full name in gRPC."""
        return f"/kinetic.coordinator.Coordinator/{self.name}"

    @property
    def write_request(self) -> Callable[[Any], bytes]:
        """Serializer of the request."""
        write: Callable[[Any], bytes] = self.request.SerializeToString
        return write

    @property
    def read_request(self) -> Callable[[bytes], Any]:
        """Deserializer of the request."""
        read: Callable[[bytes], Any] = self.request.FromString
        return read

    @property
    def write_reply(self) -> Callable[[Any], bytes]:
        """Serializer of the reply; views come as bytes, serialized once for all watchers."""
        write: Callable[[Any], bytes] = (
            bytes if self.reply is pb.HostView else self.reply.SerializeToString
        )
        return write

    @property
    def read_reply(self) -> Callable[[bytes], Any]:
        """Deserializer of the reply."""
        read: Callable[[bytes], Any] = self.reply.FromString
        return read


JOIN = Method("Join", pb.JoinRequest, pb.HostView)
WATCH = Method("Watch", pb.WatchRequest, pb.HostView, streams=True)
HEARTBEAT = Method("Heartbeat", pb.Beat, pb.BeatReply)
REPORT = Method("Report", pb.ReportRequest, pb.Empty)
STACKS = Method("Stacks", pb.StacksAnswer, pb.Empty)
NEXT = Method("Next", pb.NextRequest, pb.NextReply)
PLACE = Method("Place", pb.PlaceRequest, pb.PlaceReply)
DUMP_STACKS = Method("DumpStacks", pb.DumpStacksRequest, pb.DumpStacksReply)
CANCEL = Method("Cancel", pb.CancelRequest, pb.Empty)
SNAPSHOT = Method("Snapshot", pb.Empty, pb.SnapshotReply)


def heartbeat_to_wire(beat: Heartbeat) -> pb.Beat:
    """Write a heartbeat."""
    return pb.Beat(
        host=beat.host,
        state=beat.state,
        stalled_s=beat.stalled_s,
        rss_bytes=beat.rss_bytes,
        cpu_s=beat.cpu_s,
        log_bytes=beat.log_bytes,
        last_line=clean(beat.last_line),
    )


def heartbeat_from_wire(message: pb.Beat) -> Heartbeat:
    """Read a heartbeat."""
    return Heartbeat(
        host=message.host,
        state=_activity(message.state),
        stalled_s=message.stalled_s,
        rss_bytes=message.rss_bytes,
        cpu_s=message.cpu_s,
        log_bytes=message.log_bytes,
        last_line=message.last_line,
    )


def _activity(word: str) -> Activity:
    """The activity; one of another version may be unknown here, but its host is alive."""
    return Activity(word) if word in set(Activity) else Activity.PREPARING


def view_to_wire(view: HostView) -> bytes:
    """Write a view."""
    message = pb.HostView(
        version=view.version,
        ready=view.ready,
        addresses=view.addresses,
        stop=view.stop,
        stop_exit=view.stop_exit or "",
        stop_reason=clean(view.stop_reason),
        grace_s=view.grace_s,
        stacks_request=view.stacks_request,
        all_done=view.all_done,
        notice=clean(view.notice),
        preempted=view.preempted,
        makes_room=view.makes_room,
    )
    return message.SerializeToString()


def view_from_wire(message: pb.HostView) -> HostView:
    """Read a view."""
    return HostView(
        version=message.version,
        ready=message.ready,
        addresses=tuple(message.addresses),
        stop=message.stop,
        stop_exit=Exit(message.stop_exit) if message.stop_exit else None,
        stop_reason=message.stop_reason,
        grace_s=message.grace_s,
        stacks_request=message.stacks_request,
        all_done=message.all_done,
        notice=message.notice,
        preempted=message.preempted,
        makes_room=message.makes_room,
    )


def place_to_wire(place: Place | None) -> pb.PlaceReply:
    """Write a place, or that nothing follows."""
    if place is None:
        return pb.PlaceReply(over=True)
    return pb.PlaceReply(
        again=place.again,
        attempt=place.attempt,
        host=place.host,
        slices=place.slices,
        most_attempts=place.most_attempts,
        lost_at=place.lost_at,
        service=place.service,
    )


def place_from_wire(message: pb.PlaceReply) -> Place | None:
    """Read a place; None when nothing follows."""
    if message.over:
        return None
    return Place(
        attempt=message.attempt,
        host=message.host,
        slices=tuple(message.slices),
        most_attempts=message.most_attempts,
        lost_at=message.lost_at,
        service=message.service,
        again=message.again,
    )


def report_to_wire(report: HostReport) -> pb.ReportRequest:
    """Write a report."""
    return pb.ReportRequest(report=json.dumps(report.to_json()).encode())


def report_from_wire(message: pb.ReportRequest) -> HostReport:
    """Read a report.

    Raises:
        CorruptRecord: the bytes are not a report.
    """
    try:
        return HostReport.from_json(json.loads(message.report))
    except ValueError as error:
        raise CorruptRecord(f"The report of a host is not JSON: {error}.") from error


def clean(text: str) -> str:
    """Replace what UTF-8 cannot encode: surrogates in a program's output."""
    return text.encode("utf-8", "replace").decode()
