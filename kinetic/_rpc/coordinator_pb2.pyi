from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("host", "incarnation", "address")
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host: int
    incarnation: str
    address: str
    def __init__(self, host: _Optional[int] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: int
    def __init__(self, host: _Optional[int] = ...) -> None: ...

class HostView(_message.Message):
    __slots__ = ("version", "ready", "addresses", "stop", "stop_exit", "stop_reason", "grace_s", "stacks_request", "all_done", "notice", "preempted", "makes_room")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_EXIT_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    STACKS_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ALL_DONE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    MAKES_ROOM_FIELD_NUMBER: _ClassVar[int]
    version: int
    ready: bool
    addresses: _containers.RepeatedScalarFieldContainer[str]
    stop: bool
    stop_exit: str
    stop_reason: str
    grace_s: float
    stacks_request: int
    all_done: bool
    notice: str
    preempted: bool
    makes_room: bool
    def __init__(self, version: _Optional[int] = ..., ready: bool = ..., addresses: _Optional[_Iterable[str]] = ..., stop: bool = ..., stop_exit: _Optional[str] = ..., stop_reason: _Optional[str] = ..., grace_s: _Optional[float] = ..., stacks_request: _Optional[int] = ..., all_done: bool = ..., notice: _Optional[str] = ..., preempted: bool = ..., makes_room: bool = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("host", "state", "stalled_s", "rss_bytes", "cpu_s", "log_bytes", "last_line")
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_LINE_FIELD_NUMBER: _ClassVar[int]
    host: int
    state: str
    stalled_s: float
    rss_bytes: int
    cpu_s: float
    log_bytes: int
    last_line: str
    def __init__(self, host: _Optional[int] = ..., state: _Optional[str] = ..., stalled_s: _Optional[float] = ..., rss_bytes: _Optional[int] = ..., cpu_s: _Optional[float] = ..., log_bytes: _Optional[int] = ..., last_line: _Optional[str] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    def __init__(self, report: _Optional[bytes] = ...) -> None: ...

class StacksAnswer(_message.Message):
    __slots__ = ("host", "request", "text")
    HOST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    host: int
    request: int
    text: str
    def __init__(self, host: _Optional[int] = ..., request: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class NextRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: int
    def __init__(self, host: _Optional[int] = ...) -> None: ...

class NextReply(_message.Message):
    __slots__ = ("attempt", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    reason: str
    def __init__(self, attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("seat", "start", "kept")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    seat: int
    start: int
    kept: bool
    def __init__(self, seat: _Optional[int] = ..., start: _Optional[int] = ..., kept: bool = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("over", "again", "attempt", "host", "slices", "most_attempts", "lost_at", "service")
    OVER_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    MOST_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOST_AT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    over: bool
    again: bool
    attempt: int
    host: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    most_attempts: int
    lost_at: float
    service: str
    def __init__(self, over: bool = ..., again: bool = ..., attempt: _Optional[int] = ..., host: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., most_attempts: _Optional[int] = ..., lost_at: _Optional[float] = ..., service: _Optional[str] = ...) -> None: ...

class DumpStacksRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DumpStacksReply(_message.Message):
    __slots__ = ("stacks",)
    class StacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    STACKS_FIELD_NUMBER: _ClassVar[int]
    stacks: _containers.ScalarMap[int, str]
    def __init__(self, stacks: _Optional[_Mapping[int, str]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: str
    def __init__(self, detail: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: bytes
    def __init__(self, snapshot: _Optional[bytes] = ...) -> None: ...
