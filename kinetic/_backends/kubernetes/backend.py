"""The Kubernetes backend: one host is a Job, several are a JobSet, and so is a single controller;
host 0's pod leads the gang, or the head of an elastic job.

In: plans and refs, a store that pods can reach, an API server. Out: a workload and its Secret; the
state of jobs in the cluster. Output and verdicts are read from the store, where hosts leave them,
so they outlive the pods.
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
"""How often the Secret is created, each time with the connection's patience: some 15 seconds."""
_GRACES_S: dict[int, int | None] = {signal.SIGKILL: 0, signal.SIGTERM: None}
"""How long a pod that is deleted in place of these signals may take to end; None for the time in
its spec."""
_BY_THE_CLUSTER = frozenset(
    {
        JobCause.PREEMPTED,
        JobCause.EVICTED,
        JobCause.NODE_LOST,
        JobCause.OUT_OF_MEMORY,
        JobCause.START_ERROR,
    }
)
_ENDS = _BY_THE_CLUSTER | {
    JobCause.HOST_FAILED,
    JobCause.BAD_COMMAND,
    JobCause.DEADLINE,
}


class _Judged(NamedTuple):
    """The status of a job, and whether its verdict says so."""

    status: Status
    is_verdict: bool = False


class KubernetesBackend:
    """Jobs in one namespace of a cluster (see backends.base.Backend for the promises)."""

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

    # -- before and at the start -------------------------------------------------------------------

    def preflight(self, plan: Plan) -> None:
        """Refuse what the cluster cannot run: a few calls, before anything is sent."""
        from kinetic._rpc import certificate

        self._check_hosts(plan)
        api = self._api  # First, so that a caller without a cluster is not asked for a bucket.
        if is_near(self._store) and self._pods.store_uri == self._store.uri:
            raise PreflightError(
                f"The pods of a cluster cannot reach the folder {self._store.uri}, which is the "
                "store. Name a bucket: KINETIC_STORE=gs://BUCKET, or --store of `kinetic profile "
                "create`; or, if pods see this folder too, KINETIC_POD_STORE."
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
                f'backend="gke" runs jobs of one host; this one, on {plan.topology.name}, has '
                f'{plan.hosts} hosts. Leave backend= away, or write backend="pathways".'
            )

    def render(self, plan: Plan) -> list[Document]:
        """Return the workload, the Secret without its values, and what else the workload owns."""
        self._check_hosts(plan)
        variables = images.variables(plan) if self._pods.bootstrap else {}
        image = self._pods.image or images.of(plan)
        pods = replace(self._pods, image=image, variables={**self._pods.variables, **variables})
        return manifests.render(plan, pods)

    def choose_image(
        self, plan: Plan, installed: Mapping[str, bytes], tell: Callable[[str], object]
    ) -> Plan:
        """The image with what the plan installs, if that is requested."""
        return plan if self._supply is None else self._supply().choose(plan, installed, tell)

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Create the workload, then the rest, which is deleted with it. The Secret is the last:
        without it the submission was interrupted."""
        workload, secret, *others = documents
        resource = BY_KIND[workload["apiVersion"], workload["kind"]]
        created = self._api.create(resource, workload)
        self._has_answered = True
        try:
            for document in others:
                kind = BY_KIND[document["apiVersion"], document["kind"]]
                self._create_patiently(kind, manifests.add_owner(document, created))
            self._create_patiently(SECRETS, _with_values(secret, created, ref.job_id, secrets))
        except BackendUnavailable:  # And it could not be deleted.
            raise
        except BaseException:
            self._api.delete(resource, workload["metadata"]["name"])
            raise
        self._seen_jobs |= {ref.job_id}
        self._reader.note_created(ref, created)

    def _create_patiently(self, resource: Resource, document: Document) -> None:
        """Create what an existing workload cannot start without."""
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
                return  # An earlier try created it, and its answer was lost.

    # -- what becomes of jobs ----------------------------------------------------------------------

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """From one list of workloads and one of pods, for any number of jobs, which may be some
        seconds old; an end that no verdict confirms is looked up again."""
        if not refs:
            return {}
        snapshot = self._read(refs)
        statuses = {ref.job_id: self._judge(ref, snapshot) for ref in refs}
        for ref in () if snapshot.is_fresh else refs:
            is_pending = statuses[ref.job_id].status.phase is JobStatus.PENDING
            if is_pending and stored.runs(self._store, ref):
                snapshot.context.waiting.discard(ref.job_id)  # Its cluster is asked soon again.
        if not snapshot.is_fresh:
            unsure = [
                ref
                for ref in refs
                if not (judged := statuses[ref.job_id]).is_verdict
                and (snapshot.workload(ref) is None or judged.status.phase.ended)
            ]
            if unsure:
                snapshot = self._read(unsure, fresh=True)
                statuses |= {ref.job_id: self._judge(ref, snapshot) for ref in unsure}
        return {job_id: judged.status for job_id, judged in statuses.items()}

    def _read(self, refs: Sequence[JobRef], *, fresh: bool = False) -> ClusterSnapshot:
        """Once the cluster has answered, expired credentials do not end the wait: the store has the
        verdict, and the user can log in again."""
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
        if (verdict := stored.verdict(self._store, ref)) is not None:
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
            was_there=lambda: ref.job_id in self._seen_jobs or self._was_removed(ref, snapshot),
            start_timeout_s=lambda: self._plan(ref).limits.start_timeout_s,
        )
        status, waits_for = states.judge(job)
        if waits_for is not None:
            self._loss_notes.note_waiting(ref.job_id, waits_for)
        return _Judged(status)

    def _goes_on(self, ref: JobRef) -> bool:
        """Whether another attempt may follow that of a lost leader, or is due."""
        attempt, retries = attempts.newest(self._store, ref.job_id), self._plan(ref).options.retries
        may_follow = attempts.may_follow(self._store, ref.job_id, attempt, retries)
        return may_follow or not stored.has_begun(self._store, ref, attempt)

    def _plan(self, ref: JobRef) -> Plan:
        return Plan.read(self._store.get(layout.JobKeys(ref.job_id).plan))

    def _was_removed(self, ref: JobRef, snapshot: ClusterSnapshot) -> bool:
        """Whether a job without a workload had one, as far as anybody knows."""
        return self._store.has(layout.JobKeys(ref.job_id).events) or snapshot.is_removed(ref)

    def why_waiting(self, ref: JobRef) -> str | None:
        """From its pods, nodes and queues."""
        return self.status([ref])[ref.job_id].why_waiting

    def why_lost(self, ref: JobRef, host: int) -> str:
        """From its pods, as far as they still exist, or from what was seen of them."""
        snapshot = self._read([ref], fresh=True)
        if note := self._loss_notes.of(ref.job_id, host):
            return note
        workload = snapshot.workload(ref)
        if workload is None:
            is_cancelled = self._store.has(layout.JobKeys(ref.job_id).cancellation)
            is_known = not is_cancelled and self._was_removed(ref, snapshot)
            return f"{states.REMOVED_FROM_CLUSTER.capitalize()}." if is_known else ""
        finding = diagnose(snapshot.observe_job(ref, workload, waits=False), self._api.now())
        if finding is None or finding.kind not in _ENDS | {JobCause.QUEUE_REFUSED}:
            return ""  # What it waits for now does not explain a loss.
        if host not in states.select_hosts(ref, finding):
            return ""
        return finding.sentence

    def why_unready(self, ref: JobRef) -> str:
        """As it was seen last: pods that wait are gone when their job has ended."""
        return self._loss_notes.find_wait(ref.job_id)

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Delete their pods: at once (SIGKILL), or with the time to end in their spec
        (SIGTERM)."""
        if signum not in _GRACES_S:
            raise UsageError(
                "A cluster ends pods, it sends them no signals of your choice: use KILL, which "
                "deletes them at once, or TERM, which gives them their time to end."
            )
        if self._store.has(layout.JobKeys(ref.job_id).outcome):
            return ()  # The pods of an ended job go away by themselves.
        snapshot = self._read([ref], fresh=True)
        workload = snapshot.workload(ref)
        pods = () if workload is None else current_pods(workload, snapshot.pods_of(ref))
        return tuple(
            pod.host
            for pod in pods
            if pod.host in hosts and not pod.has_ended and self._delete_pod(pod, signum)
        )

    def connect(self, ref: JobRef, host: int, port: int) -> Connection:
        """Forward a port of the host's pod, by the API server."""
        snapshot = self._read([ref], fresh=True)
        workload = snapshot.workload(ref)
        pods = () if workload is None else current_pods(workload, snapshot.pods_of(ref))
        pod = next((p for p in pods if p.host == host and p.stage is Stage.RUNNING), None)
        if pod is None:
            raise ConnectionRefusedError(f"host {host} of {ref.job_id} has no pod that runs")
        return SocketConnection(self._api.open_port(pod.name, port))

    def _delete_pod(self, pod: Pod, signum: int) -> bool:
        with contextlib.suppress(Conflict):  # Another pod has taken its place.
            return self._api.delete(PODS, pod.name, uid=pod.uid, grace_s=_GRACES_S[signum])
        return False

    # -- output ------------------------------------------------------------------------------------

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read what the hosts have left in the store and, when following, go on until the job ends.

        Not the logs of pods: their API does not separate the two streams of a program, has no
        positions, holds open lines back and forgets what a node rotates, so reading could not be
        resumed exactly; and each host would keep a connection to the server busy.
        """
        return attempt_logs.read_of_cluster(self._store, ref, request, self.status)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self, ref: JobRef) -> None:
        """Record the request, and delete the workload: the leader notices that its pod ends."""
        cancellation.request(self._store, ref.job_id, lambda: self._delete(ref, "Foreground"))

    def cleanup(self, ref: JobRef) -> None:
        """Delete what is left in the cluster."""
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
    """The last reasons seen of hosts that the cluster took away, and what jobs waited for: a JobSet
    removes pods as soon as it starts others, and when it has failed, often before anyone has asked
    how they ended."""

    def __init__(self) -> None:
        self._losses: dict[tuple[str, int], str] = {}
        self._waits: dict[str, str] = {}

    def note(self, job_id: str, pods: Iterable[Pod]) -> None:
        """Record why pods were lost; forget it for hosts that run again."""
        for pod in pods:
            diagnosis = pod_failures.why_lost([pod])
            if diagnosis is not None and diagnosis.kind in _BY_THE_CLUSTER:
                self._losses[job_id, pod.host] = diagnosis.sentence
            elif pod.stage is Stage.RUNNING and pod.is_ready and not pod.is_deleting:
                self._losses.pop((job_id, pod.host), None)

    def of(self, job_id: str, host: int) -> str:
        """Return why a host was lost, or ""."""
        return self._losses.get((job_id, host), "")

    def note_waiting(self, job_id: str, finding: JobDiagnosis | None) -> None:
        """Remember what a job waits for; forget it with None."""
        if finding is None:
            self._waits.pop(job_id, None)
        elif finding.kind not in _ENDS:
            self._waits[job_id] = finding.sentence

    def find_wait(self, job_id: str) -> str:
        """Return what a job waited for when it was last seen, or ""."""
        return self._waits.get(job_id, "")
