"""What happens to a gang: typed events, and the lines in which they are kept.

In: what happened, or lines of events.jsonl. Out: `GangEvent`s, JSON. Pure. What they come to says
`gang.picture`.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, NamedTuple

from kinetic._core.exits import Exit
from kinetic._core.outcome import Verdict


class EventKind(StrEnum):
    """What happened."""

    JOINED = "joined"
    READY = "ready"
    FAILURE = "failure"
    """A host failed while the gang was running; its `exit` says how."""
    STOP = "stop"
    STALLED = "stalled"
    """`hosts` stand still, or wait for others, for too long; their stacks are asked for."""
    RESUMED = "resumed"
    """Hosts that stood still have moved on."""
    WAITING = "waiting"
    """All hosts that run stand still, and others have returned."""
    STACKS = "stacks"
    REPORT = "report"
    """A host has ended; its `exit` says how."""
    LOST = "lost"
    FINISHED = "finished"
    ENDED = "ended"
    """The attempt was judged: `verdict`, and in `hosts` whom it blames."""
    RETRY = "retry"
    """Another attempt begins."""


class GangEvent(NamedTuple):
    """Something that happened.

    Attributes:
        kind: what.
        host: whom it concerns, None for the gang.
        detail: for people; nothing reads it.
        exit: how the host ended.
        hosts: several that it concerns.
        verdict: over the attempt.
        attempt: in which it happened, from 1.
        time: when, in seconds since the epoch; 0.0 until it is written.
    """

    kind: EventKind
    host: int | None = None
    detail: str = ""
    exit: Exit | None = None
    hosts: tuple[int, ...] = ()
    verdict: Verdict | None = None
    attempt: int = 1
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal value; what says nothing is
        left out."""
        known: dict[str, Any] = {
            "time": self.time,
            "attempt": self.attempt,
            "kind": str(self.kind),
            "host": self.host,
            "detail": self.detail,
        }
        more = {
            "exit": str(self.exit or ""),
            "hosts": list(self.hosts),
            "verdict": str(self.verdict or ""),
        }
        return known | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, data: Any) -> GangEvent | None:
        """Rebuild from `to_json`; None for what is no event that this version knows."""
        try:
            told_exit, told_verdict, host = data.get("exit"), data.get("verdict"), data.get("host")
            return cls(
                EventKind(data["kind"]),
                host=None if host is None else int(host),
                detail=str(data.get("detail") or ""),
                exit=Exit(told_exit) if told_exit else None,
                hosts=tuple(map(int, data.get("hosts") or ())),
                verdict=Verdict(told_verdict) if told_verdict else None,
                attempt=int(data.get("attempt", 1)),
                time=float(data.get("time", 0.0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return None


def parse(lines: bytes) -> list[GangEvent]:
    """Read the lines of events.jsonl; damaged ones, and kinds of newer versions, are left out."""
    found = []
    for line in lines.splitlines():
        try:
            event = GangEvent.from_json(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if event is not None:
            found.append(event)
    return found
