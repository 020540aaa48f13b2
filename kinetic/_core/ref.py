"""The reference to a job: everything needed to reach the job from any process.

The reference is stored before anything else of the job is created. Handles and backends read it.
"""

from __future__ import annotations

from typing import Any, Self

from kinetic._core import documents
from kinetic._core.layout import SCHEMA_VERSION
from kinetic._core.place import Place
from kinetic._core.values import dataclass
from kinetic.errors import UnsupportedVersion

_PLACE_FIELDS = {
    "backend": "backend",
    "requested_backend": "requested",
    "project": "project",
    "cluster_name": "cluster",
    "zone": "zone",
    "namespace": "namespace",
    "image_uri": "image",
    "address": "address",
    "session": "session",
}
"""Fields of `Place`, by their names among the attributes of a job."""
_IF_SET = ("address", "session", "session_name", "has_single_controller", "has_head")
NEWEST = "-"
"""Stands for the newest job wherever an id is expected."""
_BUCKET = "gs://"


@dataclass(frozen=True)
class JobRef(documents.Record, called="The reference of the job"):
    """The place and the names of a job.

    Attributes:
        job_id: "job-" and 8 hex digits.
        place: the backend, cluster, zone and namespace in which the job runs.
        accelerator: canonical accelerator name.
        func_name: the function's name.
        display_name: the job's name for users.
        created_at: seconds since the epoch.
        store_uri: root of the store, for example "/home/me/.local/share/kinetic" or "gs://bucket".
        hosts: number of hosts of the gang.
        k8s_name: the job's name in a cluster; "" locally.
        group_id, group_kind, group_index: id and kind of the job's batch, and the job's index in
            it; None outside a batch.
        debug: True if the job waits for a debugger.
        has_single_controller, has_head: the same as in the plan.
        session_name: name of the session that the job holds slices for; "" for any other job.
        output_dir: folder of the function's files; "" in references of older versions.
        schema_version: version of the layout of the job's records.
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
    session_name: str = ""
    output_dir: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def backend(self) -> str:
        """The backend that runs the job."""
        return self.place.backend

    def attributes(self) -> dict[str, Any]:
        """Return the reference as a flat dict with the names that scripts use, without None.
        `from_json` accepts it."""
        flat = vars(self) | {name: getattr(self.place, of) for name, of in _PLACE_FIELDS.items()}
        flat |= {"bucket_name": _parse_bucket(self.store_uri), "place": None}
        flat |= {name: flat[name] or None for name in _IF_SET}
        return {name: value for name, value in flat.items() if value is not None}

    def check_version(self) -> None:
        """Refuse output and values that another version stored. Listing, stopping and removing a
        job work without this check.

        Raises:
            UnsupportedVersion: another version submitted the job.
        """
        if self.schema_version != SCHEMA_VERSION:
            which = "an older" if self.schema_version < SCHEMA_VERSION else "a newer"
            raise UnsupportedVersion(
                f"{self.job_id} was submitted with {which} version of kinetic, whose records have "
                f"format {self.schema_version}; this version reads format {SCHEMA_VERSION}. Read "
                f"output and values with that version; `kinetic jobs cleanup {self.job_id}` "
                "removes the job."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to store, without defaults."""
        place = {"place": self.place.to_json(), "schema_version": self.schema_version}
        return documents.drop_defaults(self) | place

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild a reference from `to_json`, or from `attributes`, which older versions stored.
        Unknown keys are ignored.

        Raises:
            CorruptRecord: a required field is missing or the document is not an object.
        """
        if isinstance(data, dict):
            data = {"schema_version": 1, "place": _build_place(data)} | data
        return super().from_json(data)


ATTRIBUTES = frozenset({*JobRef.__dataclass_fields__, *_PLACE_FIELDS, "bucket_name"})
"""Names of the fields of `JobRef` and of the keys of `JobRef.attributes`."""


def _build_place(data: dict[str, Any]) -> dict[str, Any]:
    fields = {field: data[name] for name, field in _PLACE_FIELDS.items() if name in data}
    requested = fields.pop("requested", "")
    if requested != fields.get("backend"):
        fields["stands_in_for"] = requested
    return fields


def _parse_bucket(store_uri: str) -> str:
    is_bucket = store_uri.startswith(_BUCKET)
    return store_uri.removeprefix(_BUCKET).partition("/")[0] if is_bucket else ""


def new_job_id() -> str:
    """Return a fresh random id: "job-" and 8 hex digits."""
    from uuid import uuid4  # Lists of jobs import this module and need no ids.

    return f"job-{uuid4().hex[:8]}"
