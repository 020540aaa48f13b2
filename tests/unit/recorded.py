"""Recordings of a real Kubernetes control plane: see tests/recordings/README.md."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).resolve().parents[1] / "recordings" / "recordings.tar.xz"
WORKLOADS = ("jobs", "jobsets")
Document = dict[str, Any]


def by_name(*events: Document) -> Callable[[str], list[Document]]:
    """Return a function that lists the events about the object with a given name."""
    return lambda name: [e for e in events if (e.get("involvedObject") or {}).get("name") == name]


@dataclass(frozen=True)
class Row:
    """One event of a watch.

    Attributes:
        t: seconds since the workload was created.
        watch: the watched kind: jobs, jobsets, pods, events, nodes, quotas, workloads, services.
        kind: ADDED, MODIFIED, DELETED.
        object: the object as the server sent it.
    """

    t: float
    watch: str
    kind: str
    object: Document


@dataclass
class World:
    """The objects that exist after some watch events, by watch and uid."""

    t: float = 0.0
    objects: dict[str, dict[str, Document]] = field(default_factory=dict)

    def apply(self, row: Row) -> None:
        known = self.objects.setdefault(row.watch, {})
        uid = row.object["metadata"]["uid"]
        self.t = row.t
        if row.kind == "DELETED":
            known.pop(uid, None)
        else:
            known[uid] = row.object

    def all(self, watch: str) -> list[Document]:
        return list(self.objects.get(watch, {}).values())


@cache
def _files() -> dict[str, str]:
    with tarfile.open(ARCHIVE) as archive:
        return {
            member.name: content.read().decode()
            for member in archive.getmembers()
            if (content := archive.extractfile(member)) is not None
        }


@cache
def scenarios() -> tuple[str, ...]:
    """Return the names of the recordings that contain watch events."""
    return tuple(sorted(n.split("/")[0] for n in _files() if n.endswith("/events.jsonl")))


def document(scenario: str, file: str) -> Any:
    return json.loads(_files()[f"{scenario}/{file}"])


def exchanges(scenario: str) -> list[Document]:
    return [json.loads(line) for line in _files()[f"{scenario}/exchanges.jsonl"].splitlines()]


def exchange(scenario: str, what: str) -> Document:
    """Return the first recorded request whose description begins with `what`."""
    return next(e for e in exchanges(scenario) if e["what"].startswith(what))


@cache
def rows(scenario: str) -> tuple[Row, ...]:
    return tuple(_rows(scenario))


def _rows(scenario: str) -> Iterator[Row]:
    last: dict[str, Document] = {}
    for line in _files()[f"{scenario}/events.jsonl"].splitlines():
        row = json.loads(line)
        if "patch" in row:
            row["object"] = _merged(last[row["uid"]], row["patch"])
        if "object" not in row:
            continue  # not a watch event: a request, a step of the scenario, or a gap
        last[row["object"]["metadata"]["uid"]] = row["object"]
        yield Row(row["t"], row["watch"], row["type"], row["object"])


def _merged(old: Document, patch: Document) -> Document:
    new = dict(old)
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict) and "[]" in value:
            changed = value["[]"]
            new[key] = [
                _merged(item, changed[str(n)]) if str(n) in changed else item
                for n, item in enumerate(old[key])
            ]
        elif isinstance(value, dict) and isinstance(new.get(key), dict):
            new[key] = _merged(new[key], value)
        else:
            new[key] = value
    return new


def worlds(scenario: str) -> Iterator[tuple[Row, World]]:
    """Yield each watch event with the objects that exist after it, in one `World` that changes."""
    world = World()
    for row in rows(scenario):
        world.apply(row)
        yield row, world


def world_at(scenario: str, t: float) -> World:
    """Return the objects that existed `t` seconds after the workload was created."""
    world = World()
    for row in rows(scenario):
        if row.t > t:
            break
        world.apply(row)
    return world
