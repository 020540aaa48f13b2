"""The life of an object: the sequence of its states, reduced to what is the same in every run.

In: rows of (resource, event type, object) in order. Out: for each object the sequence of its
states, without names, times, repetitions, and numbers that depend on timing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from doubles.cluster.objects import Object, dig

Row = tuple[str, str, Object]
INDEX = "batch.kubernetes.io/job-completion-index"
NEW_SHAPE, OLD_SHAPE = "eventTime", "count"
PASSING = ("Pulling", "Pulled")
"""Reasons of events that depend on the images that a node already has."""


def lives(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the states of each object in order, by a name that is the same in every run."""
    by_name: dict[str, list[str]] = {}
    uids: dict[str, dict[str, str]] = {}
    for plural, kind, obj in rows:
        if plural == "events":
            if kind != "DELETED" and not _is_passing(obj):
                name, state = _event(obj)
                if state not in by_name.setdefault(name, []):
                    by_name[name].append(state)
            continue
        if plural not in STATES:
            continue
        name = _name(plural, obj, uids)
        state = kind if kind == "DELETED" else STATES[plural](obj)
        states = by_name.setdefault(name, [])
        if not states or states[-1] != state:
            states.append(state)
    for name in [n for n in by_name if n.startswith("events")]:
        by_name[name].sort()
    return by_name


def _name(plural: str, obj: Object, uids: dict[str, dict[str, str]]) -> str:
    meta = obj["metadata"]
    own = meta["name"]
    if plural == "pods":
        own = meta.get("generateName", meta["name"]).removesuffix("-")
    numbers = uids.setdefault(f"{plural} {own}", {})
    number = numbers.setdefault(meta["uid"], str(len(numbers)))
    return f"{plural} {own} #{number}"


def _conditions(obj: Object, *, only: tuple[str, ...] = ()) -> str:
    return " ".join(
        f"{c['type']}={c['status']}" + (f"/{c['reason']}" if c.get("reason") else "")
        for c in sorted(
            dig(obj, "status", "conditions", default=[]), key=lambda c: c["type"] if only else ""
        )
        if not only or c["type"] in only
    )


def _leaving(obj: Object) -> str:
    return "leaving" if "deletionTimestamp" in obj["metadata"] else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _job(obj: Object) -> str:
    status = obj.get("status") or {}
    noted = dig(status, "uncountedTerminatedPods", default={})
    return _joined(
        "suspended" if obj["spec"].get("suspend") else "",
        "started" if status.get("startTime") else "",
        "uncounted " + ",".join(sorted(noted)) if noted else "",
        f"failed {status['failed']}" if status.get("failed") else "",
        "done" if status.get("completionTime") else "",
        _conditions(obj),
        _leaving(obj),
    )


def _job_set(obj: Object) -> str:
    status = obj.get("status") or {}
    rows = [
        row["name"] + ":" + ",".join(f"{k}={row[k]}" for k in ("failed", "succeeded") if row[k])
        for row in sorted(status.get("replicatedJobsStatus") or (), key=lambda r: r["name"])
    ]
    return _joined(
        "suspended" if obj["spec"].get("suspend") else "",
        *rows,
        f"restarts {status['restarts']}" if status.get("restarts") else "",
        f"counted {status['restartsCountTowardsMax']}"
        if status.get("restartsCountTowardsMax")
        else "",
        _conditions(obj),
        status.get("terminalState", ""),
        _leaving(obj),
    )


def _pod(obj: Object) -> str:
    status, meta = obj["status"], obj["metadata"]
    held = dig(status, "containerStatuses", 0, "state", default={})
    container = ""
    for kind, what in held.items():
        code = f" {what['exitCode']}" if "exitCode" in what else ""
        container = _joined(kind, what.get("reason", "")) + code
    grace = meta.get("deletionGracePeriodSeconds")
    return _joined(
        status.get("phase", ""),
        "assigned" if obj["spec"].get("nodeName") else "",
        container,
        _conditions(obj, only=("DisruptionTarget", "PodScheduled", "Ready")),
        _leaving(obj),
        "at once" if grace == 0 else "",
    )


STATES: dict[str, Any] = {"jobs": _job, "jobsets": _job_set, "pods": _pod}


def _is_passing(obj: Object) -> bool:
    return obj["reason"] in PASSING or "follower pod node selector" in obj["message"]


def _event(obj: Object) -> tuple[str, str]:
    shape = NEW_SHAPE if obj.get("eventTime") else OLD_SHAPE
    message = re.sub(r"_ml\([-0-9a-f]{36}\)", "", obj["message"])
    message = re.sub(r"(?<=-)[bcdfghjklmnpqrstvwxz2456789]{5}\b", "*", message)
    message = re.sub(r" to gke-\S+$", " to *", message)
    message = re.sub(r"\bml/", "", message)
    about = obj["involvedObject"]["kind"]
    return f"events {about}", f"{obj['type']} {obj['reason']} {shape}: {message}"


def difference(actual: dict[str, list[str]], wanted: dict[str, list[str]]) -> str:
    """Describe the differences between two sets of lives; "" if there are none."""
    lines: list[str] = []
    for name in sorted(actual.keys() | wanted.keys()):
        changes = difflib.ndiff(wanted.get(name, []), actual.get(name, []))
        if actual.get(name) != wanted.get(name):
            lines += [name, *(f"  {line}" for line in changes if not line.startswith("?"))]
    return "\n".join(lines)
