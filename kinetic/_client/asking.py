"""Asking a running job's leader where no connection reaches it: a request and its answer in the
store.

In: a store, a reference. Out: the Python stacks of all hosts.
"""

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
from kinetic.errors import CorruptRecord, NotFound, WaitTimeout

ANSWER_S = 30.0
"""How long a leader may take: in a bucket it looks for requests every ten seconds."""
LOOK_EVERY_S = 0.25


def stacks(
    store: Store,
    ref: JobRef,
    *,
    patience_s: float = ANSWER_S,
    ended: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> dict[int, str]:
    """Return the stacks of the hosts that answered; {} once the job has ended.

    Raises:
        WaitTimeout: the leader has not answered.
    """
    place = ref.job_id, attempts.newest(store, ref.job_id)
    before, asked = _answer(store, place), os.urandom(8).hex()
    store.put(layout.stacks_wanted(*place), json.dumps({"id": asked}).encode())
    give_up_at = clock() + patience_s
    while clock() < give_up_at:
        # The answer to another process's later request serves as well.
        found = _answer(store, place)
        if found["id"] != before["id"]:
            return {int(host): str(text) for host, text in found["stacks"].items()}
        if ended():
            return {}
        pause(LOOK_EVERY_S)
    raise WaitTimeout(
        f"Host 0 of {ref.job_id} has not answered within {patience_s:g} s. It may be starting: try "
        "again. Or look into a pod yourself: `kubectl exec POD -- pip install py-spy`, then "
        "`kubectl exec POD -- py-spy dump --pid PID`."
    )


def _answer(store: Store, place: tuple[str, int]) -> dict[str, Any]:
    try:
        return record.parse(store.get(layout.stacks(*place)))
    except (NotFound, CorruptRecord):
        return {"id": ""}
