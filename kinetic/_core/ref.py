"""The reference to a job: what is needed to find it again from any process.

In: a plan and where it went. Out: `JobRef`, a frozen value. Written before anything is created;
read by handles and backends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kinetic.errors import CorruptRecord


@dataclass(frozen=True)
class JobRef:
    """Where a job is and what it is called.

    Attributes:
        job_id: "job-" and 8 hex digits.
        backend: the backend that took the job: "local", "gke", "pathways" or "ray".
        requested_backend: the backend that the plan selected; differs when the local backend stands
            in.
        accelerator: canonical accelerator name.
        func_name: the function's name.
        display_name: what people see.
        created_at: seconds since the epoch.
        store_uri: root of the store, for example "/home/me/.local/share/kinetic" or "gs://bucket".
        hosts: hosts of the gang.
        project, cluster_name, zone, namespace, bucket_name, k8s_name, image_uri: of a cluster; ""
        locally.
        group_id, group_kind, group_index: of the batch that the job belongs to; None outside one.
        debug: whether the job waits for a debugger.
        output_dir: where the function leaves files; "" in references of older versions.
    """

    job_id: str
    backend: str
    requested_backend: str
    accelerator: str
    func_name: str
    display_name: str
    created_at: float
    store_uri: str
    hosts: int = 1
    project: str = ""
    cluster_name: str = ""
    zone: str = ""
    namespace: str = ""
    bucket_name: str = ""
    k8s_name: str = ""
    image_uri: str = ""
    group_id: str | None = None
    group_kind: str | None = None
    group_index: int | None = None
    debug: bool = False
    output_dir: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; fields that are None are left out."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JobRef:
        """Rebuild from `to_json`; unknown keys are ignored.

        Raises:
            CorruptRecord: a required field is missing or the document is not an object.
        """
        try:
            return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})
        except (TypeError, AttributeError) as error:
            raise CorruptRecord(f"The reference of the job is damaged: {error}.") from error


def new_job_id() -> str:
    """Return a fresh random id: "job-" and 8 hex digits."""
    import secrets  # reading references, as lists of jobs do, does without

    return f"job-{secrets.token_hex(4)}"
