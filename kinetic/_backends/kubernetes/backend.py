"""The Kubernetes backend. A job of one host is a Job; one of several hosts or with a single
controller is a JobSet. The pod of host 0, or the head of an elastic job, leads the gang.

The store must be one that pods can reach. Output and verdicts are read from it, so they outlive the
pods.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kinetic._backends import attempt_logs, stored
from kinetic._backends.base import Connection, Document, LogRequest, Status
from kinetic._backends.kubernetes import (
    images,
    manifests,
    names,
    pathways,
    pod_failures,
    preflight,
    states,
)
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.diagnosis import diagnose
from kinetic._backends.kubernetes.errors import Conflict
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import Pod, Stage, current_pods
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._backends.kubernetes.resources import BY_KIND, PODS, SECRETS, Resource
from kinetic._backends.kubernetes.snapshot import (
    ClusterSnapshot,
    SnapshotReader,
    resource_of,
    share_reader,
)
from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.log_format import LogChunk
from kinetic._core.place import JOB, MULTI_TIER
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store import attempts, cancellation
from kinetic._store.base import Store, is_near
from kinetic._system.connection import SocketConnection
from kinetic.errors import BackendUnavailable, PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._backends.kubernetes.image_builds import BundledImages

PATIENT_TRIES = 5
"""Most tries to create a Secret. Each may take 15 s, because the connection retries, too."""
_GRACES_S: dict[int, int | None] = {signal.SIGKILL: 0, signal.SIGTERM: None}
"""Grace periods in seconds for deleting a pod, by the signal that the caller asked for: pods cannot
be signalled. None keeps the period in the pod's spec."""
_CLUSTER_CAUSES = frozenset(
    {
        JobCause.PREEMPTED,
        JobCause.EVICTED,
        JobCause.NODE_LOST,
        JobCause.OUT_OF_MEMORY,
        JobCause.START_ERROR,
    }
)
_END_CAUSES = _CLUSTER_CAUSES | {
    JobCause.HOST_FAILED,
    JobCause.BAD_COMMAND,
    JobCause.DEADLINE,
}


class _Judged(NamedTuple):
    """The status of a job; `is_verdict` is true if the status comes from the stored verdict."""

    status: Status
    is_verdict: bool = False


class KubernetesBackend:
    """Jobs in one namespace of a cluster. The promises are those of `backends.base.Backend`."""

    def __init__(
        self,
        name: str,
        store: Store,
        pods: PodSettings,
        open_api: Callable[[], Api],
        *,
        supply: Callable[[], BundledImages] | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._pods = pods
        self._open_api = open_api
        self._supply = supply
        self._opened: SnapshotReader | None = None
        self._has_answered = False
        self._seen_jobs: frozenset[str] = frozenset()
        self._loss_notes = _LossNotes()

    @property
    def _reader(self) -> SnapshotReader:
        if self._opened is None:
            self._opened = share_reader(self._open_api())
        return self._opened

    @property
    def _api(self) -> Api:
        return self._reader.api

    # -- submission --------------------------------------------------------------------------------

    def preflight(self, plan: Plan) -> None:
        """Refuse a plan that the cluster cannot run, after a few calls; nothing is sent."""
        from kinetic._rpc import certificate

        self._check_hosts(plan)
        api = self._api  # Without a cluster, raise that error, not one about the bucket.
        if is_near(self._store) and self._pods.store_uri == self._store.uri:
            raise PreflightError(
                f"The store {self._store.uri} is a folder, which the pods of a cluster cannot "
                "reach. Name a bucket (KINETIC_STORE=gs://BUCKET, or --store of `kinetic profile "
                "create`); or set KINETIC_POD_STORE to this folder's path in the pods."
            )
        if not certificate.is_available():
            raise PreflightError(certificate.MISSING)
        if plan.has_single_controller:
            pathways.check(self._pods)
        options, simulated = plan.options, self._pods.simulated
        needs = preflight.Needs(
            account=plan.place.service_account or self._pods.service_account or "",
            queue=plan.place.queue,
            multi_tier=options.local_storage == MULTI_TIER and not simulated,
            networks=bool(options.network_devices) and not simulated,
            buckets=bool(plan.cluster_mounts()),
        )
        preflight.check(api, self.render(plan), needs)

    def _check_hosts(self, plan: Plan) -> None:
        if self.name == JOB and plan.hosts > 1:
            raise PreflightError(
                f'backend="gke" runs jobs of one host, but {plan.topology.name} has '
                f'{plan.hosts} hosts. Remove backend=, or set backend="pathways".'
            )

    def render(self, plan: Plan) -> list[Document]:
        """Return the workload, the Secret without its values, and the workload's other objects."""
        self._check_hosts(plan)
        variables = images.variables(plan) if self._pods.bootstrap else {}
        image = self._pods.image or images.image_of(plan)
        pods = replace(self._pods, image=image, variables={**self._pods.variables, **variables})
        return manifests.render(plan, pods)

    def choose_image(
        self, plan: Plan, installed: Mapping[str, bytes], tell: Callable[[str], object]
    ) -> Plan:
        """Return the plan after building its bundled image, if it asks for one."""
        return plan if self._supply is None else self._supply().choose(plan, installed, tell)

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Create the workload, then the objects that it owns. The Secret is created last, so a
        workload without a Secret is a sign of an interrupted submission."""
        workload, secret, *others = documents
        resource = BY_KIND[workload["apiVersion"], workload["kind"]]
        created = self._api.create(resource, workload)
        self._has_answered = True
        try:
            for document in others:
                kind = BY_KIND[document["apiVersion"], document["kind"]]
                self._create_patiently(kind, manifests.add_owner(document, created))
            self._create_patiently(SECRETS, _with_values(secret, created, ref.job_id, secrets))
        except BackendUnavailable:  # The workload could not be deleted either.
            raise
        except BaseException:
            self._api.delete(resource, workload["metadata"]["name"])
            raise
        self._seen_jobs |= {ref.job_id}
        self._reader.note_created(ref, created)

    def _create_patiently(self, resource: Resource, document: Document) -> None:
        """Create an object without which an existing workload cannot start, with extra retries."""
        for tries in reversed(range(PATIENT_TRIES)):
            try:
                self._api.create(resource, document)
                return
            except BackendUnavailable:
                if not tries:
                    raise
            except Conflict:
                if tries == PATIENT_TRIES - 1:
                    raise
                return  # An earlier try created the object, and its answer was lost.

    # -- status ------------------------------------------------------------------------------------

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """Return the status of any number of jobs, from one list of workloads and one of pods.

        The lists may be some seconds old. A job that ended without a verdict is checked again.
        """
        if not refs:
            return {}
        snapshot = self._read(refs)
        statuses = {ref.job_id: self._judge(ref, snapshot) for ref in refs}
        for ref in () if snapshot.is_fresh else refs:
            is_pending = statuses[ref.job_id].status.phase is JobStatus.PENDING
            if is_pending and stored.is_running(self._store, ref):
                snapshot.context.waiting.discard(ref.job_id)  # The next list comes sooner.
        if not snapshot.is_fresh:
            unconfirmed = [
                ref
                for ref in refs
                if not (judged := statuses[ref.job_id]).is_verdict
                and (snapshot.workload(ref) is None or judged.status.phase.ended)
            ]
            if unconfirmed:
                snapshot = self._read(unconfirmed, fresh=True)
                statuses |= {ref.job_id: self._judge(ref, snapshot) for ref in unconfirmed}
        return {job_id: judged.status for job_id, judged in statuses.items()}

    def _read(self, refs: Sequence[JobRef], *, fresh: bool = False) -> ClusterSnapshot:
        """Read the jobs' objects. After the cluster has answered once, expired credentials count as
        a temporary failure: the job keeps running while the user logs in again."""
        try:
            snapshot = self._reader.read(refs, fresh=fresh)
        except PreflightError as error:
            if self._has_answered:
                raise BackendUnavailable(str(error)) from error
            raise
        self._has_answered = True
        for ref in refs:
            if (workload := snapshot.workload(ref)) is not None:
                self._seen_jobs |= {ref.job_id}
                self._loss_notes.note(ref.job_id, current_pods(workload, snapshot.pods_of(ref)))
        return snapshot

    def _judge(self, ref: JobRef, snapshot: ClusterSnapshot) -> _Judged:
        workload = snapshot.workload(ref)
        cluster = states.status_of(workload, snapshot.pods_of(ref))
        if cluster.phase is JobStatus.RUNNING:
            self._loss_notes.note_waiting(ref.job_id, None)
        if (verdict := stored.read_verdict(self._store, ref)) is not None:
            return _Judged(verdict, is_verdict=True)
        now = self._api.now()

        def explain(waits: bool) -> JobDiagnosis | None:
            return diagnose(snapshot.observe_job(ref, workload or {}, waits=waits), now)

        job = states.JobFacts(
            ref,
            workload,
            () if workload is None else current_pods(workload, snapshot.pods_of(ref)),
            cluster,
            now,
            explain=explain,
            has=self._store.has,
            has_begun=lambda: stored.has_begun(self._store, ref),
            goes_on=lambda: self._goes_on(ref),
            existed=lambda: ref.job_id in self._seen_jobs or self._was_removed(ref, snapshot),
            start_timeout_s=lambda: self._plan(ref).limits.start_timeout_s,
        )
        status, waits_for = states.judge(job)
        if waits_for is not None:
            self._loss_notes.note_waiting(ref.job_id, waits_for)
        return _Judged(status)

    def _goes_on(self, ref: JobRef) -> bool:
        """True if a job that lost its leader may get another attempt, or is about to begin one."""
        attempt = attempts.find_newest(self._store, ref.job_id)
        retries = self._plan(ref).options.retries
        may_follow = attempts.may_follow(self._store, ref.job_id, attempt, retries)
        return may_follow or not stored.has_begun(self._store, ref, attempt)

    def _plan(self, ref: JobRef) -> Plan:
        return Plan.read(self._store.get(layout.JobKeys(ref.job_id).plan))

    def _was_removed(self, ref: JobRef, snapshot: ClusterSnapshot) -> bool:
        """True if the job has no workload now, but had a workload before."""
        return self._store.has(layout.JobKeys(ref.job_id).events) or snapshot.is_removed(ref)

    def why_waiting(self, ref: JobRef) -> str | None:
        """Return why the job does not run yet, from the state of its pods, nodes and queues."""
        return self.status([ref])[ref.job_id].why_waiting

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Return why a host was lost, from its pod, or from notes if the pod was deleted."""
        snapshot = self._read([ref], fresh=True)
        if note := self._loss_notes.of(ref.job_id, host):
            return note
        workload = snapshot.workload(ref)
        if workload is None:
            is_cancelled = self._store.has(layout.JobKeys(ref.job_id).cancellation)
            was_removed = not is_cancelled and self._was_removed(ref, snapshot)
            return f"{states.REMOVED_FROM_CLUSTER.capitalize()}." if was_removed else ""
        finding = diagnose(snapshot.observe_job(ref, workload, waits=False), self._api.now())
        if finding is None or finding.kind not in _END_CAUSES | {JobCause.QUEUE_REFUSED}:
            return ""  # The reason for waiting does not explain a loss.
        if host not in states.select_hosts(ref, finding):
            return ""
        return finding.sentence

    def why_unready(self, ref: JobRef) -> str:
        """Return why the job waited before it ended, from notes: the pods are deleted by now."""
        return self._loss_notes.find_wait(ref.job_id)

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Delete the hosts' pods: at once (SIGKILL), or with their own grace period (SIGTERM)."""
        if signum not in _GRACES_S:
            raise UsageError(
                "Hosts on a cluster take no other signals than KILL and TERM, because a cluster "
                "can only delete pods: at once (KILL), or after their grace period (TERM)."
            )
        if self._store.has(layout.JobKeys(ref.job_id).outcome):
            return ()  # The pods of an ended job are deleted anyway.
        snapshot = self._read([ref], fresh=True)
        workload = snapshot.workload(ref)
        pods = () if workload is None else current_pods(workload, snapshot.pods_of(ref))
        return tuple(
            pod.host
            for pod in pods
            if pod.host in hosts and not pod.has_ended and self._delete_pod(pod, signum)
        )

    def connect(self, ref: JobRef, host: int | None, port: int) -> Connection:
        """Connect to a port of a host's pod (None: of the leader's pod) through the API server."""
        snapshot = self._read([ref], fresh=True)
        workload = snapshot.workload(ref)
        pods = () if workload is None else current_pods(workload, snapshot.pods_of(ref))
        running = [pod for pod in pods if pod.stage is Stage.RUNNING]
        pod = next((p for p in running if (p.leads if host is None else p.host == host)), None)
        if pod is None:
            name = "the leader" if host is None else f"host {host}"
            raise ConnectionRefusedError(f"{name} of {ref.job_id} has no running pod")
        return SocketConnection(self._api.open_port(pod.name, port))

    def _delete_pod(self, pod: Pod, signum: int) -> bool:
        with contextlib.suppress(Conflict):  # Another pod has taken its place.
            return self._api.delete(PODS, pod.name, uid=pod.uid, grace_s=_GRACES_S[signum])
        return False

    # -- output ------------------------------------------------------------------------------------

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read the hosts' output from the store; with `follow`, until the job ends.

        Kubernetes' own pod logs cannot be used: they mix stdout and stderr, hold back incomplete
        lines, lose what a node rotates, and have no positions from which to resume. Each host would
        also need a permanent connection to the server.
        """
        return attempt_logs.read_of_cluster(self._store, ref, request, self.status)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self, ref: JobRef) -> None:
        """Record the request in the store, and delete the workload: the leader gets SIGTERM."""
        cancellation.request(self._store, ref.job_id, lambda: self._delete(ref, "Foreground"))

    def cleanup(self, ref: JobRef) -> None:
        """Delete the workload and the objects that it owns."""
        self._delete(ref, "Background")

    def _delete(self, ref: JobRef, propagation: str) -> None:
        name = names.workload_of(ref.job_id)
        self._api.delete(resource_of(ref), name, propagation=propagation)


def _with_values(
    secret: Document, owner: Document, job_id: str, values: Mapping[str, str]
) -> Document:
    from kinetic._rpc import certificate

    endpoint = Endpoint("", os.urandom(16).hex(), job_id)
    pair = certificate.make(endpoint.tls_name)
    return manifests.with_secrets(
        secret,
        owner,
        token=endpoint.token,
        certificate=pair.certificate,
        key=pair.key,
        values=values,
    )


class _LossNotes:
    """The last known reasons why hosts were lost and why jobs waited. A JobSet deletes old pods
    when it restarts or fails, often before a caller asks how they ended."""

    def __init__(self) -> None:
        self._losses: dict[tuple[str, int], str] = {}
        self._waits: dict[str, str] = {}

    def note(self, job_id: str, pods: Iterable[Pod]) -> None:
        """Note why these pods were lost; drop the notes on hosts that run again."""
        for pod in pods:
            diagnosis = pod_failures.why_lost([pod])
            if diagnosis is not None and diagnosis.kind in _CLUSTER_CAUSES:
                self._losses[job_id, pod.host] = diagnosis.sentence
            elif pod.stage is Stage.RUNNING and pod.is_ready and not pod.is_deleting:
                self._losses.pop((job_id, pod.host), None)

    def of(self, job_id: str, host: int) -> str:
        """Return why a host was lost, or ""."""
        return self._losses.get((job_id, host), "")

    def note_waiting(self, job_id: str, finding: JobDiagnosis | None) -> None:
        """Note what a job waits for; None drops the note."""
        if finding is None:
            self._waits.pop(job_id, None)
        elif finding.kind not in _END_CAUSES:
            self._waits[job_id] = finding.sentence

    def find_wait(self, job_id: str) -> str:
        """Return what a job last waited for, or ""."""
        return self._waits.get(job_id, "")
