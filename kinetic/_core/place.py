"""Where a job goes: all that it takes to reach what runs it, from any process.

In: what was asked for and what the settings say. Out: `Place`, a frozen value. The plan has it, the
job's reference has it too, and a backend is made from it and a store.
"""

from __future__ import annotations

from typing import Any

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

BACKENDS = ("gke", "pathways", "local", "programs", "ray")


@dataclass(frozen=True)
class Place:
    """Where a job goes. What does not apply, or was not said, is "".

    Attributes:
        backend: what runs the job, one of `BACKENDS`.
        stands_in_for: the backend that was asked for, where the local one simulates it.
        cluster: the cluster's name, or the address of one that has no name.
        project, zone: the cloud project and zone of the cluster.
        namespace: the namespace in the cluster.
        image: what the hosts run.
        image_repo: where prebuilt images are taken from.
        queue: the queue that admits the job.
    """

    backend: str
    stands_in_for: str = ""
    cluster: str = ""
    project: str = ""
    zone: str = ""
    namespace: str = ""
    image: str = ""
    image_repo: str = ""
    queue: str = ""

    @property
    def requested(self) -> str:
        """The backend that was asked for, whether or not another one stands in for it."""
        return self.stands_in_for or self.backend

    @property
    def is_supervised(self) -> bool:
        """Whether a process beside the hosts leads a gang; elsewhere host 0 does."""
        return self.backend == "local"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; what is "" is left out."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Place:
        """Rebuild from `to_json`; unknown keys are ignored.

        Raises:
            CorruptRecord: it is not an object, names no backend, or holds something that is no
                text.
        """
        try:
            known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
            place = cls(**known)
        except (TypeError, AttributeError) as error:
            raise CorruptRecord(f"The place of the job is damaged: {error}.") from error
        wrong = next((k for k, v in known.items() if not isinstance(v, str)), None)
        if wrong is not None:
            raise CorruptRecord(f"The place of the job is damaged: {wrong} is {known[wrong]!r}.")
        return place
