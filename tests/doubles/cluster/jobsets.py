"""The JobSet controller (v0.12): child Jobs, restarts, success and failure policies."""

from __future__ import annotations

import hashlib
import re
import uuid

from doubles.cluster.admission import Admission
from doubles.cluster.collector import Collector
from doubles.cluster.engine import Engine
from doubles.cluster.kinds import JOB_SETS, JOBS, SERVICES, with_defaults
from doubles.cluster.objects import (
    Object,
    clone,
    condition,
    dig,
    is_true,
    owner_reference,
    set_condition,
    stamp,
)
from doubles.cluster.problems import Refused
from doubles.cluster.recorder import Recorder
from doubles.cluster.store import Change, Store

ACTOR = "jobset"
MARK = "jobset.sigs.k8s.io"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
PATTERNS = "onJobFailureMessagePatterns"
RESTART, RESTART_FREELY = "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"
COMPLETED = "jobset completed successfully"


class JobSets:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        recorder: Recorder,
        collector: Collector,
        admission: Admission,
    ) -> None:
        self.store, self.engine, self.recorder = store, engine, recorder
        self.collector, self.admission = collector, admission
        engine.handle("jobset", self._sync)
        store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        if (key := self.store.concerned(change, JOB_SETS, JOBS)) is not None:
            self.engine.add("jobset", key)

    def _sync(self, key: tuple[str, str]) -> None:
        job_set = self.store.get(JOB_SETS, *key)
        if job_set is None or "deletionTimestamp" in job_set["metadata"]:
            return
        _Sync(self, key, job_set).run()


class _Sync:
    """One pass over one JobSet, to bring its Jobs and its status up to date."""

    def __init__(self, of: JobSets, key: tuple[str, str], job_set: Object) -> None:
        self.of, self.key, self.job_set = of, key, job_set
        self.spec = job_set["spec"]
        self.status: Object = clone(job_set.get("status") or {})
        self.status.setdefault("restarts", 0)
        self.events: list[tuple[str, str, bool]] = []
        uid = job_set["metadata"]["uid"]
        jobs = [obj for (r, _, _), obj in of.store.owned(uid) if r is JOBS]
        attempt = str(self.status["restarts"])
        self.current = [
            j for j in jobs if j["metadata"]["labels"][f"{MARK}/restart-attempt"] == attempt
        ]
        self.previous = [j for j in jobs if j not in self.current]
        self.failed = [j for j in self.current if is_true(j, "Failed")]
        self.complete = [j for j in self.current if is_true(j, "Complete")]

    def run(self) -> None:
        self._count()
        if is_true(self.job_set, "Completed") or is_true(self.job_set, "Failed"):
            for job in self.current:
                if job not in self.failed and job not in self.complete:
                    self._remove(job)
            return
        for job in self.previous:
            self._remove(job)
        if self.failed:
            self._fail()
        elif not self._succeed():
            self._proceed()
        self._write()

    def _write(self) -> None:
        if self.status != (self.job_set.get("status") or {}):

            def change(obj: Object) -> None:
                obj["status"] = self.status

            self.job_set = self.of.store.update(
                JOB_SETS, *self.key, change, uid=self.job_set["metadata"]["uid"]
            )
        for reason, message, warning in self.events:
            self.of.recorder.say(ACTOR, self.job_set, reason, message, warning=warning)

    def _remove(self, job: Object) -> None:
        meta = job["metadata"]
        if "deletionTimestamp" not in meta:
            self.of.collector.delete(JOBS, meta["namespace"], meta["name"], policy="Foreground")

    # --- numbers

    def _count(self) -> None:
        rows = []
        for replicated in self.spec.get("replicatedJobs") or ():
            mine = [j for j in self.current if _group(j) == replicated["name"]]
            row = {"active": 0, "failed": 0, "name": replicated["name"]}
            row |= {"ready": 0, "succeeded": 0, "suspended": 0}
            for job in mine:
                if job in self.failed:
                    row["failed"] += 1
                elif job in self.complete:
                    row["succeeded"] += 1
                else:
                    status = job["status"]
                    pods = job["spec"]["parallelism"]
                    pods = min(pods, job["spec"].get("completions") or pods)
                    row["ready"] += status.get("succeeded", 0) + status.get("ready", 0) >= pods
                    row["active"] += status.get("active", 0) > 0
                    row["suspended"] += is_true(job, "Suspended") and job["spec"].get(
                        "suspend", False
                    )
            rows.append(row)
        self.status["replicatedJobsStatus"] = rows

    # --- the end

    def _end(self, kind: str, reason: str, message: str) -> None:
        if condition(self.job_set, "RestartingJobSet"):
            text = COMPLETED if kind == "Completed" else "jobset failed"
            self._put("RestartingJobSet", f"JobSet{kind}", text, "False")
            self.events.append((f"JobSet{kind}", text, False))
        self._put(kind, reason, message)
        self.status["terminalState"] = kind
        self.events.append((reason, message, kind == "Failed"))

    def _put(self, kind: str, reason: str, message: str, status: str = "True") -> bool:
        new = {"lastTransitionTime": stamp(), "message": message, "reason": reason}
        return set_condition(self.status, new | {"status": status, "type": kind})

    def _succeed(self) -> bool:
        policy = self.spec["successPolicy"]
        targets = policy.get("targetReplicatedJobs") or []
        matching = [j for j in self.complete if not targets or _group(j) in targets]
        wanted = sum(
            r["replicas"]
            for r in self.spec.get("replicatedJobs") or ()
            if not targets or r["name"] in targets
        )
        enough = 1 if policy["operator"] == "Any" else wanted
        if not wanted or len(matching) < enough:
            return False
        self._end("Completed", "AllJobsCompleted", COMPLETED)
        return True

    def _fail(self) -> None:
        policy = self.spec.get("failurePolicy")
        first = min(self.failed, key=_failed_at)
        suffix = f" (first failed job: {_name(first)})"
        if policy is None:
            self._end(
                "Failed", "FailedJobs", "jobset failed due to one or more job failures" + suffix
            )
            return
        action, rule = self._action(policy)
        if action == "FailJobSet":
            message = "jobset failed due to FailJobSet failure policy action" + suffix
            self._end("Failed", "FailJobSetFailurePolicyAction", message)
            return
        counting = self.status.get("restartsCountTowardsMax", 0)
        if action == RESTART and counting >= policy.get("maxRestarts", 0):
            message = "jobset failed due to reaching max number of restarts" + suffix
            self._end("Failed", "ReachedMaxRestarts", message)
            return
        self.status["restarts"] += 1
        if action == RESTART:
            self.status["restartsCountTowardsMax"] = counting + 1
        message = f"applying {action} failure policy action{suffix}"
        self._put("RestartingJobSet", rule, message)
        self.events.append((f"{action}FailurePolicyAction", message, True))
        self.events.append((rule, message, True))

    def _action(self, policy: Object) -> tuple[str, str]:
        """Return the action of the failure policy for the first failed Job that matches a rule."""
        for index, rule in enumerate(policy.get("rules") or ()):
            for job in sorted(self.failed, key=_failed_at):
                held = condition(job, "Failed")
                reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
                if reasons and (held is None or held["reason"] not in reasons):
                    continue
                if targets and _group(job) not in targets:
                    continue
                message, patterns = (held or {}).get("message", ""), rule.get(PATTERNS)
                if patterns and not any(re.search(pattern, message) for pattern in patterns):
                    continue
                return rule["action"], rule.get("name") or f"failurePolicyRule{index}"
        return RESTART, "DefaultFailurePolicy"

    # --- the work

    def _proceed(self) -> None:
        if dig(self.spec, "network", "enableDNSHostnames"):
            self._have_service()
        suspended = bool(self.spec.get("suspend"))
        if suspended:
            for job in self.current:
                self._suspend(job, True)
            if self._put("Suspended", "SuspendedJobs", "jobset is suspended"):
                self.events.append(("SuspendedJobs", "jobset is suspended", False))
        elif is_true(self.job_set, "Suspended"):
            for job in self.current:
                self._suspend(job, False)
            self._put("Suspended", "ResumeJobs", "jobset is resumed", "False")
            self.events.append(("ResumeJobs", "jobset is resumed", False))
        blocks = dig(self.spec, "failurePolicy", "restartStrategy") == "BlockingRecreate"
        if not (blocks and self.previous):
            self._create(suspended)
        rows = self.status["replicatedJobsStatus"]
        wanted = {r["name"]: r["replicas"] for r in self.spec.get("replicatedJobs") or ()}
        if is_true(self.job_set, "RestartingJobSet") and all(
            row["ready"] + row["succeeded"] == wanted[row["name"]] for row in rows
        ):
            self._put("RestartingJobSet", "JobsReady", "all jobs are ready", "False")
            self.events.append(("JobsReady", "all jobs are ready", False))

    def _suspend(self, job: Object, suspended: bool) -> None:
        if job["spec"].get("suspend") is suspended or job in self.complete:
            return

        def change(obj: Object) -> None:
            obj["spec"]["suspend"] = suspended

        self.of.store.update(JOBS, job["metadata"]["namespace"], _name(job), change)

    def _have_service(self) -> None:
        network = self.spec["network"]
        name = network.get("subdomain") or _name(self.job_set)
        namespace = self.key[0]
        if self.of.store.get(SERVICES, namespace, name) is not None:
            return
        service = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "ownerReferences": [owner_reference(self.job_set)],
            },
            "spec": {
                "selector": {f"{MARK}/jobset-name": _name(self.job_set)},
                "clusterIP": "None",
                "clusterIPs": ["None"],
                "type": "ClusterIP",
                "publishNotReadyAddresses": network["publishNotReadyAddresses"],
            },
            "status": {"loadBalancer": {}},
        }
        self.of.store.create(SERVICES, service)

    def _create(self, suspended: bool) -> None:
        for job in child_jobs(self.job_set, self.status["restarts"]):
            name, group = _name(job), _group(job)
            exists = any(_name(j) == name for j in (*self.current, *self.previous))
            if exists or not self._may_start(group):
                continue
            if suspended:
                job["spec"]["suspend"] = True
            job["metadata"]["uid"] = str(uuid.uuid4())
            try:
                self._check(job)
                self.of.store.create(JOBS, with_defaults(JOBS, job))
            except Refused as refused:
                text = refused.body["message"] if isinstance(refused.body, dict) else ""
                message = f'job "{name}" creation failed with error: {text}'
                self.of.recorder.say(
                    ACTOR, self.job_set, "JobCreationFailed", message, warning=True
                )
                self.of.engine.add("jobset", self.key, 0.2)
                return

    def _check(self, job: Object) -> None:
        from doubles.cluster.validation import check

        check(JOBS, job)
        self.of.admission.check_quota(JOBS, job)

    def _may_start(self, group: str) -> bool:
        """True if the dependencies of a replicated Job are satisfied."""
        replicated = {r["name"]: r for r in self.spec["replicatedJobs"]}
        rows = {row["name"]: row for row in self.status["replicatedJobsStatus"]}
        for needed in replicated[group].get("dependsOn") or ():
            row, wanted = rows[needed["name"]], replicated[needed["name"]]["replicas"]
            done = row["succeeded"]
            if needed["status"] == "Ready":
                done += row["ready"]
            if done < wanted:
                return False
        return True


def child_jobs(job_set: Object, attempt: int) -> list[Object]:
    """Return the Jobs that a JobSet creates for an attempt."""
    meta, spec = job_set["metadata"], job_set["spec"]
    replicated_jobs = spec.get("replicatedJobs") or []
    total = sum(r["replicas"] for r in replicated_jobs)
    coordinator = ""
    subdomain = dig(spec, "network", "subdomain", default=meta["name"])
    if held := spec.get("coordinator"):
        where = f"{held['replicatedJob']}-{held.get('jobIndex', 0)}-{held.get('podIndex', 0)}"
        coordinator = f"{meta['name']}-{where}.{subdomain}"
    jobs, position = [], 0
    exclusive = (meta.get("annotations") or {}).get(EXCLUSIVE)
    for replicated in replicated_jobs:
        group = replicated["groupName"]
        in_group = [r for r in replicated_jobs if r["groupName"] == group]
        before = sum(
            r["replicas"]
            for r in in_group[: [r["name"] for r in in_group].index(replicated["name"])]
        )
        for index in range(replicated["replicas"]):
            name = f"{meta['name']}-{replicated['name']}-{index}"
            key = hashlib.sha1(f"{meta['namespace']}/{name}".encode()).hexdigest()
            marks = {
                "global-replicas": str(total),
                "group-name": group,
                "group-replicas": str(sum(r["replicas"] for r in in_group)),
                "job-global-index": str(position),
                "job-group-index": str(before + index),
                "job-index": str(index),
                "job-key": key,
                "jobset-name": meta["name"],
                "jobset-uid": meta["uid"],
                "replicatedjob-name": replicated["name"],
                "replicatedjob-replicas": str(replicated["replicas"]),
                "restart-attempt": str(attempt),
            }
            if coordinator:
                marks["coordinator"] = coordinator
            labels = {f"{MARK}/{k}": v for k, v in marks.items()}
            annotations = dict(labels)
            template = clone(replicated["template"])
            own = dict(dig(template, "metadata", "annotations", default={}))
            if exclusive or EXCLUSIVE in own:
                annotations[EXCLUSIVE] = exclusive or own[EXCLUSIVE]
            pod = template["spec"]["template"]
            for holder in (template, pod):
                held_meta = holder.setdefault("metadata", {})
                held_meta["labels"] = (held_meta.get("labels") or {}) | labels
                held_meta["annotations"] = (held_meta.get("annotations") or {}) | annotations
            if dig(spec, "network", "enableDNSHostnames"):
                pod["spec"]["subdomain"] = subdomain
            jobs.append(
                {
                    "kind": "Job",
                    "apiVersion": "batch/v1",
                    "metadata": template["metadata"]
                    | {"name": name, "namespace": meta["namespace"]}
                    | {"ownerReferences": [owner_reference(job_set)]},
                    "spec": template["spec"],
                }
            )
            position += 1
    return jobs


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _group(job: Object) -> str:
    return str(job["metadata"]["labels"][f"{MARK}/replicatedjob-name"])


def _failed_at(job: Object) -> tuple[str, str]:
    held = condition(job, "Failed")
    return (held["lastTransitionTime"] if held else "", _name(job))
