"""Deletion of an object, and of the objects that it owns.

The collector also removes finished objects after their time to live.
"""

from __future__ import annotations

import time
from typing import Any

from doubles.cluster.engine import Engine
from doubles.cluster.kinds import JOB_SETS, JOBS, PODS, TRACKING, Resource
from doubles.cluster.objects import (
    Object,
    condition,
    dig,
    is_true,
    owner_uids,
    seconds,
    stamp,
)
from doubles.cluster.problems import conflict, not_found
from doubles.cluster.store import Change, Store

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
TERMINAL = ("Succeeded", "Failed")
CACHE_LAG_S = 0.01


class Collector:
    """The garbage collector, and the deletion strategy of the API server."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store, self._engine = store, engine
        engine.handle("owner", self._sync_owner)
        engine.handle("expired", self._sync_expired)
        store.listeners.append(self._heard)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        policy: str = "",
        grace_s: float | None = None,
        uid: str | None = None,
    ) -> tuple[Object, bool]:
        """Delete an object; return its last version, and True if it is already removed."""
        with self._store.lock:
            held = self._store.get(resource, namespace, name)
            if held is None:
                raise not_found(resource, name)
            current_uid = held["metadata"]["uid"]
            if uid is not None and uid != current_uid:
                why = (
                    f"the UID in the precondition ({uid}) does not match the UID in record"
                    f" ({current_uid}). The object might have been deleted and then recreated"
                )
                refused = conflict(resource, name, why)
                if isinstance(refused.body, dict):
                    refused.body["details"]["kind"] = resource.kind
                raise refused
            if resource is PODS:
                return self._delete_pod(held, grace_s)
            finalizer = {"Foreground": FOREGROUND, "Orphan": ORPHAN}.get(policy)
            if not policy and resource is JOBS:
                finalizer = ORPHAN

            def mark(obj: Object) -> None:
                meta = obj["metadata"]
                meta.setdefault("deletionTimestamp", stamp())
                meta["deletionGracePeriodSeconds"] = 0
                if "generation" in meta and "deletionTimestamp" not in held["metadata"]:
                    meta["generation"] += 1
                if finalizer and finalizer not in meta.setdefault("finalizers", []):
                    meta["finalizers"].append(finalizer)

            if not finalizer and not held["metadata"].get("finalizers"):
                self._store.remove(resource, namespace, name)
                return held, True
            new = self._store.update(resource, namespace, name, mark)
            return new, False

    def _delete_pod(self, pod: Object, grace_s: float | None) -> tuple[Object, bool]:
        meta, spec = pod["metadata"], pod["spec"]
        if grace_s is None:
            grace_s = spec.get("terminationGracePeriodSeconds", 30)
        if not spec.get("nodeName") or pod["status"].get("phase") in TERMINAL:
            grace_s = 0
        already = meta.get("deletionGracePeriodSeconds")
        if already is not None:
            grace_s = min(grace_s, already)

        def mark(obj: Object) -> None:
            now = time.time()
            if grace_s != already:
                obj["metadata"]["deletionTimestamp"] = stamp(now + grace_s)
                obj["metadata"]["deletionGracePeriodSeconds"] = int(grace_s)

        new = self._store.update(PODS, meta["namespace"], meta["name"], mark)
        remaining = self._store.get(PODS, meta["namespace"], meta["name"])
        return new, remaining is None or remaining["metadata"]["uid"] != meta["uid"]

    def _heard(self, change: Change) -> None:
        obj, resource = change.object, change.resource
        if change.type == "DELETED":
            # The delay lets the Job controller remove the finalizers of pods first.
            lag = CACHE_LAG_S if resource in (JOBS, JOB_SETS) else 0.0
            self._engine.add("owner", obj["metadata"]["uid"], lag)
        for owner in owner_uids(obj):
            if change.type == "DELETED" or self._store.by_uid(owner) is None:
                self._engine.add("owner", owner)
        if "deletionTimestamp" in obj["metadata"] and change.type != "DELETED":
            self._engine.add("owner", obj["metadata"]["uid"])
        if resource in (JOBS, JOB_SETS) and (left_s := _time_left(obj)) is not None:
            key = (resource, obj["metadata"]["namespace"], obj["metadata"]["name"])
            self._engine.add("expired", (key, obj["metadata"]["uid"]), max(left_s, 0.0))

    def _sync_owner(self, uid: str) -> None:
        owner = self._store.by_uid(uid)
        dependents = self._store.owned(uid)
        if owner is None:
            for (resource, namespace, name), obj in dependents:
                if any(self._store.by_uid(other) for other in owner_uids(obj) if other != uid):
                    continue
                if resource is PODS and TRACKING in (obj["metadata"].get("finalizers") or ()):
                    self._store.update(PODS, namespace, name, without_finalizer(TRACKING))
                if "deletionTimestamp" not in obj["metadata"]:
                    self.delete(resource, namespace, name, policy="Background")
            return
        meta = owner["metadata"]
        finalizers = meta.get("finalizers") or ()
        if "deletionTimestamp" not in meta:
            return
        if ORPHAN in finalizers:
            for (resource, namespace, name), _ in dependents:
                self._store.update(resource, namespace, name, lambda obj: _disown(obj, uid))
                self._store.update(resource, namespace, name, without_finalizer(TRACKING))
            self._unlock(owner, ORPHAN)
        elif FOREGROUND in finalizers:
            for (resource, namespace, name), obj in dependents:
                if resource is PODS and TRACKING in (obj["metadata"].get("finalizers") or ()):
                    self._store.update(PODS, namespace, name, without_finalizer(TRACKING))
                if "deletionTimestamp" not in obj["metadata"]:
                    more = self._store.owned(obj["metadata"]["uid"])
                    policy = "Foreground" if more else "Background"
                    self.delete(resource, namespace, name, policy=policy)
            blocking = [
                obj
                for _, obj in self._store.owned(uid)
                if any(
                    r["uid"] == uid and r.get("blockOwnerDeletion")
                    for r in obj["metadata"]["ownerReferences"]
                )
            ]
            if not blocking:
                self._unlock(owner, FOREGROUND)

    def _unlock(self, owner: Object, finalizer: str) -> None:
        resource = {"Job": JOBS, "JobSet": JOB_SETS}.get(owner["kind"])
        if resource is None:
            resources = [key for key in self._keys(owner) if key]
            resource = resources[0]
        meta = owner["metadata"]
        self._store.update(
            resource,
            meta.get("namespace", ""),
            meta["name"],
            without_finalizer(finalizer),
            uid=meta["uid"],
        )

    def _keys(self, owner: Object) -> list[Any]:
        from doubles.cluster.kinds import ALWAYS, QUEUES

        return [r for r in (*ALWAYS, *QUEUES) if r.kind == owner["kind"]]

    def _sync_expired(self, item: tuple[tuple[Resource, str, str], str]) -> None:
        (resource, namespace, name), uid = item
        obj = self._store.get(resource, namespace, name)
        if obj is None or obj["metadata"]["uid"] != uid or "deletionTimestamp" in obj["metadata"]:
            return
        left_s = _time_left(obj)
        if left_s is not None and left_s > 0:
            self._engine.add("expired", item, left_s)
        elif left_s is not None:
            self.delete(resource, namespace, name, policy="Foreground")


def _time_left(obj: Object) -> float | None:
    """Return the seconds until a finished object is deleted; None if it has no time to live."""
    ttl = dig(obj, "spec", "ttlSecondsAfterFinished")
    if ttl is None or "deletionTimestamp" in obj["metadata"]:
        return None
    for kind in ("Complete", "Completed", "Failed"):
        if is_true(obj, kind):
            ended = condition(obj, kind)
            assert ended is not None
            return seconds(ended["lastTransitionTime"]) + float(ttl) - time.time()
    return None


def without_finalizer(finalizer: str):
    def change(obj: Object) -> None:
        others = [f for f in obj["metadata"].get("finalizers") or () if f != finalizer]
        obj["metadata"].pop("finalizers", None)
        if others:
            obj["metadata"]["finalizers"] = others

    return change


def _disown(obj: Object, uid: str) -> None:
    others = [r for r in obj["metadata"].get("ownerReferences") or () if r["uid"] != uid]
    obj["metadata"].pop("ownerReferences", None)
    if others:
        obj["metadata"]["ownerReferences"] = others
