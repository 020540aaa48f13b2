"""Questions to the leader of a job that cannot be reached over the network. They go through the
store: the client writes a request, and the leader writes its answer next to it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, KineticError, NotFound, WaitTimeout

ANSWER_S = 30.0
"""Longest wait in seconds for an answer: a leader reads requests in a bucket every 10 s."""
POLL_EVERY_S = 0.25


def stacks(
    store: Store,
    ref: JobRef,
    *,
    patience_s: float = ANSWER_S,
    ended: Callable[[], bool],
) -> dict[int, str]:
    """Ask the leader for the Python stacks of its hosts; return the stacks by host, {} if the job
    ends first. `ended` returns True if the job has ended.

    Raises:
        WaitTimeout: the leader has not answered within `patience_s` seconds.
    """
    place = _find_leader(store, ref)
    before = _read_answer(store, layout.AttemptKeys(*place).stacks)
    _send_request(store, layout.AttemptKeys(*place).stacks_wanted)
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        # Accept any new answer, even one to another process's request.
        answer = _read_answer(store, layout.AttemptKeys(*place).stacks)
        if answer["id"] != before["id"]:
            return {int(host): str(text) for host, text in answer["stacks"].items()}
        if ended():
            return {}
        time.sleep(POLL_EVERY_S)
    raise WaitTimeout(
        f"Host 0 of {ref.job_id} has not answered within {patience_s:g} s. It may still be "
        "starting: try again in a minute. To inspect a pod directly: `kubectl exec POD -- pip "
        "install py-spy`, then `kubectl exec POD -- py-spy dump --pid PID`."
    )


class ActivityPoll:
    """Asks the leader of a running job what its hosts are doing. Each read returns the newest
    answer and sends a new request."""

    def __init__(self, store: Store, ref: JobRef) -> None:
        self._store, self._ref = store, ref
        self._place: tuple[str, int] | None = None
        self._answered_id = ""
        self._activity: dict[str, Any] | None = None

    def read_answer(self) -> dict[str, Any] | None:
        """Return the newest answer, in the form of `Gang.snapshot`; None if there is none."""
        place = _find_leader(self._store, self._ref)
        answer = _read_answer(self._store, layout.AttemptKeys(*place).activity)
        if place != self._place:
            self._place, self._activity = place, None  # An answer already in the store may be old.
        elif answer["id"] == self._answered_id:
            return self._activity
        else:
            self._activity = answer["activity"]
        self._answered_id = answer["id"]
        try:
            _send_request(self._store, layout.AttemptKeys(*place).activity_wanted)
        except KineticError:
            self._place = None
            raise
        return self._activity


def _find_leader(store: Store, ref: JobRef) -> tuple[str, int]:
    """Return the id of the job whose leader answers, which for a call is its session, and the
    number of the attempt that it leads."""
    return ref.place.session or ref.job_id, attempts.find_newest(store, ref.job_id)


def _send_request(store: Store, key: str) -> None:
    store.put(key, json.dumps({"id": os.urandom(8).hex()}).encode())


def _read_answer(store: Store, key: str) -> dict[str, Any]:
    try:
        return record.parse(store.get(key))
    except (NotFound, CorruptRecord):
        return {"id": ""}
