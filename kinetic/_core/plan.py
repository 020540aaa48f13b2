"""The plan of a job: everything that a host must know, as one JSON document.

In: decisions of the planning step. Out: `Plan`, a frozen value, and the blobs it names.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Self

from kinetic._core.accelerators.topology import Topology
from kinetic._core.documents import Record
from kinetic._core.layout import SCHEMA_VERSION
from kinetic._core.options import Elastic, Options
from kinetic._core.place import Place
from kinetic._core.values import dataclass
from kinetic.errors import UnsupportedVersion

BUCKETS = "gs://"
HUB = "hf://"
FUSE_FOLDER = "/_kinetic/fuse-data"
"""Where a cluster mounts data in its pods."""
PROXY = "proxy"
"""JAX's name for the devices of Pathways."""


@dataclass(frozen=True)
class Blob:
    """A stored piece of content, named by what it contains.

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
        manifest: the list of its root, which names the lists of the folders inside; its digest is
            the digest of the tree.
        files: number of regular files.
        size_bytes: their total size.
    """

    manifest: Blob
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Dataset:
    """Data that the caller declared.

    Attributes:
        source: an absolute path on the caller's machine, or a URI.
        is_dir: whether it is a folder; otherwise a single file.
        tree: its content in the store; None for data that is used in place, or that hosts fetch
            themselves.
        mount: absolute path at which the function finds it; "" for an argument, which becomes
            whatever path it has on the host.
        fuse: whether it is mounted instead of copied.
        trusts_code: whether a data set of Hugging Face may run its own code.
        writable: whether the function can write to it.
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
    """Source without a file: a notebook's cell.

    Attributes:
        file: the file name in code objects compiled from it.
        title: as users know it: "Cell In[3]".
        source: its definitions; other lines are blank.
    """

    file: str
    title: str
    source: str


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds; None means no limit.

    Attributes:
        start_timeout_s: from submission until the function runs on every host; also how long hosts
            wait in JAX for others.
        timeout_s: from the start of the function until the job is stopped; in an elastic job the
            sum of all attempts, without waits between them.
        budget_s: for how long all attempts together may run on all slices, because of what those
            cost; on fewer slices for longer.
        budget: that limit, as users know it: "budget of $50.00 ($43.20 an hour, your price)".
        hang_timeout_s: longest time that a host may be stalled.
        grace_s: between SIGTERM and SIGKILL when the job is cancelled or times out.
        slice_away_s: how long a simulated slice that was lost stays away.
        still_notice_s: how long all hosts stand still before the output says who holds them up.
        debug_wait_s: how long a debug job waits for a debugger before it starts without one.
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
    """What all slices of a job cost.

    Attributes:
        usd_per_hour: in US dollars, as long as no slice is lost.
        origin: where the figure is from, for users.
        is_simulated: the job costs nothing: this is what real slices would.
    """

    usd_per_hour: float
    origin: str
    is_simulated: bool = False

    @property
    def rate(self) -> str:
        """As users are told: "$43.20 an hour, list price, us-central1"."""
        from kinetic._core.accelerators.prices import in_usd  # not needed on hosts

        return f"{in_usd(self.usd_per_hour)} an hour, {self.origin}"

    def for_seconds(self, seconds: float) -> float:
        """Return what this time costs, in US dollars."""
        return 0.0 if self.is_simulated else self.usd_per_hour / 3600 * seconds


@dataclass(frozen=True)
class Versions:
    """Versions of the software that made the payload; hosts compare them with their own."""

    python: str
    cloudpickle: str
    kinetic: str


def needs_jax(options: Options) -> bool:
    """Whether JAX joins what runs the function: several hosts, or the devices of all of them."""
    has_hosts = options.most_slices * options.topology.hosts > 1
    return (has_hosts or options.controller == "single") and options.joins_jax in (True, "lazy")


@dataclass(frozen=True)
class Plan(Record, called="The plan of the job"):
    """Everything that a host must know about a job.

    Attributes:
        job_id: "job-" and 8 hex digits.
        name: as displayed: the function's qualified name or the command.
        place: what runs it, and where.
        options: of the decorator and the settings, as far as hosts and backends need them; others
            became `place`, `limits`, `output_dir`, `secrets`, `captured`, `data` and `name`.
        payload: the pickled function and arguments.
        function: the pickled function, if the payload holds only arguments because the calls of a
            batch share it; else None.
        runtime: kinetic itself, as an archive, for hosts that have nothing; else None.
        requirements: what such hosts install, as a requirements.txt; else None.
        tree: the source tree, or None when nothing is shipped.
        data: declared with `kinetic.Data`; the payload refers to arguments by their index here.
        entry_rel: directory of the function's file, relative to the tree; "" is the root.
        cwd_rel: working directory relative to the tree, or None when the caller was outside it.
        sys_path_rel: entries of the caller's sys.path inside the tree, relative to it, in order.
        editable_rel: folders of the tree from which the caller imports what is installed editable,
            relative to it; they come before what is installed.
        cells: source without a file, of the code in the payload.
        client_root: absolute path of the tree on the caller's machine; used to map file names in
            tracebacks.
        secrets: names of variables whose values travel separately from the plan.
        output_dir: where the function may leave files (`KINETIC_OUTPUT_DIR`), or None for the
            default.
        limits: how long things may take.
        jax_options: options of `jax.config` set by the caller, with their values.
        captured: names of variables that travel in the payload.
        versions: of what made the payload.
        created_at: seconds since the epoch.
        labels: free key-value pairs (batch group, tags).
        is_verbose: whether hosts also log what needs nobody's attention.
        cost: what all slices cost; None if that is not known.
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

    @property
    def topology(self) -> Topology:
        """Shape of each slice."""
        return self.options.topology

    @property
    def hosts(self) -> int:
        """Hosts of the whole gang, over all slices: those that run the function, or a single one
        for all."""
        return 1 if self.has_single_controller else self.options.most_slices * self.topology.hosts

    @property
    def has_single_controller(self) -> bool:
        """Whether one process has the devices of all slices: through Pathways on a cluster."""
        return self.options.controller == "single"

    @property
    def has_head(self) -> bool:
        """Whether a program that runs no function leads the gang, so that any host may be lost. On
        Ray it always does: hosts come and go one by one there."""
        is_replaced = self.elastic_gang is not None and not self.place.is_supervised
        return is_replaced or bool(self.place.address)

    @property
    def devices_per_host(self) -> int:
        """Devices of each process that runs the function."""
        return self.options.most_slices * self.topology.chips // self.hosts

    @property
    def platform(self) -> str:
        """What JAX calls the devices: cpu, gpu, tpu, or proxy where Pathways has them."""
        return PROXY if self.has_single_controller else self.topology.kind

    @property
    def most_attempts(self) -> int:
        """How many attempts there may be, if nothing happens that counts against no limit."""
        elastic = self.options.elastic
        return 1 + self.options.retries + (0 if elastic is None else elastic.max_failures)

    @property
    def elastic_gang(self) -> Elastic | None:
        """What an elastic job does when hosts of a slice are lost; None for any other job."""
        return None if self.has_single_controller else self.options.elastic

    @property
    def elastic_controller(self) -> Elastic | None:
        """What the one process of an elastic job does when a slice is lost; None for any other."""
        return self.options.elastic if self.has_single_controller else None

    def cluster_mounts(self) -> dict[int, str]:
        """Return the folders that the cluster mounts in each pod: of the data of these numbers, or,
        for a single file, of the folder around it."""
        return {
            number: data.mount if data.mount and data.is_dir else f"{FUSE_FOLDER}/{number}"
            for number, data in enumerate(self.data)
            if self.place.has_pods and data.fuse and data.source.startswith(BUCKETS)
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal value."""
        return super().to_json() | {
            "schema_version": SCHEMA_VERSION,
            "place": self.place.to_json(),
            "options": self.options.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild from `to_json`.

        Raises:
            UnsupportedVersion: another version of kinetic wrote it.
            CorruptRecord: the document is not a plan.
        """
        version = data.get("schema_version") if isinstance(data, dict) else SCHEMA_VERSION
        if version is not None and version != SCHEMA_VERSION:
            raise UnsupportedVersion(
                f"The plan has schema version {version!r}; this kinetic reads {SCHEMA_VERSION}. "
                "Use the version of kinetic that submitted the job."
            )
        return super().from_json(data)
