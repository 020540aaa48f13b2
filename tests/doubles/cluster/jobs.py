"""The Job controller: creates the pods of Jobs, counts their ends, and sets the Jobs' conditions.

The order of states is that of Kubernetes 1.36: an ended pod is first noted as uncounted, then loses
its finalizer, then counts. FailureTarget is set first, and Failed once all pods have ended.
"""

from __future__ import annotations

import time

from doubles.cluster.admission import Admission
from doubles.cluster.collector import TERMINAL, Collector, without_finalizer
from doubles.cluster.engine import Engine
from doubles.cluster.kinds import INDEX, JOBS, PODS, TRACKING
from doubles.cluster.objects import (
    Object,
    clone,
    condition,
    dig,
    is_true,
    owner_reference,
    seconds,
    set_condition,
    stamp,
)
from doubles.cluster.problems import Refused
from doubles.cluster.recorder import Recorder
from doubles.cluster.store import Change, Store
from doubles.cluster.timings import Timings

ACTOR = "job-controller"
Verdict = tuple[str, str, str]
"""A condition's type, reason and message."""


class Jobs:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        recorder: Recorder,
        collector: Collector,
        admission: Admission,
        timings: Timings,
    ) -> None:
        self._store, self._engine, self._recorder = store, engine, recorder
        self._collector, self._admission, self._timings = collector, admission, timings
        self._retries: dict[str, tuple[int, float]] = {}
        engine.handle("job", self._sync)
        store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        if (key := self._store.concerned(change, JOBS, PODS)) is not None:
            self._engine.add("job", key)

    def _sync(self, key: tuple[str, str]) -> None:
        job = self._store.get(JOBS, *key)
        if job is None or is_true(job, "Complete") or is_true(job, "Failed"):
            return
        _Sync(self, key, job).run()

    def pods(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        owned = [obj for (r, _, _), obj in self._store.owned(uid) if r is PODS]
        return sorted(owned, key=lambda pod: int(pod["metadata"]["resourceVersion"]))

    def status(self, key: tuple[str, str], job: Object, status: Object) -> Object:
        def change(obj: Object) -> None:
            obj["status"] = status

        return self._store.update(JOBS, *key, change, uid=job["metadata"]["uid"])


class _Sync:
    """One pass over one Job, to bring its pods and its status up to date."""

    def __init__(self, jobs: Jobs, key: tuple[str, str], job: Object) -> None:
        self._jobs, self.key, self.job = jobs, key, job
        self.spec = job["spec"]
        self.indexed = self.spec["completionMode"] == "Indexed"
        self.status: Object = clone(job["status"])
        self.uncounted = self.status.setdefault("uncountedTerminatedPods", {})
        self.counted_now = False
        self.leaving = "deletionTimestamp" in job["metadata"]
        self.suspended = bool(self.spec.get("suspend"))
        self.read_pods()

    def read_pods(self) -> None:
        self.pods = self._jobs.pods(self.job)
        self.active = [p for p in self.pods if not _ended(p) and not _deleting(p)]
        self.ready = [p for p in self.active if is_true(p, "Ready")]
        self.terminating = [p for p in self.pods if not _ended(p) and _deleting(p)]
        self.tracked = [p for p in self.pods if TRACKING in (p["metadata"].get("finalizers") or ())]

    # --- the pass

    def run(self) -> None:
        for outcome in ("succeeded", "failed"):  # The last pass noted these pods.
            if uids := self.uncounted.pop(outcome, None):
                self.counted_now = True
                self.status[outcome] = self.status.get(outcome, 0) + len(uids)
        verdict = self._interim()
        if verdict is None and not self.leaving:
            verdict = self._failing() or self._succeeding()
        later = False
        if verdict is not None:
            self._remove_active()
        elif not self.leaving:
            later = self._manage()
        if later:
            return  # The scheduler handles the first pod before more are created.
        self._note_numbers()
        counted = self._note_terminated(verdict)
        if verdict is not None:
            self._put(verdict[0], verdict[1], verdict[2])
        over = verdict is not None and not (counted or self.active or self.terminating)
        if self.status != self.job["status"] and not (over and self.counted_now):
            self.job = self._jobs.status(self.key, self.job, clone(self.status))
        for pod in counted:
            meta = pod["metadata"]
            self._jobs._store.update(
                PODS, meta["namespace"], meta["name"], without_finalizer(TRACKING), uid=meta["uid"]
            )
        if over and verdict is not None:  # Otherwise, the next pass counts the noted pods.
            self._finish(verdict)

    def _put(self, kind: str, reason: str, message: str, status: str = "True") -> bool:
        now = stamp()
        new = {"type": kind, "status": status, "lastProbeTime": now, "lastTransitionTime": now}
        return set_condition(self.status, new | {"reason": reason, "message": message})

    def _say(self, reason: str, message: str, *, warning: bool = False) -> None:
        self._jobs._recorder.say(ACTOR, self.job, reason, message, warning=warning)

    def _note_numbers(self) -> None:
        self.read_pods()
        self.status.pop("active", None)
        if self.active:
            self.status["active"] = len(self.active)
        self.status["terminating"] = len(self.terminating)
        self.status["ready"] = len(self.ready)

    # --- decisions

    def _interim(self) -> Verdict | None:
        for kind in ("FailureTarget", "SuccessCriteriaMet"):
            if is_true(self.job, kind) and (held := condition(self.job, kind)):
                return kind, held["reason"], held["message"]
        return None

    def _failed(self, pod: Object) -> bool:
        if pod["status"].get("phase") == "Failed":
            return True
        if self.spec["podReplacementPolicy"] == "Failed" or self.suspended:
            return False
        return _deleting(pod) and pod["status"].get("phase") != "Succeeded"

    def _failing(self) -> Verdict | None:
        fresh = [p for p in self.tracked if self._failed(p)]
        rules = dig(self.spec, "podFailurePolicy", "rules", default=[])
        for pod in fresh:
            for index, rule in enumerate(rules):
                if why := _matches(rule, pod):
                    if rule["action"] == "FailJob":
                        message = f"{why} matching FailJob rule at index {index}"
                        return "FailureTarget", "PodFailurePolicy", message
                    break
        failed = self.status.get("failed", 0) + len([p for p in fresh if not self._ignored(p)])
        limit = self.spec["backoffLimit"]
        exceeded = "Job has reached the specified backoff limit"
        if failed > limit or self._restarts() > max(limit - 1, 0):
            return "FailureTarget", "BackoffLimitExceeded", exceeded
        deadline = self.spec.get("activeDeadlineSeconds")
        if deadline is not None and (started := self.status.get("startTime")):
            left_s = seconds(started) + deadline - time.time()
            if left_s <= 0:
                message = "Job was active longer than specified deadline"
                return "FailureTarget", "DeadlineExceeded", message
            self._jobs._engine.add("job", self.key, left_s)
        return None

    def _restarts(self) -> int:
        """Count the restarts of containers if the restart policy is OnFailure."""
        if self.spec["template"]["spec"]["restartPolicy"] != "OnFailure":
            return 0
        return sum(
            status.get("restartCount", 0)
            for pod in self.pods
            if pod["status"].get("phase") in ("Running", "Pending")
            for status in pod["status"].get("containerStatuses") or ()
        )

    def _ignored(self, pod: Object) -> bool:
        for rule in dig(self.spec, "podFailurePolicy", "rules", default=[]):
            if _matches(rule, pod):
                return bool(rule["action"] == "Ignore")
        return False

    def _completed(self) -> set[int]:
        done = _numbers(self.status.get("completedIndexes", ""))
        return done | {
            index
            for p in self.tracked
            if p["status"].get("phase") == "Succeeded" and (index := _index(p)) is not None
        }

    def _succeeding(self) -> Verdict | None:
        completions = self.spec.get("completions")
        if self.indexed:
            reached = len(self._completed()) >= completions
        else:
            succeeded = self.status.get("succeeded", 0) + len(
                [p for p in self.tracked if p["status"].get("phase") == "Succeeded"]
            )
            reached = (
                succeeded >= completions
                if completions is not None
                else succeeded > 0 and not self.active
            )
        if not reached or self.suspended:
            return None
        return (
            "SuccessCriteriaMet",
            "CompletionsReached",
            "Reached expected number of succeeded pods",
        )

    # --- actions

    def _remove_active(self) -> None:
        for pod in self.active:
            meta = pod["metadata"]
            self._jobs._collector.delete(PODS, meta["namespace"], meta["name"])
            self._say("SuccessfulDelete", f"Deleted pod: {meta['name']}")

    def _manage(self) -> bool:
        """Create and delete pods; return True if another pass is needed."""
        if self.suspended:
            self._remove_active()
            if self._put("Suspended", "JobSuspended", "Job suspended"):
                self._say("Suspended", "Job suspended")
            self.status.pop("startTime", None)
            return False
        if is_true(self.job, "Suspended"):
            if self._create():
                return True
            self._put("Suspended", "JobResumed", "Job resumed", "False")
            self.status["startTime"] = stamp()
            self._say("Resumed", "Job resumed")
            return False
        later = self._create()
        self.status.setdefault("startTime", stamp())
        return later

    def _wanted(self) -> list[int | None]:
        """Return the indexes for which pods are missing."""
        parallelism, completions = self.spec["parallelism"], self.spec.get("completions")
        busy = len(self.active)
        replaces_late = self.spec["podReplacementPolicy"] == "Failed"
        holding = self.active + (self.terminating if replaces_late else [])
        if replaces_late:
            busy = len(holding)
        if not self.indexed:
            done = self.status.get("succeeded", 0) + len(
                [p for p in self.tracked if p["status"].get("phase") == "Succeeded"]
            )
            if completions is None:
                return [None] * (0 if done else parallelism - busy)
            return [None] * (min(parallelism, completions - done) - busy)
        busy_indexes = {_index(p) for p in holding} | self._completed()
        free: list[int | None] = [i for i in range(completions) if i not in busy_indexes]
        return free[: max(parallelism - busy, 0)]

    def _create(self) -> bool:
        wanted = self._wanted()
        if not wanted:
            return False
        wait_s = self._backoff()
        if wait_s > 0:
            self._jobs._engine.add("job", self.key, wait_s)
            return False
        batch = wanted if self.active else wanted[:1]  # Slow start: first one pod, then the rest.
        for index in batch:
            try:
                pod = self._jobs._admission.create_pod(self._pod(index))
            except Refused as refused:
                message = refused.body["message"] if isinstance(refused.body, dict) else ""
                self._say("FailedCreate", f"Error creating: {message}", warning=True)
                self._jobs._engine.add("job", self.key, self._jobs._timings.create_retry_s)
                return False
            self._say("SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        return len(batch) < len(wanted)

    def _backoff(self) -> float:
        """Return the seconds to wait before the next pod replaces a failed one."""
        uid = self.job["metadata"]["uid"]
        ended = [p for p in self.pods if p["status"].get("phase") == "Failed"]
        fresh = [p for p in ended if p in self.tracked]
        count, last = self._jobs._retries.get(uid, (0, 0.0))
        if fresh:
            count, last = count + len(fresh), time.time()
            self._jobs._retries[uid] = (count, last)
        if not count:
            return 0.0
        return last + self._jobs._timings.backoff_s * 2 ** (count - 1) - time.time()

    def _pod(self, index: int | None) -> Object:
        name, template = self.job["metadata"]["name"], clone(self.spec["template"])
        meta = template.get("metadata") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        spec = template["spec"]
        prefix = f"{name}-"
        if index is not None:
            prefix = f"{name}-{index}-"
            labels |= {INDEX: str(index)}
            annotations |= {INDEX: str(index)}
            spec["hostname"] = f"{name}-{index}"[:63]
            path = f"metadata.labels['{INDEX}']"
            for container in [*spec["containers"], *(spec.get("initContainers") or ())]:
                container.setdefault("env", []).append(
                    {
                        "name": "JOB_COMPLETION_INDEX",
                        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}},
                    }
                )
        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "generateName": prefix,
                "namespace": self.job["metadata"]["namespace"],
                "labels": labels,
            }
            | ({"annotations": annotations} if annotations else {})
            | {"ownerReferences": [owner_reference(self.job)], "finalizers": [TRACKING]},
            "spec": spec,
        }

    # --- counts

    def _note_terminated(self, verdict: Verdict | None) -> list[Object]:
        """Note the ended pods as uncounted; return those whose finalizer may be removed."""
        done: list[Object] = []
        over = verdict is not None or self.leaving
        completed = self._completed()
        for pod in self.tracked:
            uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
            if phase == "Succeeded":
                if not self.indexed:
                    self.uncounted.setdefault("succeeded", []).append(uid)
            elif phase == "Failed" or (_deleting(pod) and (over or self._failed(pod))):
                ignored = self._ignored(pod) and not over
                if not self.leaving and not ignored and not (self.suspended and _deleting(pod)):
                    self.uncounted.setdefault("failed", []).append(uid)
            elif not (self.suspended and _deleting(pod)):
                continue
            done.append(pod)
        if self.indexed and completed:
            self.status["succeeded"] = len(completed)
            self.status["completedIndexes"] = _ranges(completed)
        return done

    def _finish(self, verdict: Verdict) -> None:
        kind, reason, message = verdict
        if kind == "SuccessCriteriaMet":
            self._put("Complete", reason, message)
            self.status["completionTime"] = stamp()
            self._jobs.status(self.key, self.job, self.status)
            self._say("Completed", "Job completed")
        else:
            self._put("Failed", reason, message)
            self._jobs.status(self.key, self.job, self.status)
            self._say(reason, message, warning=True)
        self._jobs._retries.pop(self.job["metadata"]["uid"], None)


def _ended(pod: Object) -> bool:
    return pod["status"].get("phase") in TERMINAL


def _deleting(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _index(pod: Object) -> int | None:
    text = dig(pod, "metadata", "annotations", INDEX)
    return None if text is None else int(text)


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        numbers |= set(range(int(low), int(high or low) + 1))
    return numbers


def _ranges(indexes: set[int]) -> str:
    """Format indexes as in a Job's status: "0,1", but "0-2"."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 2 else ",".join(str(i) for i in p) for p in parts)


def _matches(rule: Object, pod: Object) -> str:
    """Return the reason why a rule of a podFailurePolicy applies to a pod; "" if it does not."""
    meta, status = pod["metadata"], pod["status"]
    if wanted := rule.get("onExitCodes"):
        if status.get("phase") != "Failed" and not _deleting(pod):
            return ""
        for container in status.get("containerStatuses") or ():
            code = dig(container, "state", "terminated", "exitCode")
            if code is None or code == 0:
                continue
            if wanted.get("containerName") not in (None, container["name"]):
                continue
            if (code in wanted["values"]) is (wanted["operator"] == "In"):
                where = f"pod {meta['namespace']}/{meta['name']}"
                return f"Container {container['name']} for {where} failed with exit code {code}"
    for pattern in rule.get("onPodConditions") or ():
        held = condition(pod, pattern["type"])
        if held is not None and held["status"] == pattern.get("status", "True"):
            return f"Pod {meta['namespace']}/{meta['name']} has condition {pattern['type']}"
    return ""
