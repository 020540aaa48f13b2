"""Event objects, in the two formats that components use. A repeated event only adds to a count."""

from __future__ import annotations

import time

from doubles.cluster.kinds import EVENTS
from doubles.cluster.objects import Object, micro_stamp, stamp
from doubles.cluster.store import Store

NEW_SHAPE = {
    "default-scheduler": ("Binding", "Scheduling"),
    "jobset": ("Reconciling", "Reconciling"),
    "kueue-admission": ("Reconciling", "Reconciling"),
    "jobset-controller": ("Reconciling", "Reconciling"),
}
"""The components whose events have `eventTime`, with the actions of normal events and warnings."""


class Recorder:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[tuple[str, ...], str] = {}
        self._last_ns = 0

    def say(
        self,
        component: str,
        about: Object,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        field: str = "",
        host: str = "",
    ) -> None:
        meta, kind = about["metadata"], "Warning" if warning else "Normal"
        namespace = meta.get("namespace") or "default"
        key = (component, meta["uid"], kind, reason, message, field)
        held = self._names.get(key)
        if held is not None and self._store.get(EVENTS, namespace, held) is not None:
            self._store.update(EVENTS, namespace, held, self._count_up)
            return
        self._last_ns = now_ns = max(time.time_ns(), self._last_ns + 1)
        now = now_ns / 1e9
        involved = {"kind": about["kind"], "namespace": meta.get("namespace"), "name": meta["name"]}
        involved |= {"uid": meta["uid"], "apiVersion": about["apiVersion"]}
        involved |= {"resourceVersion": meta["resourceVersion"]} | (
            {"fieldPath": field} if field else {}
        )
        event: Object = {
            "metadata": {"name": f"{meta['name']}.{now_ns:x}", "namespace": namespace},
            "involvedObject": {k: v for k, v in involved.items() if v is not None},
            "reason": reason,
            "message": message[:1024],
        }
        if component in NEW_SHAPE:
            event |= {
                "source": {},
                "firstTimestamp": None,
                "lastTimestamp": None,
                "type": kind,
                "eventTime": micro_stamp(now),
                "action": NEW_SHAPE[component][warning],
                "reportingComponent": component,
                "reportingInstance": f"{component}-control-plane",
            }
        else:
            event |= {
                "source": {"component": component} | ({"host": host} if host else {}),
                "firstTimestamp": stamp(now),
                "lastTimestamp": stamp(now),
                "count": 1,
                "type": kind,
                "eventTime": None,
                "reportingComponent": component,
                "reportingInstance": host,
            }
        self._names[key] = self._store.create(EVENTS, event)["metadata"]["name"]

    @staticmethod
    def _count_up(event: Object) -> None:
        if event["eventTime"] is None:
            event["count"] += 1
            event["lastTimestamp"] = stamp()
        else:
            count = (event.get("series") or {}).get("count", 1) + 1
            event["series"] = {"count": count, "lastObservedTime": micro_stamp(time.time())}
