"""Events of a gang, and their lines in events.jsonl. Pure.

`gang.picture` folds the events into the state of the gang.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, NamedTuple

from kinetic._core.exits import Exit
from kinetic._core.outcome import Verdict


class EventKind(StrEnum):
    """The kind of an event."""

    BEGUN = "begun"
    """The only host of an attempt starts its function before it joins."""
    JOINED = "joined"
    READY = "ready"
    FAILURE = "failure"
    """A host failed while the gang was running; `exit` says how."""
    STOP = "stop"
    STALLED = "stalled"
    """`hosts` made no progress or waited for others for too long; their stacks are requested."""
    RESUMED = "resumed"
    """Hosts that were stalled make progress again."""
    WAITING = "waiting"
    """Hosts may be waiting for others that have returned, stand still or do not answer."""
    PROGRAMS = "programs"
    """`hosts` run another program than the others; `detail` says which."""
    STACKS = "stacks"
    REPORT = "report"
    """A host has ended; `exit` says how."""
    LOST = "lost"
    FINISHED = "finished"
    ENDED = "ended"
    """The attempt was judged: `verdict`, and in `hosts` the hosts to blame."""
    RETRY = "retry"
    """The next attempt begins."""
    FORMED = "formed"
    """An attempt of an elastic job begins on `slices`; `hosts` are indices in the whole job."""
    SLICE_LOST = "slice_lost"
    """`slices` of an elastic job are lost; () when an attempt failed although all hosts live."""
    AWAITED = "awaited"
    """The next attempt waits for `slices`."""
    SLICE_BACK = "slice_back"
    """All hosts of `slices` are ready again."""
    RECOVERED = "recovered"
    """The function runs again."""


class GangEvent(NamedTuple):
    """An event of a gang or of one of its hosts.

    Attributes:
        kind: the kind of event.
        host: index of the host concerned; None for the gang.
        detail: text for users; never parsed.
        exit: how the host ended.
        hosts: indices of the hosts concerned, if there are several.
        slices: indices of the slices concerned.
        verdict: the verdict on the attempt.
        attempt: the attempt in which the event happened, from 1.
        time: seconds since the epoch; 0.0 until the event is written.
        ago_s: seconds between the event and its writing; not stored.
    """

    kind: EventKind
    host: int | None = None
    detail: str = ""
    exit: Exit | None = None
    hosts: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    verdict: Verdict | None = None
    attempt: int = 1
    time: float = 0.0
    ago_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without empty fields; `from_json` restores an equal event."""
        always: dict[str, Any] = {
            "time": self.time,
            "attempt": self.attempt,
            "kind": str(self.kind),
            "host": self.host,
            "detail": self.detail,
        }
        optional = {
            "exit": str(self.exit or ""),
            "hosts": list(self.hosts),
            "slices": list(self.slices),
            "verdict": str(self.verdict or ""),
        }
        return always | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_json(cls, data: Any) -> GangEvent | None:
        """Rebuild an event from `to_json`; None if this version does not know its kind."""
        try:
            exit, verdict, host = data.get("exit"), data.get("verdict"), data.get("host")
            return cls(
                EventKind(data["kind"]),
                host=None if host is None else int(host),
                detail=str(data.get("detail") or ""),
                exit=Exit(exit) if exit else None,
                hosts=tuple(map(int, data.get("hosts") or ())),
                slices=tuple(map(int, data.get("slices") or ())),
                verdict=Verdict(verdict) if verdict else None,
                attempt=int(data.get("attempt", 1)),
                time=float(data.get("time", 0.0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return None


def parse(lines: bytes) -> list[GangEvent]:
    """Parse the lines of events.jsonl, skipping damaged lines and kinds of newer versions."""
    events = []
    for line in lines.splitlines():
        try:
            event = GangEvent.from_json(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if event is not None:
            events.append(event)
    return events
