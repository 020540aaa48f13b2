"""Clients of a job's coordinator. Calls block, and are repeated until an answer or a time limit.

Importing this module creates no channel, loop or thread, so that the importer may fork. A client
must be created after the last fork.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from kinetic._core.endpoint import Endpoint
from kinetic._core.gang.messages import Heartbeat, HostAssignment, HostView
from kinetic._core.gang.programs import ProgramNote
from kinetic._core.outcome import HostReport
from kinetic._rpc import codec
from kinetic.errors import CoordinatorLost, CorruptRecord, UsageError

logger = logging.getLogger("kinetic.coordinator")

_CALL_S = 5.0
_BEAT_S = 2.0
_WATCH_S = 300.0
"""Seconds after which a stream is renewed, in case it has died unnoticed."""
_ASSIGNMENT_S = 20.0
"""Seconds until a call for an assignment fails: more than `waiting_room.PATIENCE_S`."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_CLOSE_S = 2.0
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # by a busy server: this client cancels calls only in `close`
    }
)


class _AnswerPatience:
    """A time limit on silence of the coordinator. If this process itself was paused, only `most_s`
    of the pause count."""

    def __init__(self, limit_s: float, most_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._most_s, self._clock = limit_s, most_s, clock
        self.renew()

    def renew(self) -> None:
        """Restart the limit after an answer."""
        self._left_s, self._counted_at = self._limit_s, self._clock()

    def is_over(self) -> bool:
        """Count the time since the last call, and return True if the limit is reached."""
        now = self._clock()
        self._left_s -= min(now - self._counted_at, self._most_s)
        self._counted_at = now
        return self._left_s <= 0


class _Caller:
    """Makes calls over one channel: metadata, retries, errors. Closes only a channel of its own."""

    def __init__(
        self, endpoint: Endpoint, give_up_s: float, clock: Callable[[], float], channel: Any = None
    ) -> None:
        self.target = endpoint.target
        self.give_up_s = give_up_s
        self.clock = clock
        self.closed = threading.Event()
        self._metadata = codec.metadata_of(endpoint)
        self._is_own = channel is None
        self._channel = open_channel(endpoint) if channel is None else channel
        self._calls: dict[str, Any] = {}
        self._stream: Any = None

    def try_call(self, method: codec.Method, request: Any, timeout_s: float) -> Any:
        """Call once; return the reply, or an iterator of replies.

        Raises:
            grpc.RpcError: the coordinator did not answer, or refused the call.
            CoordinatorLost: the answer is damaged, or of another version.
        """
        reply = self._stub(method)(request, timeout=timeout_s, metadata=self._metadata)
        if not method.streams:
            return self._read(method)(reply)
        self._stream = reply
        if self.closed.is_set():  # `close` may not have seen this stream.
            reply.cancel()
        return map(self._read(method), reply)

    def _read(self, method: codec.Method) -> Callable[[bytes], Any]:
        # Not in gRPC's deserializer, where the result None would count as a failure.
        def read(data: bytes) -> Any:
            try:
                return codec.read(data, method.reply)
            except CorruptRecord as error:
                raise CoordinatorLost(f"The leader's answer is unusable. {error}") from error

        return read

    def call(
        self,
        method: codec.Method,
        request: Any,
        timeout_s: float = _CALL_S,
        give_up_s: float | None = None,
    ) -> Any:
        """Call until the coordinator answers; raise CoordinatorLost after `give_up_s` seconds."""
        limit_s = self.give_up_s if give_up_s is None else give_up_s
        patience = _AnswerPatience(limit_s, timeout_s + _LONGEST_PAUSE_S, self.clock)
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self.try_call(method, request, timeout_s)
            except grpc.RpcError as error:
                if error.code() not in _TRANSIENT:
                    raise self.translate(method, error) from error
                if patience.is_over() or self.closed.wait(pause_s):
                    raise self.explain_loss(error) from error
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def explain_loss(self, error: grpc.RpcError) -> CoordinatorLost:
        """Return the error for a coordinator that does not answer."""
        return CoordinatorLost(
            f"The leader of the hosts, at {self.target}, has not answered for {self.give_up_s:g} s "
            f'("{error.details()}"). Its process has ended, or cannot be reached.'
        )

    def translate(self, method: codec.Method, error: grpc.RpcError) -> Exception:
        """Return the error for a call that the coordinator refused."""
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(error.details() or f"The leader refused {method.name}.")
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return CoordinatorLost(
                f"This host stops, because the leader at {self.target} refused it: "
                f"{error.details()}"
            )
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return CoordinatorLost(
                f"The leader at {self.target} refused the token of this host: it belongs to "
                "another job."
            )
        return CoordinatorLost(
            f"The leader at {self.target} failed to answer {method.name} "
            f"({error.code().name}): {error.details()}."
        )

    def close(self) -> None:
        """Abandon calls in progress."""
        self.closed.set()
        if self._stream is not None:
            self._stream.cancel()
        if self._is_own:
            self._channel.close()

    def _stub(self, method: codec.Method) -> Any:
        if method.name not in self._calls:
            make: Any = self._channel.unary_stream if method.streams else self._channel.unary_unary
            self._calls[method.name] = make(method.path, codec.write)
        return self._calls[method.name]


def open_channel(endpoint: Endpoint) -> Any:
    """Open a channel, which several clients may use one after the other; over TCP always with TLS,
    trusting only the job's certificate."""
    if endpoint.is_unix:
        return grpc.insecure_channel(endpoint.target, options=codec.CHANNEL_OPTIONS)
    if not endpoint.certificate:
        raise UsageError(
            f"This process cannot call the leader at {endpoint.target}, because it lacks the "
            f"certificate of {endpoint.job_id}. Only hosts that kinetic starts have it: submit the "
            "job again instead of starting a host by hand."
        )
    trust = grpc.ssl_channel_credentials(root_certificates=endpoint.certificate.encode())
    # The certificate names the job, not the machine.
    name = ("grpc.ssl_target_name_override", endpoint.tls_name)
    return grpc.secure_channel(
        endpoint.target, trust, options=(*codec.CHANNEL_OPTIONS, *codec.KEEPALIVE, name)
    )


class AgentClient:
    """The agent's client. Thread-safe. A thread of its own calls the functions given to `watch`."""

    def __init__(
        self,
        endpoint: Endpoint,
        host: int,
        *,
        unreachable_after_s: float = 30.0,
        join_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        channel: Any = None,
    ) -> None:
        self._caller = _Caller(endpoint, unreachable_after_s, clock, channel)
        self._join_timeout_s = max(join_timeout_s, unreachable_after_s)
        self._host = host
        self._patience = _AnswerPatience(unreachable_after_s, _CALL_S + _LONGEST_PAUSE_S, clock)
        self._watcher: threading.Thread | None = None

    def join(self, incarnation: str, address: str, began: float = 0.0) -> HostView:
        """Join the gang.

        Args:
            incarnation: identifies this start of the agent.
            address: the host's address for other hosts.
            began: monotonic time at which the function began; 0.0 if it has not.

        Raises:
            CoordinatorLost: no answer for `join_timeout_s`, or the coordinator is another job's.
            UsageError: the gang has no host with this index.
        """
        request = codec.JoinRequest(self._host, incarnation, address, began)
        view: HostView = self._caller.call(codec.JOIN, request, give_up_s=self._join_timeout_s)
        self._patience.renew()
        return view

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Send one heartbeat, without retries because the next one replaces it. Return True if the
        heartbeat arrived.

        Raises:
            CoordinatorLost: no call has succeeded for `unreachable_after_s`.
        """
        try:
            self._caller.try_call(codec.HEARTBEAT, beat, _BEAT_S)
        except grpc.RpcError as error:
            if error.code() not in _TRANSIENT:
                raise self._caller.translate(codec.HEARTBEAT, error) from error
            if self._patience.is_over():
                raise self._caller.explain_loss(error) from error
            return False
        self._patience.renew()
        return True

    def report(self, report: HostReport) -> None:
        """Report how this host ended; raises like `join`."""
        self._call(codec.REPORT, report)

    def stacks(self, request: int, text: str) -> None:
        """Answer a request for stacks (`HostView.stacks_request`); raises like `join`."""
        self._call(codec.STACKS, codec.StacksAnswer(self._host, request, text))

    def programs(self, notes: tuple[ProgramNote, ...]) -> None:
        """Tell of programs that this host runs; raises like `join`."""
        self._call(codec.PROGRAMS, codec.ProgramNotes(self._host, notes))

    def watch(
        self, on_view: Callable[[HostView], None], on_fault: Callable[[Exception], None]
    ) -> None:
        """Call `on_view` with every new view, starting with the current one, until `close` or the
        end of the gang. Call `on_fault` with an error that ends the watch earlier."""
        watcher = threading.Thread(
            target=self._watch, args=(on_view, on_fault), name="kinetic-watch", daemon=True
        )
        watcher.start()
        self._watcher = watcher

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._caller.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_CLOSE_S)

    def _call(self, method: codec.Method, request: Any) -> Any:
        reply = self._caller.call(method, request)
        self._patience.renew()
        return reply

    def _watch(
        self, on_view: Callable[[HostView], None], on_fault: Callable[[Exception], None]
    ) -> None:
        try:
            self._follow(on_view)
        except Exception as error:  # noqa: BLE001 - gRPC may fail to start a thread, for example
            if not self._caller.closed.is_set():
                on_fault(error)

    def _follow(self, on_view: Callable[[HostView], None]) -> None:
        last = HostView(version=-1)
        pause_s = _FIRST_PAUSE_S
        while not self._caller.closed.is_set():
            try:
                for view in self._caller.try_call(
                    codec.WATCH, codec.WatchRequest(self._host), _WATCH_S
                ):
                    pause_s = _FIRST_PAUSE_S
                    last = self._deliver(on_view, last, view)
                if last.stop or last.all_done:
                    return  # No view will change any more.
            except grpc.RpcError as error:
                if error.code() not in _TRANSIENT and not self._caller.closed.is_set():
                    logger.error("%s", self._caller.translate(codec.WATCH, error))
                    return  # The agent's next call raises the same error.
                is_renewal = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                has_broken = last.version >= 0 and pause_s == _FIRST_PAUSE_S and not is_renewal
                if has_broken and not self._caller.closed.is_set():
                    logger.warning(
                        "host %d has lost its connection to the leader and opens a new one: %s",
                        self._host,
                        error.details(),
                    )
            except ValueError:
                return  # `close` has closed the channel.
            self._caller.closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _deliver(
        self, on_view: Callable[[HostView], None], last: HostView, view: HostView
    ) -> HostView:
        if view != last:
            try:
                on_view(view)
            except Exception:  # The next view may say "stop".
                logger.exception("host %d could not act on %r", self._host, view)
        return view


class ControlClient:
    """Lets users call the coordinator of a running job. Its calls raise `CoordinatorLost` if the
    coordinator does not answer."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        give_up_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caller = _Caller(endpoint, give_up_s, clock)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dump_stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return the Python stacks of every running host that answers in time."""
        stacks: dict[int, str] = self._caller.call(
            codec.DUMP_STACKS, float(timeout_s), timeout_s + _CALL_S
        )
        return stacks

    def cancel(self, detail: str = "") -> None:
        """Stop the gang."""
        self._caller.call(codec.CANCEL, detail)

    def snapshot(self, timeout_s: float = _CALL_S) -> dict[str, Any]:
        """Return the gang's state, see `Gang.snapshot`."""
        snapshot: dict[str, Any] = self._caller.call(codec.SNAPSHOT, None, timeout_s)
        return snapshot

    def close(self) -> None:
        """Close the connection."""
        self._caller.close()


def request_assignment(
    endpoint: Endpoint,
    request: codec.PlaceRequest,
    *,
    unreachable_after_s: float,
    channel: Any = None,
) -> HostAssignment | None:
    """Wait for a host's assignment in the next attempt; None when no attempt follows.

    Args:
        endpoint: the coordinator.
        request: index and start of this host.
        unreachable_after_s: time limit without an answer, in seconds.
        channel: an open channel to the endpoint; None for a new one.

    Raises:
        CoordinatorLost: the coordinator has not answered within this limit.
    """
    caller = _Caller(endpoint, unreachable_after_s, time.monotonic, channel)
    try:
        while True:
            assignment: HostAssignment | None = caller.call(
                codec.PLACE, request, timeout_s=_ASSIGNMENT_S
            )
            if assignment is None or not assignment.is_postponed:
                return assignment
    finally:
        caller.close()
