"""Whether a cluster accepts a job of this size: asked before anything is sent.

In: an `Api`, the number of hosts, the service account, what else is asked for. Out: nothing, or an
error. A good answer holds for a minute, in the whole process: many submissions ask once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kinetic._backends.kubernetes import checks
from kinetic._backends.kubernetes.addons import Asked
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.rights import NOTHING_ASKED
from kinetic.errors import PreflightError

COUNTS_S = 60.0
_well: dict[tuple[str, str, bool, str, Asked], float] = {}
"""The time of good answers, by server, namespace, whether jobs have several hosts, account, and
what else they ask for."""


def check(
    api: Api,
    hosts: int,
    service_account: str,
    asked: Asked = NOTHING_ASKED,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask the cluster, unless it was asked recently.

    Raises:
        PreflightError: it does not accept such jobs.
        BackendUnavailable: it does not answer.
    """
    question = (api.server, api.namespace, hosts > 1, service_account, asked)
    if clock() < _well.get(question, float("-inf")) + COUNTS_S:
        return
    facts = checks.gather_for(api, hosts, service_account=service_account, asked=asked)
    if facts.problem is not None:
        raise facts.problem
    if why := checks.why_not(facts, hosts=hosts):
        raise PreflightError(why)
    _well[question] = clock()
