"""Why hosts were lost, as it was seen while their pods were there.

In: the pods of jobs, look after look. Out: a sentence for a host. A JobSet removes pods as soon as
it starts others, often before anybody has asked what became of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kinetic._backends.kubernetes import losses
from kinetic._backends.kubernetes.findings import Kind
from kinetic._backends.kubernetes.observed import Pod, Stage

_BY_THE_CLUSTER = frozenset(
    {Kind.PREEMPTED, Kind.EVICTED, Kind.NODE_LOST, Kind.OUT_OF_MEMORY, Kind.START_ERROR}
)


class Sightings:
    """What was seen last of hosts that the cluster had taken away."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], str] = {}

    def note(self, job_id: str, pods: Iterable[Pod]) -> None:
        """Remember why pods were lost; forget it of hosts that run again."""
        for pod in pods:
            found = losses.why_lost([pod])
            if found is not None and found.kind in _BY_THE_CLUSTER:
                self._seen[job_id, pod.host] = found.sentence
            elif pod.stage is Stage.RUNNING and pod.is_ready and not pod.is_deleting:
                self._seen.pop((job_id, pod.host), None)

    def of(self, job_id: str, host: int) -> str:
        """Return why a host was lost, or ""."""
        return self._seen.get((job_id, host), "")
