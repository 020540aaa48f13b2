"""Objects of the cluster, with their versions and their history.

Objects are shared: never change what `get` and `all` return. Listeners are called for each change,
in order, while the lock is held, so they may only add items to the engine.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from doubles.cluster.kinds import PODS, Resource
from doubles.cluster.objects import (
    Object,
    clone,
    controller_uid,
    owner_uids,
    random_suffix,
    stamp,
)
from doubles.cluster.problems import already_exists, conflict, not_found

Key = tuple[Resource, str, str]
"""A resource, a namespace ("" for none) and a name."""

KEPT_EVENTS = 5_000


@dataclass
class Change:
    """One event of a watch: the new object, and the version before the change."""

    version: int
    type: str
    resource: Resource
    object: Object
    before: Object | None
    _line: bytes | None = field(default=None, repr=False)

    def line(self) -> bytes:
        """Return the event as a line of a watch. It is encoded once, for all watches."""
        if self._line is None:
            self._line = event_line(self.type, self.object)
        return self._line


def event_line(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"


class Store:
    """All objects of a cluster."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 400
        self.listeners: list[Callable[[Change], None]] = []
        self.closed = False
        self._objects: dict[Resource, dict[tuple[str, str], Object]] = defaultdict(dict)
        self._owned: dict[str, set[Key]] = defaultdict(set)
        self._uids: dict[str, Key] = {}
        self._history: dict[Resource, deque[Change]] = defaultdict(deque)
        self._compacted: dict[Resource, int] = defaultdict(lambda: self.first)
        self.first = self.version

    # --- reading

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.lock:
            return self._objects[resource].get((namespace, name))

    def all(self, resource: Resource, namespace: str = "") -> list[Object]:
        with self.lock:
            held = self._objects[resource]
            return [obj for (space, _), obj in sorted(held.items()) if namespace in ("", space)]

    def by_uid(self, uid: str) -> Object | None:
        with self.lock:
            key = self._uids.get(uid)
            return self.get(*key) if key else None

    def owned(self, uid: str) -> list[tuple[Key, Object]]:
        """Return the objects that name this uid as an owner."""
        with self.lock:
            keys = sorted(self._owned.get(uid, ()), key=lambda key: (key[0].full, *key[1:]))
            return [(key, obj) for key in keys if (obj := self.get(*key)) is not None]

    def concerned(
        self, change: Change, resource: Resource, children: Resource
    ) -> tuple[str, str] | None:
        """Return the namespace and name of the object of kind `resource` that a change concerns:
        the changed object itself, or its owner."""
        target: Object | None = None
        if change.resource is resource and change.type != "DELETED":
            target = change.object
        elif change.resource is children and (uid := controller_uid(change.object)):
            owner = self.by_uid(uid)
            target = owner if owner is not None and owner["kind"] == resource.kind else None
        return (
            None
            if target is None
            else (target["metadata"]["namespace"], target["metadata"]["name"])
        )

    def owners(self) -> list[str]:
        with self.lock:
            return [uid for uid, keys in self._owned.items() if keys]

    def since(self, resource: Resource, version: int) -> list[Change] | None:
        """Return the changes after a version; None if the history does not reach back to it."""
        with self.lock:
            if version < self._compacted[resource]:
                return None
            history = self._history[resource]
            if not history or history[-1].version <= version:
                return []
            changes: list[Change] = []
            for change in reversed(history):
                if change.version <= version:
                    break
                changes.append(change)
            return changes[::-1]

    def oldest(self, resource: Resource) -> int:
        return self._compacted[resource]

    def compact(self) -> None:
        """Drop the history: watches that start at earlier versions must list again."""
        with self.lock:
            self.first = self.version
            for resource in list(self._history):
                self._history[resource].clear()
                self._compacted[resource] = self.version

    # --- writing

    def create(self, resource: Resource, obj: Object, *, dry: bool = False) -> Object:
        """Store a new object, with the metadata that a server adds."""
        with self.lock:
            meta = obj["metadata"]
            if not meta.get("name") and meta.get("generateName"):
                meta["name"] = meta["generateName"][:58] + random_suffix()
            place = (meta.get("namespace", "") if resource.namespaced else "", meta["name"])
            held = self._objects[resource].get(place)
            if held is not None:
                leaving = "deletionTimestamp" in held["metadata"]
                raise already_exists(resource, place[1], leaving=leaving)
            meta.setdefault("uid", str(uuid.uuid4()))
            meta["creationTimestamp"] = stamp()
            if resource.counted:
                meta["generation"] = 1
            obj = {"kind": resource.kind, "apiVersion": resource.api_version} | obj
            if dry:
                return obj
            self._put(resource, place, "ADDED", obj, None)
            return obj

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Object], Object | None],
        *,
        version: str | None = None,
        uid: str | None = None,
    ) -> Object:
        """Store a changed copy of an object, unless it is equal. Remove an object that is being
        deleted once it has no finalizers."""
        with self.lock:
            old = self._objects[resource].get((namespace, name))
            if old is None or (uid is not None and old["metadata"]["uid"] != uid):
                raise not_found(resource, name)
            if version is not None and old["metadata"]["resourceVersion"] != version:
                raise conflict(resource, name)
            new = clone(old)
            new = change(new) or new
            if new == old and "deletionTimestamp" not in old["metadata"]:
                return old
            bound = resource is PODS  # Binding a pod does not change its generation.
            if resource.counted and not bound and new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            if new != old:
                self._put(resource, (namespace, name), "MODIFIED", new, old)
            if self._may_go(new):
                self.remove(resource, namespace, name)
            return new

    @staticmethod
    def _may_go(obj: Object) -> bool:
        meta = obj["metadata"]
        return (
            "deletionTimestamp" in meta
            and not meta.get("finalizers")
            and not meta.get("deletionGracePeriodSeconds")
        )

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        with self.lock:
            old = self._objects[resource].pop((namespace, name))
            uid = old["metadata"]["uid"]
            self._uids.pop(uid, None)
            for owner in owner_uids(old):
                self._owned[owner].discard((resource, namespace, name))
            removed = old | {"metadata": dict(old["metadata"])}
            self._tell(resource, "DELETED", removed, old)

    def _put(
        self, resource: Resource, place: tuple[str, str], kind: str, obj: Object, old: Object | None
    ) -> None:
        key = (resource, *place)
        self._objects[resource][place] = obj
        self._uids[obj["metadata"]["uid"]] = key
        for owner in owner_uids(old) if old else ():
            self._owned[owner].discard(key)
        for owner in owner_uids(obj):
            self._owned[owner].add(key)
        self._tell(resource, kind, obj, old)

    def _tell(self, resource: Resource, kind: str, obj: Object, old: Object | None) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, kind, resource, obj, old)
        history = self._history[resource]
        history.append(change)
        if len(history) > KEPT_EVENTS:
            self._compacted[resource] = history.popleft().version
        for listener in self.listeners:
            listener(change)
        self.changed.notify_all()

    # --- waiting

    def wait(self, beyond: int, timeout: float) -> None:
        """Wait for a change after version `beyond`, at most `timeout` seconds."""
        until = time.monotonic() + timeout
        with self.lock:
            while self.version <= beyond and not self.closed:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self.changed.wait(left_s)

    def wake(self) -> None:
        with self.lock:
            self.changed.notify_all()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.changed.notify_all()
