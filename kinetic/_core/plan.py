"""The plan of a job: everything that a host must know, as one JSON document."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Self

from kinetic._core.accelerators.topology import Topology
from kinetic._core.documents import Record
from kinetic._core.layout import SCHEMA_VERSION
from kinetic._core.options import Elastic, Options
from kinetic._core.place import Place
from kinetic._core.session import Session
from kinetic._core.values import dataclass
from kinetic.errors import UnsupportedVersion

BUCKETS = "gs://"
HUB = "hf://"
FUSE_FOLDER = "/_kinetic/fuse-data"
"""Folder in which a cluster mounts data in its pods."""
PROXY = "proxy"
"""JAX's name for the devices of Pathways."""


@dataclass(frozen=True)
class Blob:
    """A stored piece of content, named by its digest.

    Attributes:
        digest: SHA-256 of the content, 64 hex digits.
        size_bytes: length of the content.
    """

    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Tree:
    """A source tree in the store, and its size.

    Attributes:
        manifest: the flat list of the tree's entries (`_source.manifest`); its digest is the tree's
            digest.
        files: number of regular files.
        size_bytes: total size of the files.
    """

    manifest: Blob
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Dataset:
    """Data that the caller declared.

    Attributes:
        source: an absolute path on the caller's machine, or a URI.
        is_dir: True for a folder, False for a single file.
        tree: the data's content in the store; None if hosts use the source itself, or fetch it
            themselves.
        mount: absolute path of the data for the function; "" for an argument, whose path the host
            chooses.
        fuse: True if the data is mounted instead of copied.
        trusts_code: True if a data set of Hugging Face may run its own code.
        writable: True if the function can write to the data.
    """

    source: str
    is_dir: bool
    tree: Tree | None = None
    mount: str = ""
    fuse: bool = False
    trusts_code: bool = False
    writable: bool = False


@dataclass(frozen=True)
class Cell:
    """A notebook's cell: source without a file.

    Attributes:
        file: file name in code objects compiled from the cell.
        title: the cell's name for users: "Cell In[3]".
        source: the cell's definitions; other lines are blank.
    """

    file: str
    title: str
    source: str


@dataclass(frozen=True)
class Limits:
    """The time limits of a job, in seconds; None means no limit.

    Attributes:
        start_timeout_s: time from submission until the function runs on every host; also the time
            that hosts wait in JAX for others.
        timeout_s: time from the start of the function until the job is stopped; in an elastic job
            the sum of all attempts, without waits between them.
        budget_s: time that the budget pays for if all slices run, over all attempts; the budget
            lasts longer on fewer slices.
        budget: text about the budget for users: "budget of $50.00 ($43.20 an hour, your price)".
        hang_timeout_s: longest time that a host may be stalled.
        grace_s: time between SIGTERM and SIGKILL when the job is cancelled or times out.
        slice_away_s: time for which a lost simulated slice stays away.
        still_notice_s: time that all hosts stand still before a notice names the hosts that hold
            them up.
        debug_wait_s: time that a debug job waits for a debugger before it starts without one.
    """

    start_timeout_s: float = 600.0
    timeout_s: float | None = None
    budget_s: float | None = None
    budget: str = ""
    hang_timeout_s: float | None = None
    grace_s: float = 5.0
    slice_away_s: float = 0.0
    still_notice_s: float = 60.0
    debug_wait_s: float = 600.0


@dataclass(frozen=True)
class Cost:
    """The price of all slices of a job.

    Attributes:
        usd_per_hour: US dollars per hour, while no slice is lost.
        origin: source of the figure, for users.
        is_simulated: True if the job costs nothing, and the figure is the price of real slices.
    """

    usd_per_hour: float
    origin: str
    is_simulated: bool = False

    @property
    def rate(self) -> str:
        """The price as text: "$43.20 an hour, list price, us-central1"."""
        from kinetic._core.accelerators.prices import in_usd  # not needed on hosts

        return f"{in_usd(self.usd_per_hour)} an hour, {self.origin}"

    def for_seconds(self, seconds: float) -> float:
        """Return the cost of this time, in US dollars."""
        return 0.0 if self.is_simulated else self.usd_per_hour / 3600 * seconds


@dataclass(frozen=True)
class Versions:
    """Versions of the software that pickled the payload; hosts compare them with their own."""

    python: str
    cloudpickle: str
    kinetic: str


def needs_jax(options: Options) -> bool:
    """True if processes of the function join in JAX, or if one process has all devices."""
    has_hosts = options.most_slices * options.topology.hosts > 1
    return (has_hosts or options.controller == "single") and options.joins_jax in (True, "lazy")


@dataclass(frozen=True)
class Plan(Record, called="The plan of the job"):
    """Everything that a host must know about a job.

    Attributes:
        job_id: "job-" and 8 hex digits.
        name: display name: the function's qualified name or the command.
        place: the backend, cluster, zone and namespace in which the job runs.
        options: the options that hosts and backends need; the others became `place`, `limits`,
            `output_dir`, `secrets`, `captured`, `data` and `name`.
        payload: the pickled function and arguments.
        function: the pickled function, if the payload holds only arguments because the calls of a
            batch share it; else None.
        runtime: archive of kinetic itself, for hosts whose image lacks kinetic; else None.
        requirements: packages that such hosts install, as a requirements.txt; else None.
        tree: the source tree, or None when nothing is shipped.
        data: data declared with `kinetic.Data`; the payload refers to it by index.
        entry_rel: directory of the function's file, relative to the tree; "" is the root.
        cwd_rel: working directory relative to the tree, or None when the caller was outside it.
        sys_path_rel: entries of the caller's sys.path inside the tree, relative to it, in order.
        editable_rel: folders of the tree with the caller's editable installs, relative to the
            tree; hosts import from them before their installed packages.
        cells: notebook cells with the code in the payload.
        client_root: absolute path of the tree on the caller's machine; used to map file names in
            tracebacks.
        secrets: names of variables whose values travel separately from the plan.
        output_dir: folder for the function's files (`KINETIC_OUTPUT_DIR`), or None for the
            default.
        limits: the time limits.
        jax_options: options of `jax.config` set by the caller, with their values.
        captured: names of variables that travel in the payload.
        versions: versions of the software that pickled the payload.
        created_at: seconds since the epoch.
        labels: free key-value pairs (batch group, tags).
        is_verbose: True if hosts also log messages that need no attention.
        cost: the price of all slices; None if unknown.
        holds: the terms of a session, a job that holds its slices for calls; None for any other
            job.
    """

    job_id: str
    name: str
    place: Place
    options: Options
    payload: Blob
    versions: Versions
    created_at: float
    function: Blob | None = None
    runtime: Blob | None = None
    requirements: Blob | None = None
    tree: Tree | None = None
    data: tuple[Dataset, ...] = ()
    entry_rel: str = ""
    cwd_rel: str | None = None
    sys_path_rel: tuple[str, ...] = ()
    editable_rel: tuple[str, ...] = ()
    client_root: str = ""
    cells: tuple[Cell, ...] = ()
    secrets: tuple[str, ...] = ()
    output_dir: str | None = None
    limits: Limits = field(default_factory=Limits)
    jax_options: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    is_verbose: bool = False
    cost: Cost | None = None
    holds: Session | None = None

    @property
    def topology(self) -> Topology:
        """Shape of each slice."""
        return self.options.topology

    @property
    def hosts(self) -> int:
        """Number of hosts of the gang, over all slices; 1 with a single controller."""
        return 1 if self.has_single_controller else self.options.most_slices * self.topology.hosts

    @property
    def has_single_controller(self) -> bool:
        """True if one process has the devices of all slices, through Pathways on a cluster."""
        return self.options.controller == "single"

    @property
    def has_head(self) -> bool:
        """True if a program that runs no function leads the gang, so that any host may be lost. Ray
        always needs such a head, because its hosts come and go one by one."""
        is_replaced = self.elastic_gang is not None and not self.place.is_supervised
        return is_replaced or bool(self.place.address)

    @property
    def devices_per_host(self) -> int:
        """Number of devices of each process that runs the function."""
        return self.options.most_slices * self.topology.chips // self.hosts

    @property
    def platform(self) -> str:
        """JAX's name for the devices: cpu, gpu, tpu, or proxy with Pathways."""
        return PROXY if self.has_single_controller else self.topology.kind

    @property
    def most_attempts(self) -> int:
        """Most attempts of the job, without attempts that ended because a host was taken away."""
        elastic = self.options.elastic
        return 1 + self.options.retries + (0 if elastic is None else elastic.max_failures)

    @property
    def elastic_gang(self) -> Elastic | None:
        """The policy of an elastic job whose slices have hosts; None for any other job."""
        return None if self.has_single_controller else self.options.elastic

    @property
    def elastic_controller(self) -> Elastic | None:
        """The policy of an elastic job with a single controller; None for any other job."""
        return self.options.elastic if self.has_single_controller else None

    def cluster_mounts(self) -> dict[int, str]:
        """Return the folders that the cluster mounts in each pod, by index of the data. For a
        single file, the folder around it is mounted."""
        return {
            number: data.mount if data.mount and data.is_dir else f"{FUSE_FOLDER}/{number}"
            for number, data in enumerate(self.data)
            if self.place.has_pods and data.fuse and data.source.startswith(BUCKETS)
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` turns back into an equal value."""
        return super().to_json() | {
            "schema_version": SCHEMA_VERSION,
            "place": self.place.to_json(),
            "options": self.options.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild a plan from `to_json`.

        Raises:
            UnsupportedVersion: another version of kinetic wrote the plan.
            CorruptRecord: the document is not a plan.
        """
        version = data.get("schema_version") if isinstance(data, dict) else SCHEMA_VERSION
        if version is not None and version != SCHEMA_VERSION:
            raise UnsupportedVersion(
                f"{data.get('job_id')} was submitted with another version of kinetic: its plan has "
                f"format {version!r}, and this version reads format {SCHEMA_VERSION}. Use the "
                "version that submitted the job."
            )
        return super().from_json(data)
