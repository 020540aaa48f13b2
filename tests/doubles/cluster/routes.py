"""The API: carries out requests.

This module also checks permissions, applies faults, and logs every request.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from doubles.cluster import portforward, problems, streams, validation
from doubles.cluster.admission import Admission
from doubles.cluster.collector import TERMINAL, Collector
from doubles.cluster.discovery import Discovery, Target, target_of
from doubles.cluster.faults import Faults
from doubles.cluster.kinds import (
    JOB_SETS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    Resource,
    with_defaults,
)
from doubles.cluster.kubelet import Kubelet
from doubles.cluster.objects import (
    Object,
    clone,
    json_patched,
    merged,
    set_condition,
    stamp,
    strategically_merged,
)
from doubles.cluster.problems import Refused
from doubles.cluster.reading import (
    body_of,
    deletion,
    not_allowed,
    selectors,
    success,
    unsupported,
    verb_of,
    webhook_down,
)
from doubles.cluster.server import LARGEST_BODY, Answer, Request
from doubles.cluster.store import Store
from doubles.cluster.timings import Timings

ORPHANS = (
    '299 - "child pods are preserved by default when jobs are deleted; set'
    " propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this"
    ' warning"'
)
PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "application/json-patch+json": json_patched,
    "application/merge-patch+json": merged,
    "application/strategic-merge-patch+json": strategically_merged,
    "application/apply-patch+yaml": merged,
}
Permission = Callable[[str, str, str], bool]
"""Returns True if a user may use a verb on a resource ("jobs.batch", "pods/log") in a namespace."""


class Api:
    def __init__(
        self,
        store: Store,
        collector: Collector,
        admission: Admission,
        kubelet: Kubelet,
        faults: Faults,
        timings: Timings,
    ) -> None:
        self._store, self._collector, self._admission = store, collector, admission
        self._kubelet, self._faults, self._timings = kubelet, faults, timings
        self.discovery = Discovery()
        self.tokens: dict[str, str] = {}
        self.users: dict[str, Permission] = {}
        self.requests: list[Request] = []
        self.used: set[tuple[str, str, str]] = set()
        self.refused: set[tuple[str, str, str]] = set()
        """Calls that were allowed and refused: user, verb, resource ("list", "jobs.batch")."""
        self.unknown: list[str] = []
        """Fields of created objects that the API does not know."""
        self.webhook_down = False
        self.job_set_controller = True
        """False if JobSet's definition is installed, but its controller does not run."""
        self.protected_pods: set[str] = set()
        self.admitting: list[Callable[[Resource, Object], None]] = []
        """Functions to call with each object before its creation, which may change or refuse it."""
        self._lock = threading.Lock()

    # --- permissions

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
        parts = [p for p in request.path.split("/") if p]
        target = target_of(parts)
        request.verb, request.resource = verb_of(request, target), target.noun
        rules = self._faults.before(name_verb(request), request.resource)
        for rule in rules:
            if rule.delay_s:
                time.sleep(rule.delay_s)
        broken = next((r for r in rules if r.reset or r.refused), None)
        if broken is None:
            return self._carry_out(request, parts, target)
        if broken.after:
            self._carry_out(request, parts, target)
        if broken.reset:
            return Answer(0)
        assert broken.refused is not None
        raise broken.refused

    def _carry_out(self, request: Request, parts: list[str], target: Target) -> Answer:
        request.user = user = self._user(request)
        if len(request.body) > LARGEST_BODY:
            message = f"Request entity too large: limit is {LARGEST_BODY}"
            raise problems.refusal(413, "RequestEntityTooLarge", message)
        if not target.plural:
            return self.discovery.answer(parts)
        if target.plural == "selfsubjectaccessreviews":
            return self._review_access(user, body_of(request, "SelfSubjectAccessReview"))
        if target.plural == "selfsubjectreviews":
            who = {"userInfo": {"username": user, "groups": ["system:authenticated"]}}
            body = body_of(request, "SelfSubjectReview")
            return Answer(201, body | {"metadata": {}, "status": who})
        self._authorize(user, request.verb, target)
        resource = self.discovery.resource(target)
        if target.sub:
            return self._subresource(request, resource, target)
        if target.name:
            return self._one(request, resource, target)
        return self._many(request, resource, target)

    def _user(self, request: Request) -> str:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not token:
            return "system:anonymous"
        if token not in self.tokens:
            raise problems.refusal(401, "Unauthorized", "Unauthorized")
        return self.tokens[token]

    def _may(self, user: str, verb: str, noun: str, namespace: str) -> bool:
        permission = self.users.get(user)
        return permission is not None and permission(verb, noun, namespace)

    def _authorize(self, user: str, verb: str, target: Target) -> None:
        noun = target.plural + (f".{target.group}" if target.group else "")
        noun += f"/{target.sub}" if target.sub else ""
        allowed = self._may(user, verb, noun, target.namespace)
        with self._lock:
            (self.used if allowed else self.refused).add((user, verb, noun))
        if allowed:
            return
        plural = target.plural + (f"/{target.sub}" if target.sub else "")
        scope = f' in the namespace "{target.namespace}"' if target.namespace else ""
        if not target.namespace:
            scope = " at the cluster scope"
        why = (
            f'User "{user}" cannot {verb} resource "{plural}" in API group "{target.group}"{scope}'
        )
        raise problems.forbidden(target.as_resource(), target.name, why)

    def _review_access(self, user: str, body: Object) -> Answer:
        wanted = body["spec"].get("resourceAttributes") or {}
        noun = wanted.get("resource", "")
        noun += f".{wanted['group']}" if wanted.get("group") else ""
        noun += f"/{wanted['subresource']}" if wanted.get("subresource") else ""
        allowed = self._may(user, wanted.get("verb", ""), noun, wanted.get("namespace", ""))
        kind = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
        return Answer(201, kind | body | {"metadata": {}, "status": {"allowed": allowed}})

    # --- collections

    def _many(self, request: Request, resource: Resource, target: Target) -> Answer:
        query = request.query
        matches = selectors(query)
        if request.method == "POST":
            return self._create(request, resource, target.namespace)
        if request.method == "DELETE":
            for obj in self._store.all(resource, target.namespace):
                if matches(obj):
                    meta = obj["metadata"]
                    self._collector.delete(
                        resource,
                        meta.get("namespace", ""),
                        meta["name"],
                        policy=deletion(request).get("propagationPolicy", "Background"),
                    )
            return Answer(200, success())
        if request.method != "GET":
            raise not_allowed()
        if query.get("watch") in ("true", "1"):
            stream = self._faults.opened("watch", resource.plural)
            pieces = streams.watch(
                self._store,
                resource,
                target.namespace,
                query,
                matches,
                lambda: self.discovery.installed(resource),
                self._timings,
                stream,
            )
            return Answer(200, pieces=pieces, stream=stream)
        return self._list(resource, target.namespace, query, matches)

    def _list(
        self, resource: Resource, namespace: str, query: dict[str, str], matches: streams.Test
    ) -> Answer:
        with self._store.lock:
            version = self._store.version
            objects = [obj for obj in self._store.all(resource, namespace) if matches(obj)]
        version_asked = int(query.get("resourceVersion") or 0)
        if version_asked > version:
            message = "Too large resource version"
            raise problems.refusal(
                504,
                "Timeout",
                f"Timeout: {message}: {version_asked}, current: {version}",
                details={
                    "causes": [{"reason": "ResourceVersionTooLarge", "message": message}],
                    "retryAfterSeconds": 1,
                },
            )
        if query.get("resourceVersionMatch") == "Exact" and version_asked < self._store.first:
            message = "The resourceVersion for the provided list is too old."
            raise problems.refusal(410, "Expired", message)
        meta: Object = {"resourceVersion": str(version)}
        start = 0
        if "continue" in query:
            held = json.loads(base64.urlsafe_b64decode(query["continue"]))
            if held["rv"] < self._store.first:
                message = "The provided continue parameter is too old to display a consistent list"
                raise problems.refusal(410, "Expired", f"{message} result.")
            start = held["start"]
            meta["resourceVersion"] = str(held["rv"])
        limit = int(query.get("limit") or 0)
        if limit and len(objects) > start + limit:
            token = {"rv": int(meta["resourceVersion"]), "start": start + limit}
            meta["continue"] = base64.urlsafe_b64encode(json.dumps(token).encode()).decode()
            meta["remainingItemCount"] = len(objects) - start - limit
        items = objects[start : start + limit] if limit else objects[start:]
        if not resource.custom:  # Typed lists have no kind and version in items.
            items = [{k: v for k, v in i.items() if k not in ("kind", "apiVersion")} for i in items]
        kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
        return Answer(200, kind | {"metadata": meta, "items": items})

    def _create(self, request: Request, resource: Resource, namespace: str) -> Answer:
        obj = body_of(request, resource.kind)
        meta = obj.setdefault("metadata", {})
        dry = request.query.get("dryRun") == "All"
        if resource.namespaced:
            if meta.setdefault("namespace", namespace) != namespace:
                raise problems.bad_request(
                    "the namespace of the provided object does not match the namespace sent on the"
                    " request"
                )
            if self._store.get(NAMESPACES, "", namespace) is None:
                raise problems.not_found(NAMESPACES, namespace)
        if resource is JOB_SETS and self.webhook_down:
            raise webhook_down()
        warnings = self._unknown_fields(request, resource, obj)
        validation.check(resource, obj)
        if len(request.body) > validation.LONGEST_OBJECT:
            raise problems.refusal(500, "", "etcdserver: request is too large")
        meta = {
            k: v for k, v in meta.items() if k not in ("uid", "resourceVersion", "managedFields")
        }
        obj["metadata"] = meta | {"uid": str(uuid.uuid4())}
        self._admission.name(obj)
        for admit in self.admitting:
            admit(resource, obj)
        with self._store.lock:
            if resource is PODS:
                self._admission.place(obj)
            if resource is not JOB_SETS or self.job_set_controller:
                obj = with_defaults(resource, obj)
            if resource is PODS:
                self._admission.check_account(obj)
            self._admission.check_quota(resource, obj)
            created = self._store.create(resource, obj, dry=dry)
        headers = {"Warning": ", ".join(warnings)} if warnings else {}
        return Answer(201, created, headers)

    def _unknown_fields(self, request: Request, resource: Resource, obj: Object) -> list[str]:
        unknown = validation.unknown_fields(resource, obj)
        level = request.query.get("fieldValidation", "Warn")
        if not unknown or level == "Ignore":
            return []
        messages = [f'unknown field "{field}"' for field in unknown]
        if level == "Strict":
            kind, version = resource.kind, resource.version
            raise problems.bad_request(
                f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding'
                f" error: {', '.join(messages)}"
            )
        self.unknown += [f"{resource.kind} {obj['metadata'].get('name')}: {s}" for s in messages]
        return ["299 - " + json.dumps(text) for text in messages]

    # --- one object

    def _one(self, request: Request, resource: Resource, target: Target) -> Answer:
        place = (resource, target.namespace if resource.namespaced else "", target.name)
        if request.method == "GET":
            held = self._store.get(*place)
            if held is None:
                raise problems.not_found(resource, target.name)
            return Answer(200, held)
        if request.method == "DELETE":
            return self._delete(request, place)
        if request.method == "PUT":
            return self._replace(request, place, status=False)
        if request.method == "PATCH":
            return self._patch(request, place, status=False)
        raise not_allowed()

    def _delete(self, request: Request, place: tuple[Resource, str, str]) -> Answer:
        resource, _, name = place
        options = deletion(request)
        policy = options.get("propagationPolicy", "")
        headers = {"Warning": ORPHANS} if resource is JOBS and not policy else {}
        try:
            grace_s = options.get("gracePeriodSeconds")
            last, is_removed = self._collector.delete(
                *place,
                policy=policy,
                grace_s=float(grace_s) if grace_s is not None else None,
                uid=(options.get("preconditions") or {}).get("uid"),
            )
        except Refused as refused:
            refused.headers.update(headers)
            raise
        if is_removed and resource is not PODS:
            details = problems.details(resource, name) | {"uid": last["metadata"]["uid"]}
            return Answer(200, success(details=details), headers)
        return Answer(200, last, headers)

    def _replace(
        self, request: Request, place: tuple[Resource, str, str], *, status: bool
    ) -> Answer:
        new = body_of(request, place[0].kind)
        version = (new.get("metadata") or {}).get("resourceVersion")
        return self._change(request, place, lambda _: new, status, version)

    def _patch(self, request: Request, place: tuple[Resource, str, str], *, status: bool) -> Answer:
        kind = request.headers.get("content-type", "").partition(";")[0]
        resource = place[0]
        if kind not in PATCHES or (resource.custom and "strategic" in kind):
            accepted = [k for k in PATCHES if not (resource.custom and "strategic" in k)]
            raise unsupported(accepted)
        patch = json.loads(request.body)
        version = None
        if isinstance(patch, dict):
            version = (patch.get("metadata") or {}).get("resourceVersion")
        return self._change(
            request, place, lambda held: PATCHES[kind](held, patch), status, version
        )

    def _change(
        self,
        request: Request,
        place: tuple[Resource, str, str],
        change: Callable[[Object], Object],
        status: bool,
        version: str | None,
    ) -> Answer:
        resource = place[0]
        warnings: list[str] = []

        def apply(held: Object) -> Object:
            try:
                wanted = clone(change(clone(held)))
            except (KeyError, IndexError, ValueError) as problem:
                message = (
                    f"the server rejected our request due to an error in our request: {problem}"
                )
                raise problems.refusal(422, "Invalid", message) from None
            if status:
                return held | {"status": wanted.get("status") or {}}
            warnings.extend(self._unknown_fields(request, resource, wanted))
            fixed = ("uid", "name", "namespace", "creationTimestamp", "resourceVersion")
            for key in (*fixed, "generation", "deletionTimestamp", "deletionGracePeriodSeconds"):
                wanted["metadata"].pop(key, None)
                if key in held["metadata"]:
                    wanted["metadata"][key] = held["metadata"][key]
            if "status" in held and resource is not NODES:
                wanted["status"] = held["status"]
            if resource is JOB_SETS and "failurePolicy" in wanted["spec"]:
                wanted["spec"]["failurePolicy"].setdefault("restartStrategy", "Recreate")
            validation.check_update(resource, held, wanted)
            return {"kind": resource.kind, "apiVersion": resource.api_version} | wanted

        if request.query.get("dryRun") == "All":
            held = self._store.get(*place)
            if held is None:
                raise problems.not_found(resource, place[2])
            return Answer(200, apply(clone(held)))
        new = self._store.update(*place, apply, version=version)
        return Answer(200, new, {"Warning": ", ".join(warnings)} if warnings else {})

    def _subresource(self, request: Request, resource: Resource, target: Target) -> Answer:
        place = (resource, target.namespace if resource.namespaced else "", target.name)
        if resource is PODS and target.sub == "log" and request.method == "GET":
            return streams.log(
                self._store,
                self._kubelet,
                request,
                target.namespace,
                target.name,
                lambda: self._faults.opened("log", "pods/log"),
            )
        if resource is PODS and target.sub == "portforward" and request.method == "GET":
            self._authorize(request.user, "create", target)
            return portforward.forward(request)
        if resource is PODS and target.sub == "eviction" and request.method == "POST":
            return self._evict(target)
        if target.sub == "status":
            if request.method == "GET":
                return self._one(request, resource, target)
            if request.method == "PUT":
                return self._replace(request, place, status=True)
            if request.method == "PATCH":
                return self._patch(request, place, status=True)
        message = "the server could not find the requested resource"
        raise problems.refusal(404, "NotFound", message, details={})

    def _evict(self, target: Target) -> Answer:
        if target.name in self.protected_pods:
            cause = {
                "reason": "DisruptionBudget",
                "message": "The disruption budget keep needs 1 healthy pods and has 1 currently",
            }
            raise problems.refusal(
                429,
                "TooManyRequests",
                "Cannot evict pod as it would violate the pod's disruption budget.",
                details={"causes": [cause]},
            )
        held = self._store.get(PODS, target.namespace, target.name)
        if held is not None and held["status"].get("phase") in TERMINAL:
            self._collector.delete(PODS, target.namespace, target.name)
            return Answer(201, success())
        self.disrupt(
            target.namespace, target.name, "EvictionByEvictionAPI", "Eviction API: evicting"
        )
        self._collector.delete(PODS, target.namespace, target.name)
        return Answer(201, success())

    def disrupt(self, namespace: str, name: str, reason: str, message: str) -> None:
        """Set the condition of a pod which says that the pod will soon be removed, and why."""

        def change(obj: Object) -> None:
            set_condition(
                obj["status"],
                {
                    "type": "DisruptionTarget",
                    "observedGeneration": obj["metadata"].get("generation", 1),
                    "status": "True",
                    "lastProbeTime": None,
                    "lastTransitionTime": stamp(),
                    "reason": reason,
                    "message": message,
                },
            )

        self._store.update(PODS, namespace, name, change)

    def counts(self) -> Counter[str]:
        """Count the requests by verb and resource."""
        with self._lock:
            return Counter(f"{name_verb(r)} {r.resource}".strip() for r in self.requests)


def name_verb(request: Request) -> str:
    """Return the verb of a request, or "try" for a dry run."""
    return "try" if request.query.get("dryRun") == "All" else request.verb
