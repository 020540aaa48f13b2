"""The coordinator as a gRPC server: it tells the gang the time, and agents each change of the gang.

Importing this module creates no channel, loop or thread, so that the importer may fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from kinetic._core.endpoint import Endpoint
from kinetic._core.events import GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang
from kinetic._core.gang.messages import Heartbeat, HostAssignment
from kinetic._core.outcome import HostReport
from kinetic._rpc import codec
from kinetic._rpc.waiting_room import WaitingRoom
from kinetic._system import processes
from kinetic.errors import CorruptRecord, SubmitError, UsageError

logger = logging.getLogger("kinetic.coordinator")

_TICK_S = 0.1
_URGENT_TICK_S = 0.05
_STACKS_POLL_S = 0.02
_MAX_DUMP_S = 60.0
_STOP_GRACE_S = 1.0
_STOP_LIMIT_S = 3.0
"""Seconds to wait for gRPC to stop. It never stops if the system refuses threads."""
_MOST_PATH_BYTES = 107

Context = Any  # grpc.aio.ServicerContext; gRPC brings no types
Answer = Callable[[Any, Context], Awaitable[Any]]


class Coordinator:
    """The server of one gang, until the gang has finished.

    Promises:
        1. A change of the gang's state reaches every connected agent at once, not at the next tick.
        2. A broken connection does not end a host. The gang decides if a silent host is lost.
        3. Calls without the token, or from another job, attempt or restart of all hosts, are
           refused.
        4. Over TCP it uses only TLS.

    The coordinator listens at the endpoint's target. `key` is the private key of the endpoint's
    certificate. The gang's start time must come from the same clock.
    """

    def __init__(
        self,
        gang: Gang,
        endpoint: Endpoint,
        *,
        key: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[GangEvent], None] = lambda event: None,
        room: WaitingRoom | None = None,
    ) -> None:
        self._gang = gang
        self._room = room
        self._endpoint = endpoint
        self._key = key
        self._clock = clock
        self._on_event = on_event
        self._announced_version = gang.version
        self._changed = asyncio.Event()
        self._finished = asyncio.Event()
        self._closing = False
        self._watchers: Counter[int] = Counter()
        """Number of open streams by host: a host may open a new stream before the server sees the
        end of the previous one."""
        self._server: aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._views: tuple[int, dict[Exit | None, bytes]] = (0, {})

    # --- for the leader ---------------------------------------------------------------------------

    async def start(self) -> Endpoint:
        """Listen, and return the endpoint with the port that was bound.

        Raises:
            SubmitError: the target cannot be bound.
            UsageError: the target is TCP, and the endpoint has no certificate.
            BlockingIOError: the system allows no more threads.
        """
        endpoint = self._endpoint
        processes.check_threads()
        server = aio.server(options=codec.SERVER_OPTIONS)
        handlers = _AuthenticatedHandlers(
            self._methods(), endpoint, lambda: self._gang.spec.turn or self._gang.spec.attempt
        )
        server.add_generic_rpc_handlers((handlers,))
        port = _bind(server, endpoint, self._key)
        await server.start()
        if endpoint.is_unix:
            Path(endpoint.target.removeprefix("unix:")).chmod(0o600)
        self._server = server
        self._ticker = asyncio.create_task(self._tick())
        if endpoint.is_unix:
            return endpoint
        return replace(endpoint, target=f"{endpoint.target.rpartition(':')[0]}:{port}")

    def serve_next(self, gang: Gang) -> None:
        """Replace the gang by that of the next attempt, which may have fewer hosts."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._gang, self._announced_version = gang, gang.version
        self._views, self._finished = (0, {}), asyncio.Event()
        self._watchers = Counter()
        self._announce()  # End the streams of agents that watch the previous gang.
        self._ticker = asyncio.create_task(self._tick())

    def cancel(self, detail: str) -> None:
        """Stop the gang."""
        self._gang.cancel(detail, self._clock())
        self.sweep()

    def sweep(self) -> None:
        """Let the gang check its time limits; publish its events and announce its changes. Call
        this after every change of the gang."""
        for event in self._gang.sweep(self._clock()):
            self._publish(event)
        if self._gang.version != self._announced_version:
            self._announced_version = self._gang.version
            self._announce()
        if self._gang.finished:
            self._finished.set()

    async def dump_stacks(self, timeout_s: float) -> dict[int, str]:
        """Return the stacks of hosts that answer within this time."""
        number = self._gang.request_stacks(self._clock())
        self.sweep()
        due = self._clock() + min(max(timeout_s, 0.0), _MAX_DUMP_S)
        while self._gang.stacks_missing(number) and self._clock() < due and not self._closing:
            await asyncio.sleep(_STACKS_POLL_S)
        return self._gang.stacks_of(number)

    async def wait_finished(self) -> None:
        """Wait until every host has reported or is lost."""
        await self._finished.wait()

    async def stop(self) -> None:
        """Send the last view to the agents, and close. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._closing = True
        self._announce()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.stop(_STOP_GRACE_S), _STOP_LIMIT_S)

    # --- time -------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while not self._gang.finished:
            await asyncio.sleep(_URGENT_TICK_S if self._gang.urgent else _TICK_S)
            self.sweep()

    def _publish(self, event: GangEvent) -> None:
        # An error of the listener, such as a full disk, must not end the gang.
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the listener failed on %r", event)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- calls of agents --------------------------------------------------------------------------

    async def _join(self, request: codec.JoinRequest, context: Context) -> bytes:
        host, now = request.host, self._clock()
        ran_s = now - request.began if request.began else 0.0
        self._gang.join(host, request.incarnation, request.address, now, ran_s=ran_s)
        self.sweep()
        return self._view(host)

    async def _watch(self, request: codec.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        sent, gang = -1, self._gang
        self._count_watcher(request.host, context)
        while gang is self._gang:
            changed = self._changed  # Read before the check, so that no change is missed.
            if self._gang.version != sent:
                sent = self._gang.version
                yield self._view(request.host)
            elif self._gang.finished or self._closing:
                return
            else:
                await changed.wait()

    def _count_watcher(self, host: int, context: Context) -> None:
        """Count the open streams of a host; mark the host as disconnected when the last one ends.
        An agent keeps one stream open, and renews it from time to time."""
        gang, watchers = self._gang, self._watchers
        gang.mark_connected(host, self._clock())
        watchers[host] += 1

        def end_watch(_: Context) -> None:
            watchers[host] -= 1
            if not watchers[host] and gang is self._gang and not self._closing:
                gang.mark_disconnected(host, self._clock())

        context.add_done_callback(end_watch)

    async def _heartbeat(self, beat: Heartbeat, context: Context) -> int:
        self._gang.heartbeat(beat, self._clock())
        return self._gang.version

    async def _report(self, request: HostReport, context: Context) -> None:
        self._gang.report(request, self._clock())
        self.sweep()

    async def _stacks(self, request: codec.StacksAnswer, context: Context) -> None:
        self._gang.stacks(request.host, request.request, request.text, self._clock())

    async def _programs(self, request: codec.ProgramNotes, context: Context) -> None:
        self._gang.note_programs(request.host, request.notes, self._clock())

    async def _place(self, request: codec.PlaceRequest, context: Context) -> HostAssignment | None:
        if self._room is None:
            return None
        return await self._room.ask(request.index, request.start, request.world)

    def _view(self, host: int) -> bytes:
        # Encode each view once, not for each host: a view of 1,024 hosts has their addresses, 20
        # kB.
        view = self._gang.view(host)
        if self._views[0] != view.version:
            self._views = (view.version, {})
        written = self._views[1]
        if view.stop_exit not in written:
            written[view.stop_exit] = codec.write(view)
        return written[view.stop_exit]

    # --- calls of users ---------------------------------------------------------------------------

    async def _dump_stacks(self, timeout_s: float, context: Context) -> dict[int, str]:
        return await self.dump_stacks(timeout_s)

    async def _cancel(self, detail: str, context: Context) -> None:
        self.cancel(detail)

    async def _snapshot(self, _: None, context: Context) -> dict[str, Any]:
        return self._gang.snapshot()

    def _methods(self) -> dict[str, Any]:
        unary: list[tuple[codec.Method, Answer]] = [
            (codec.JOIN, self._join),
            (codec.HEARTBEAT, self._heartbeat),
            (codec.REPORT, self._report),
            (codec.STACKS, self._stacks),
            (codec.PROGRAMS, self._programs),
            (codec.PLACE, self._place),
            (codec.DUMP_STACKS, self._dump_stacks),
            (codec.CANCEL, self._cancel),
            (codec.SNAPSHOT, self._snapshot),
        ]
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            functools.partial(codec.read, kind=codec.WATCH.request),
            codec.write,
        )
        return {method.path: _make_handler(method, answer) for method, answer in unary} | {
            codec.WATCH.path: watch
        }


class _AuthenticatedHandlers:
    """Handlers for authenticated callers only. A caller must name the token, this job, this attempt
    and, if a cluster restarts all hosts, this number of restarts."""

    def __init__(
        self, methods: dict[str, Any], endpoint: Endpoint, attempt: Callable[[], int]
    ) -> None:
        self._methods = methods
        self._authorization = f"Bearer {endpoint.token}".encode()
        self._job_id = endpoint.job_id
        self._restarts = endpoint.restarts
        self._attempt = attempt

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of this call, or one that refuses it."""
        metadata = {k: v for k, v in handler_call_details.invocation_metadata if isinstance(v, str)}
        authorization = metadata.get(codec.AUTHORIZATION, "").encode("utf-8", "replace")
        if not hmac.compare_digest(authorization, self._authorization):
            return _make_refusal(grpc.StatusCode.UNAUTHENTICATED, "The token is not this job's.")
        if (job_id := metadata.get(codec.JOB, "")) != self._job_id:
            words = f"it leads {self._job_id}, but the host belongs to {job_id or 'no job'}."
            return _make_refusal(grpc.StatusCode.FAILED_PRECONDITION, words)
        return (
            self._refuse_other_start(metadata.get(codec.RESTARTS, ""))
            or self._refuse_other_attempt(metadata.get(codec.ATTEMPT, ""))
            or self._methods.get(handler_call_details.method)
        )

    def _refuse_other_start(self, restarts: str) -> Any:
        if self._restarts is None or restarts in ("", str(self._restarts)):
            return None
        words = (
            f"the leader belongs to restart {self._restarts}, but the host to restart {restarts}."
        )
        return _refuse_other(f"{self._job_id}: {words}", restarts, self._restarts)

    def _refuse_other_attempt(self, attempt: str) -> Any:
        current = self._attempt()
        if attempt in ("", str(current)):
            return None
        words = (
            f"{self._job_id} is at attempt {current}, but the host belongs to attempt {attempt}."
        )
        return _refuse_other(words, attempt, current)


def _refuse_other(words: str, theirs: str, own: int) -> Any:
    """Refuse a caller whose attempt or restart is `theirs` instead of this server's `own`. A caller
    with a higher number may retry, because a new leader will replace this one. A caller with a
    lower number must give up."""
    is_later = theirs.isdecimal() and int(theirs) > own
    code = grpc.StatusCode.UNAVAILABLE if is_later else grpc.StatusCode.FAILED_PRECONDITION
    return _make_refusal(code, words)


def _make_refusal(code: grpc.StatusCode, words: str) -> Any:
    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(code, words)

    # As a stream: of a unary call, gRPC would first receive the whole message.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _make_handler(method: codec.Method, answer: Answer) -> Any:
    async def safe(data: bytes, context: Context) -> Any:
        try:
            return await answer(codec.read(data, method.request), context)
        except (UsageError, CorruptRecord) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return grpc.unary_unary_rpc_method_handler(safe, response_serializer=codec.write)


def _bind(server: aio.Server, endpoint: Endpoint, key: str) -> int:
    target = endpoint.target
    if not endpoint.is_unix and not (endpoint.certificate and key):
        raise UsageError(
            f"The leader of {endpoint.job_id} cannot listen on {target} without a certificate "
            "and its key, because every TCP connection uses TLS."
        )
    try:
        if endpoint.is_unix:
            return int(server.add_insecure_port(target))
        pair = (key.encode(), endpoint.certificate.encode())
        return int(server.add_secure_port(target, grpc.ssl_server_credentials([pair])))
    except RuntimeError as error:
        why = (
            _explain_refusal(Path(target.removeprefix("unix:")))
            if endpoint.is_unix
            else ": the port is in use, or the address is not this machine's"
        )
        raise SubmitError(
            f"The leader of {endpoint.job_id} cannot listen on {target}{why}."
        ) from error


def _explain_refusal(path: Path) -> str:
    """Return why a Unix socket cannot be bound at a path: gRPC's error does not say why."""
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        return f": a Unix socket's path may have at most {_MOST_PATH_BYTES} bytes"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.fspath(path))
    except OSError as error:
        return f": {error.strerror or error}"
    path.unlink(missing_ok=True)
    return ""
