"""The reference to a job: what is needed to find it again from any process.

In: a plan and where it went. Out: `JobRef`, a frozen value. Written before anything is created;
read by handles and backends.
"""

from __future__ import annotations

from typing import Any, Self

from kinetic._core import documents
from kinetic._core.layout import SCHEMA_VERSION
from kinetic._core.place import Place
from kinetic._core.values import dataclass
from kinetic.errors import UnsupportedVersion

_OF_THE_PLACE = {
    "backend": "backend",
    "requested_backend": "requested",
    "project": "project",
    "cluster_name": "cluster",
    "zone": "zone",
    "namespace": "namespace",
    "image_uri": "image",
    "address": "address",
}
"""The names of a place's fields among the attributes of a job."""
_IF_SET = ("address", "has_single_controller", "has_head")
NEWEST = "-"
"""Stands for the newest job wherever an id is expected."""
_BUCKET = "gs://"


@dataclass(frozen=True)
class JobRef(documents.Record, called="The reference of the job"):
    """Where a job is and what it is called.

    Attributes:
        job_id: "job-" and 8 hex digits.
        place: what runs it, and where; see `ATTRIBUTES` for the names of its fields here.
        accelerator: canonical accelerator name.
        func_name: the function's name.
        display_name: as displayed.
        created_at: seconds since the epoch.
        store_uri: root of the store, for example "/home/me/.local/share/kinetic" or "gs://bucket".
        hosts: hosts of the gang.
        k8s_name: the job's name in a cluster; "" locally.
        group_id, group_kind, group_index: of the batch that the job belongs to; None outside one.
        debug: whether the job waits for a debugger.
        has_single_controller, has_head: as of its plan.
        output_dir: where the function leaves files; "" in references of older versions.
        schema_version: of the layout of the job's records.
    """

    job_id: str
    place: Place
    accelerator: str
    func_name: str
    display_name: str
    created_at: float
    store_uri: str
    hosts: int = 1
    k8s_name: str = ""
    group_id: str | None = None
    group_kind: str | None = None
    group_index: int | None = None
    debug: bool = False
    has_single_controller: bool = False
    has_head: bool = False
    output_dir: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def backend(self) -> str:
        """The backend that runs the job."""
        return self.place.backend

    def attributes(self) -> dict[str, Any]:
        """Return everything known of the job as a flat dict with the names that scripts use,
        without None. `from_json` accepts it."""
        flat = vars(self) | {name: getattr(self.place, of) for name, of in _OF_THE_PLACE.items()}
        flat |= {"bucket_name": _bucket(self.store_uri), "place": None}
        flat |= {name: flat[name] or None for name in _IF_SET}
        return {name: value for name, value in flat.items() if value is not None}

    def check_version(self) -> None:
        """Refuse to read output and values in the layout of another version. Not needed to list,
        stop or remove a job.

        Raises:
            UnsupportedVersion: another version submitted the job.
        """
        if self.schema_version != SCHEMA_VERSION:
            raise UnsupportedVersion(
                f"{self.job_id} was submitted with another version of kinetic, which keeps output "
                f"and values in other places. Read them with that version; `kinetic jobs cleanup "
                f"{self.job_id}` removes the job."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that is stored; defaults are left out."""
        place = {"place": self.place.to_json(), "schema_version": self.schema_version}
        return documents.drop_defaults(self) | place

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild from `to_json`, or from `attributes`, as older versions stored them; unknown keys
        are ignored.

        Raises:
            CorruptRecord: a required field is missing or the document is not an object.
        """
        if isinstance(data, dict):
            data = {"schema_version": 1, "place": _place(data)} | data
        return super().from_json(data)


ATTRIBUTES = frozenset({*JobRef.__dataclass_fields__, *_OF_THE_PLACE, "bucket_name"})
"""The names of its fields and of the keys of `JobRef.attributes`."""


def _place(data: dict[str, Any]) -> dict[str, Any]:
    fields = {field: data[name] for name, field in _OF_THE_PLACE.items() if name in data}
    requested = fields.pop("requested", "")
    if requested != fields.get("backend"):
        fields["stands_in_for"] = requested
    return fields


def _bucket(store_uri: str) -> str:
    is_bucket = store_uri.startswith(_BUCKET)
    return store_uri.removeprefix(_BUCKET).partition("/")[0] if is_bucket else ""


def new_job_id() -> str:
    """Return a fresh random id: "job-" and 8 hex digits."""
    from uuid import uuid4  # reading references, as lists of jobs do, does without

    return f"job-{uuid4().hex[:8]}"
