"""A command line over a real local store and a fake backend that a test controls.

In: a folder. Out: a `World`, which a test calls with the words after `kinetic`. Used by the tests
of the commands.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic._backends.base import Document, LogRequest, Status
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.log_format import STDOUT, LogChunk, Position
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._pickling import results
from kinetic._source import packs
from kinetic._store.local import LocalStore
from kinetic.cli.context import AppContext
from kinetic.cli.root import call
from kinetic.errors import StoreError

NOW = 1_700_000_000.0
DAY = 86400.0

ROOT = Path(kinetic.__file__).parent.parent
Capture = pytest.CaptureFixture[str]


def chunk(data: bytes, host: int = 0, stream: int = STDOUT) -> LogChunk:
    return LogChunk(host, stream, 10**18, data)


@dataclass
class FakeBackend:
    """A backend that runs nothing: a test sets the phases and the output of jobs."""

    name: str = "fake"
    phases: dict[str, JobStatus] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)
    output: dict[str, list[LogChunk | None]] = field(default_factory=dict)
    requests: list[LogRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cleaned: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    at_end: Callable[[], None] = lambda: None

    def preflight(self, plan: Any) -> None: ...

    def render(self, plan: Any) -> list[Document]:
        return []

    def submit(
        self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]
    ) -> None: ...

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        self.asked.append([ref.job_id for ref in refs])
        return {
            ref.job_id: Status(
                self.phases.get(ref.job_id, JobStatus.RUNNING), self.reasons.get(ref.job_id, "")
            )
            for ref in refs
        }

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        self.requests.append(request)
        at = dict.fromkeys(range(ref.hosts), 0)
        for chunk in self.output.get(ref.job_id, []):
            if chunk is None:
                yield None
            elif request.hosts is None or chunk.host in request.hosts:
                at[chunk.host] += len(chunk.data)
                end = Position(1, at[chunk.host])
                if end > request.after.get(chunk.host, Position()):
                    yield replace(chunk, end=end)
        self.at_end()

    def cancel(self, ref: JobRef) -> None:
        self.cancelled.append(ref.job_id)

    def cleanup(self, ref: JobRef) -> None:
        if ref.job_id in self.broken:
            raise StoreError(f"{ref.job_id} cannot be reached. Try again later.")
        self.cleaned.append(ref.job_id)


class World:
    """A store with jobs in it, and a command line that works on it."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self.backend = FakeBackend()
        self.submitted: list[tuple[Callable[[], None], Mapping[str, Any]]] = []
        self.app = AppContext(
            self.store, lambda ref: self.backend, self._handle, lambda: NOW, self._submit
        )

    def _handle(self, ref: JobRef) -> JobHandle[Any]:
        return JobHandle(ref, self.backend, self.store)

    def _submit(self, function: Callable[[], None], options: Mapping[str, Any]) -> JobHandle[Any]:
        self.submitted.append((function, options))
        return self._handle(self.job("job-00000001", hosts=2))

    def job(self, job_id: str, *, name: str = "train", age: float = 60.0, hosts: int = 1) -> JobRef:
        ref = JobRef(
            job_id=job_id,
            place=Place("fake"),
            accelerator="tpu-v6e-8",
            func_name=name,
            display_name=name,
            created_at=NOW - age,
            store_uri=self.store.uri,
            hosts=hosts,
        )
        self.store.put(layout.JobKeys(job_id).ref, json.dumps(ref.to_json()).encode())
        return ref

    def plan(self, job_id: str, payload_digest: str, manifest: str | None = None) -> None:
        tree = (
            None
            if manifest is None
            else {"manifest": {"digest": manifest, "size_bytes": 1}, "files": 1, "size_bytes": 1}
        )
        plan = {
            "schema_version": 1,
            "payload": {"digest": payload_digest, "size_bytes": 1},
            "tree": tree,
        }
        self.store.put(layout.JobKeys(job_id).plan, json.dumps(plan).encode())

    def blob(self, digit: str, data: bytes = b"x", *, age: float = 10 * DAY) -> str:
        digest = digit * 64
        self.store.put(layout.blob(digest), data)
        os.utime(self.store.path(layout.blob(digest)), (NOW - age, NOW - age))
        return digest

    def tree(self, digit: str, *blobs: str, age: float = 10 * DAY) -> str:
        """Store the record of a source tree that is `age` seconds old; return its digest."""
        key = layout.tree(digit * 64)
        self.store.put(key, packs.TreeRecord((), blobs, "0" * 64).to_json())
        os.utime(self.store.path(key), (NOW - age, NOW - age))
        return digit * 64

    def end(self, job_id: str, outcome: Outcome) -> None:
        self.store.put(layout.JobKeys(job_id).outcome, json.dumps(outcome.to_json()).encode())

    def succeed(self, job_id: str, value: Any = None, *, ended: float = NOW) -> None:
        data = results.pack_value(value)
        self.store.put(layout.HostKeys(job_id, 1, 0).result, data)
        digest = hashlib.sha256(data).hexdigest()
        reports = (HostReport(0, Exit.RETURNED),)
        self.end(
            job_id,
            Outcome(
                Verdict.SUCCEEDED,
                reports=reports,
                result_digest=digest,
                result_size_bytes=len(data),
                ended_at=ended,
            ),
        )

    def fail(self, job_id: str, report: HostReport | None = None, *, ended: float = NOW) -> None:
        report = report or HostReport(
            1, Exit.OS_EXIT, exit_code=9, detail="The worker ended with code 9."
        )
        reports = (*tuple(HostReport(i, Exit.STOPPED) for i in range(report.host)), report)
        self.end(
            job_id,
            Outcome(
                Verdict.FAILED,
                blamed=(report.host,),
                reason="host 1 ended",
                reports=reports,
                ended_at=ended,
            ),
        )

    def __call__(self, *argv: str) -> int:
        return call(argv, self.app)


def run(world: World, *argv: str) -> int:
    """Call `kinetic run` for a slice of two hosts; return the exit code."""
    return world("run", "-a", "tpu-v6e-8", *argv)
