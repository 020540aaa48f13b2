"""Why hosts were lost, recorded while their pods still existed.

In: the pods of jobs, look after look; what jobs wait for. Out: a sentence for a host, or a job. A
JobSet removes pods as soon as it starts others, and when it has failed, often before anyone has
asked how they ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from kinetic._backends.kubernetes import pod_failures
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import Pod, Stage

_BY_THE_CLUSTER = frozenset(
    {
        JobCause.PREEMPTED,
        JobCause.EVICTED,
        JobCause.NODE_LOST,
        JobCause.OUT_OF_MEMORY,
        JobCause.START_ERROR,
    }
)

_ENDS = _BY_THE_CLUSTER | {
    JobCause.HOST_FAILED,
    JobCause.BAD_COMMAND,
    JobCause.DEADLINE,
}


class LossNotes:
    """The last reasons seen of hosts that the cluster took away."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], str] = {}
        self._waits: dict[str, str] = {}

    def note(self, job_id: str, pods: Iterable[Pod]) -> None:
        """Record why pods were lost; forget it for hosts that run again."""
        for pod in pods:
            found = pod_failures.why_lost([pod])
            if found is not None and found.kind in _BY_THE_CLUSTER:
                self._seen[job_id, pod.host] = found.sentence
            elif pod.stage is Stage.RUNNING and pod.is_ready and not pod.is_deleting:
                self._seen.pop((job_id, pod.host), None)

    def of(self, job_id: str, host: int) -> str:
        """Return why a host was lost, or ""."""
        return self._seen.get((job_id, host), "")

    def note_waiting(self, job_id: str, finding: JobDiagnosis | None) -> None:
        """Remember what a job waits for; forget it with None."""
        if finding is None:
            self._waits.pop(job_id, None)
        elif finding.kind not in _ENDS:
            self._waits[job_id] = finding.sentence

    def find_wait(self, job_id: str) -> str:
        """Return what a job waited for when it was last seen, or ""."""
        return self._waits.get(job_id, "")
