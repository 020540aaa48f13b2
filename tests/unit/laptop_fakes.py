"""A backend in memory, and records of jobs as hosts would have left them.

In: a store. Out: jobs that have ended, or that a test holds in any phase. Used by the tests of
submissions, handles and followers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kinetic._backends.base import LogRequest, Status
from kinetic._client.planning import Planned
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.exits import Exit
from kinetic._core.log_format import STDOUT, LogChunk, Position
from kinetic._core.options import Options
from kinetic._core.outcome import HostReport, Outcome, RemoteError, judge
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan, Versions
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._pickling import call, results
from kinetic.errors import NotFound

HOSTS = 4
NOW = 1_000_000.0


def chunk(data: bytes, host: int = 0, stream: int = STDOUT) -> LogChunk:
    return LogChunk(host, stream, 0, data)


class FakeBackend:
    """A backend that records its calls. `logs` yields `output`, then calls `finish`, as if the job
    had ended."""

    name = "local"

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[str] = []
        self.phases: dict[str, JobStatus] = {}
        self.reasons: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.output: list[LogChunk | None] = []
        self.finish: Callable[[], None] = lambda: None
        self.refusal: Exception | None = None
        self.failure: BaseException | None = None
        self.secrets: dict[str, str] = {}
        self.requests: list[LogRequest] = []

    def preflight(self, plan: Plan) -> None:
        self.calls.append("preflight")
        if self.refusal is not None:
            raise self.refusal

    def render(self, plan: Plan) -> list[dict[str, Any]]:
        self.calls.append("render")
        return [{"kind": "Fake", "job_id": plan.job_id, "hosts": plan.hosts}]

    def submit(self, ref: JobRef, documents: list[dict[str, Any]], secrets: Any) -> None:
        self.calls.append("submit")
        assert self.store.has(layout.JobKeys(ref.job_id).ref), (
            "the reference is written before the job is created"
        )
        assert self.store.has(layout.JobKeys(ref.job_id).plan)
        if self.failure is not None:
            raise self.failure
        self.secrets = dict(secrets)
        self.phases[ref.job_id] = JobStatus.RUNNING

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        self.asked.append([ref.job_id for ref in refs])
        return {
            ref.job_id: Status(
                self.phases.get(ref.job_id, JobStatus.NOT_FOUND), self.reasons.get(ref.job_id, "")
            )
            for ref in refs
        }

    def logs(self, ref: JobRef, request: LogRequest) -> Any:
        self.requests.append(request)
        wanted = range(ref.hosts) if request.hosts is None else request.hosts
        at = dict.fromkeys(range(ref.hosts), 0)
        for given in self.output:
            if given is None:
                yield None
            elif given.host in wanted:
                at[given.host] += len(given.data)
                end = Position(1, at[given.host])
                if end > request.after.get(given.host, Position()):
                    yield dataclasses.replace(given, end=end)
        self.finish()

    def cancel(self, ref: JobRef) -> None:
        self.calls.append("cancel")

    def cleanup(self, ref: JobRef) -> None:
        self.calls.append("cleanup")


_FORKING = threading.Lock()
"""Held during a fork: filelock refuses a fork while another thread forks."""


class InlineBackend(FakeBackend):
    """A backend whose `submit` runs the call to its end and writes the records of a gang.

    The call runs in a fork, because unpickling a class by value in this process would overwrite the
    class under test.
    """

    def submit(self, ref: JobRef, documents: list[dict[str, Any]], secrets: Any) -> None:
        super().submit(ref, documents, secrets)
        with _FORKING:
            pid = os.fork()
            if pid == 0:
                try:
                    self._run(ref)
                finally:
                    os._exit(0)
        os.waitpid(pid, 0)

    def _run(self, ref: JobRef) -> None:
        plan = Plan.from_json(json.loads(self.store.get(layout.JobKeys(ref.job_id).plan)))
        function = (
            b"" if plan.function is None else self.store.get(layout.blob(plan.function.digest))
        )
        func, args, kwargs = call.unpack(self.store.get(layout.blob(plan.payload.digest)), function)
        try:
            value = func(*args, **kwargs)
            value = asyncio.run(value) if inspect.iscoroutine(value) else value
        except Exception as error:
            put_outcome(self.store, ref, raised(self.store, ref, 0, error))
        else:
            put_success(self.store, ref, value)


def planned(plan: Plan, payload: bytes, bundle: Any = None, **more: Any) -> Planned:
    """Return a `Planned` job: a plan with the payload and the bundle that its submission sends."""
    return Planned(plan, payload, bundle, settings=None, project=None, **({"secrets": {}} | more))


def ref(
    job_id: str = "job-00000001",
    *,
    hosts: int = HOSTS,
    store_uri: str = "",
    created_at: float = NOW,
) -> JobRef:
    return JobRef(
        job_id,
        Place("local", "pathways"),
        "tpu-v6e-16",
        "train",
        "train",
        created_at,
        store_uri,
        hosts=hosts,
    )


def plan(
    job_id: str = "job-00000001",
    accelerator: str = "tpu-v6e-16",
    options: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Plan:
    fixed = Plan(
        job_id,
        "train",
        Place("local", "pathways"),
        Options(resolve(accelerator), **options),
        Blob("0" * 64, 1),
        Versions("3.11", "3.0", "0"),
        NOW,
    )
    return dataclasses.replace(fixed, **changes)


def put_ref(store: Any, job: JobRef) -> JobRef:
    """Write an empty plan and then the job's reference, in the order of a real submission."""
    kept = dataclasses.replace(job, store_uri=store.uri)
    store.put(layout.JobKeys(kept.job_id).plan, b"{}")
    store.put(layout.JobKeys(kept.job_id).ref, json.dumps(kept.to_json()).encode())
    return kept


def put_outcome(store: Any, job: JobRef, *reports: HostReport, **more: Any) -> Outcome:
    """Store the outcome of a gang; hosts without a report count as returned."""
    told = {r.host: r for r in reports}
    every = [told.get(i, HostReport(i, Exit.RETURNED)) for i in range(job.hosts)]
    outcome = dataclasses.replace(judge(job.hosts, every, now=NOW, **more))
    store.put(layout.JobKeys(job.job_id).outcome, json.dumps(outcome.to_json()).encode())
    return outcome


def put_success(store: Any, job: JobRef, value: Any) -> Outcome:
    data = results.pack_value(value)
    store.put(layout.HostKeys(job.job_id, 1, 0).result, data)
    digest = hashlib.sha256(data).hexdigest()
    return put_outcome(
        store, job, HostReport(0, Exit.RETURNED, result_digest=digest, result_size_bytes=len(data))
    )


def raised(
    store: Any, job: JobRef, host: int, error: BaseException, attempt: int = 1, **more: Any
) -> HostReport:
    """Store the error that a host's function raised; return the host's report."""
    text = "".join(traceback.format_exception(error))
    key = layout.HostKeys(job.job_id, attempt, host).error
    store.put(key, results.pack_exception(error))
    told = RemoteError(type(error).__name__, str(error), text, key, **more)
    return HostReport(
        host, Exit.RAISED, detail=f"{type(error).__name__}: {error}", error=told, ended_at=NOW
    )


def put_report(store: Any, job: JobRef, report: HostReport, attempt: int = 1) -> None:
    key = layout.HostKeys(job.job_id, attempt, report.host).report
    store.put(key, json.dumps(report.to_json()).encode())


def put_attempt(store: Any, job: JobRef, number: int, *reports: HostReport) -> Outcome:
    """Store the outcome of an attempt that is followed by another attempt."""
    outcome = judge(job.hosts, reports, now=NOW, attempt=number)
    store.put(
        layout.AttemptKeys(job.job_id, number).outcome, json.dumps(outcome.to_json()).encode()
    )
    return outcome


def is_gone(store: Any, job: JobRef) -> bool:
    try:
        store.get(layout.JobKeys(job.job_id).ref)
    except NotFound:
        return list(store.list(layout.JobKeys(job.job_id).prefix)) == []
    return False
