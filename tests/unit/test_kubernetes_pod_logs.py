"""A pod's output, with streams that break everywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from kinetic._backends.kubernetes.answers import Call, Forbidden, error_of
from kinetic._backends.kubernetes.api import Api, LogOptions
from kinetic._backends.kubernetes.pod_logs import LogEnd, LogLine, LogMark, PodLog
from kinetic._backends.kubernetes.resources import PODS, Resource
from kinetic.errors import BackendUnavailable, NotFound

AWAY = BackendUnavailable("It does not answer.")
GONE = NotFound("There is none.")
WAITING = error_of(
    Call("get", PODS, "ml", "p"),
    400,
    json.dumps({"kind": "Status", "message": 'container "main" is waiting to start'}),
)
KUBELET = b"unable to retrieve container logs for containerd://abc"


def stamp(nanoseconds: int) -> str:
    second, fraction = divmod(nanoseconds, 10**9)
    return f"2026-11-21T01:{second // 60:02d}:{second % 60:02d}.{fraction:09d}Z"


def pod(state: str = "running", phase: str = "Running", node: str = "n0") -> dict[str, Any]:
    return {
        "metadata": {"name": "p"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main"}],
            **({"nodeName": node} if node else {}),
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "main", "state": {state: {"exitCode": 0}}}],
        },
    }


RUNNING, ENDED = pod(), pod("terminated")
STARTING, UNSCHEDULED = pod("waiting", "Pending"), pod("waiting", "Pending", node="")


class Stream:
    def __init__(self, data: bytes, *, pieces: int = 7, error: Exception | None = None) -> None:
        self.data, self.pieces, self.error = data, pieces, error

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), self.pieces):
            yield self.data[at : at + self.pieces]
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


class Cluster:
    """A pod with its output. Each look at it takes the next of its states; the last one stays."""

    def __init__(
        self,
        lines: list[tuple[int, bytes]],
        states: list[Any],
        breaks: list[tuple[int, bool]] = (),  # type: ignore[assignment]
        *,
        ends_with: bytes = b"\n",
        extra: bytes = b"",
    ) -> None:
        self.lines = lines
        self.states = states
        self.breaks = list(breaks)
        self.ends_with = ends_with
        self.extra = extra
        self.asked: list[LogOptions] = []

    def get(self, _resource: Resource, _name: str) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def log(self, _pod: str, options: LogOptions) -> Stream:
        self.asked.append(options)
        now = self.states[0]
        if now is UNSCHEDULED:
            return Stream(b"")  # 204
        if now is STARTING:
            raise WAITING
        if isinstance(now, Exception):
            raise now
        since = options.since
        sent = [
            f"{stamp(ns)} ".encode() + text
            for ns, text in self.lines
            if stamp(ns)[:19] >= since[:19]
        ]
        data = b"\n".join(sent) + (self.ends_with if sent else b"")
        if self.breaks:
            at, plainly = self.breaks.pop(0)
            return Stream(data[:at] + self.extra, error=None if plainly else AWAY)
        if len(self.states) > 1:
            self.states.pop(0)  # it ends when all was read
        return Stream(data)


def reader(cluster: Any, pauses: list[float] | None = None, **more: Any) -> PodLog:
    kept = [] if pauses is None else pauses

    def wait(seconds: float) -> bool:
        kept.append(seconds)
        return False

    api: Api = cluster
    return PodLog(api, "p", wait=wait, seed=random.Random(1), **more)


def read(log: PodLog) -> list[LogLine]:
    return [line for line in log if line is not None]


LINES = [(1, b"one"), (2, b""), (2, b"two"), (2, b"two"), (1_500_000_000, b"three")]


def texts(lines: list[LogLine]) -> list[bytes]:
    return [line.text for line in lines]


def test_all_lines_then_the_end() -> None:
    log = reader(Cluster(LINES, [RUNNING, ENDED]))
    found = read(log)
    assert [(line.time, line.text) for line in found] == [(stamp(t), x) for t, x in LINES]
    assert log.end is LogEnd.EXITED
    assert log.mark == LogMark(stamp(1_500_000_000), 1)


@given(
    st.lists(st.tuples(st.integers(0, 4 * 10**9), st.binary(max_size=6)), max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=8),
    st.sampled_from([b"\n", b""]),
    st.sampled_from([b"", KUBELET]),
)
def test_nothing_is_lost_and_nothing_comes_twice_wherever_it_breaks(
    raw: list[tuple[int, bytes]], breaks: list[tuple[int, bool]], ends_with: bytes, extra: bytes
) -> None:
    lines = sorted(((t, x.replace(b"\n", b"")) for t, x in raw), key=lambda line: line[0])
    if lines and ends_with == b"" and not lines[-1][1]:
        lines[-1] = (lines[-1][0], b"x")
    cluster = Cluster(lines, [RUNNING] * (len(breaks) + 2) + [ENDED], breaks, ends_with=ends_with)
    cluster.extra = extra
    log = reader(cluster)
    found = read(log)
    assert [(line.time, line.text) for line in found] == [(stamp(t), x) for t, x in lines]
    assert [line.complete for line in found[:-1]] == [True] * (len(found) - 1 if found else 0)
    assert log.end is LogEnd.EXITED


@given(st.integers(0, len(LINES)))
def test_another_reader_goes_on_from_a_mark(after: int) -> None:
    first = reader(Cluster(LINES, [RUNNING, ENDED]))
    got = []
    for line in first:
        if len(got) == after:
            break
        if line is not None:
            got.append(line)
    mark = LogMark()
    for line in got:
        same = line.time == mark.time
        mark = LogMark(line.time, mark.lines + 1 if same else 1)
    then = read(reader(Cluster(LINES, [RUNNING, ENDED]), after=mark))
    assert texts(got + then) == [text for _, text in LINES]


def test_lines_a_little_out_of_order_are_not_taken_for_repeated() -> None:
    mixed = [
        (2_000_000_500, b"a"),
        (2_000_000_100, b"b"),
        (2_000_000_900, b"c"),
        (1_900_000_000, b"d"),
    ]
    for at in range(0, 140, 3):
        cluster = Cluster(mixed, [RUNNING, RUNNING, RUNNING, ENDED], [(at, False), (at + 20, True)])
        assert texts(read(reader(cluster))) == [b"a", b"b", b"c", b"d"]


def test_a_pod_that_starts_is_waited_for() -> None:
    pauses: list[float] = []
    states = [UNSCHEDULED, UNSCHEDULED, STARTING, STARTING, RUNNING, ENDED]
    log = reader(Cluster(LINES, states), pauses)
    seen = list(log)
    assert None in seen
    assert len([line for line in seen if line]) == len(LINES)
    assert pauses == sorted(pauses)


def test_a_container_that_never_started_has_no_output() -> None:
    log = reader(Cluster([], [STARTING, pod("waiting", "Failed")]))
    assert read(log) == []
    assert log.end is LogEnd.EXITED


def test_a_pod_that_is_gone_is_not_taken_for_success() -> None:
    log = reader(Cluster(LINES, [RUNNING, GONE]))
    assert len(read(log)) == len(LINES)
    assert log.end is LogEnd.GONE
    log = reader(Cluster(LINES, [GONE]))
    assert read(log) == []
    assert log.end is LogEnd.GONE


def test_a_dead_node_is_waited_for() -> None:
    """Its stream ends, and then its output cannot be read for minutes; the pod is still there."""
    pauses: list[float] = []
    states = [RUNNING, RUNNING, AWAY, AWAY, AWAY, RUNNING, GONE]
    log = reader(Cluster(LINES, states, [(30, True)]), pauses)
    assert len(read(log)) == len(LINES)
    assert log.end is LogEnd.GONE
    assert pauses


def test_without_following_it_reads_what_is_there() -> None:
    cluster = Cluster(LINES, [RUNNING])
    log = reader(cluster, follow=False)
    assert len(read(log)) == len(LINES)
    assert log.end is None
    with pytest.raises(BackendUnavailable):
        read(reader(Cluster(LINES, [RUNNING], [(0, False)]), follow=False))


def test_missing_rights_are_raised() -> None:
    with pytest.raises(Forbidden):
        read(reader(Cluster(LINES, [Forbidden("You may not get pods/log.")])))


def test_it_ends_when_told() -> None:
    log = reader(Cluster(LINES, [RUNNING]))
    seen = []
    for line in log:
        seen.append(line)
        log.close()
    assert log.end is LogEnd.CLOSED
    assert len(seen) <= len(LINES)


def test_recorded_lines_are_read() -> None:
    sent = recorded.exchange("18-logs", "timestamps=true: RFC 3339")["response"]["body"]

    class Recorded(Cluster):
        def log(self, _pod: str, options: LogOptions) -> Stream:
            return Stream(sent.encode())

    found = read(reader(Recorded([], [ENDED])))
    assert texts(found)[:3] == [b"step 0", b"step 1", b"a warning"]
    assert found[0].time == "2026-11-21T01:39:41.324677680Z"
