"""The options of a decorated function: one table for `kinetic.run`, `with_options`, the command
line and the plan.

In: options as users write them. Out: `Options`, all valid, frozen; as JSON in the plan.

To add an option, add a field to `Options`, and its type for type checkers to `Keywords`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from kinetic._core import checks, documents
from kinetic._core.accelerators.topology import Topology
from kinetic._core.checks import Comparison, Controller, Joins, OnSliceLoss
from kinetic._core.option_rows import Flag, Option, Takes, option
from kinetic._core.values import dataclass

if TYPE_CHECKING:
    from kinetic._core.checks import NetworkDevices
    from kinetic._core.duration import Duration


class Keywords(TypedDict, total=False):
    """The keyword-only arguments of `kinetic.run`, for type checkers."""

    name: str | None
    slices: int | tuple[int, int]
    max_failures: int | None
    slice_timeout: Duration | None
    start_wait: Duration | None
    on_slice_loss: OnSliceLoss | None
    controller: Controller
    compile_check: bool
    queue: str | None
    session: str | None
    priority: str | None
    reservation: str | None
    local_storage: str | None
    network_devices: NetworkDevices | None
    service_account: str | None
    cpu: float | str | None
    memory: str | None
    shm: str | None
    privileged: bool
    pathways_flags: Mapping[str, Mapping[str, object] | str] | None
    timeout: Duration | None
    budget: float | str | None
    start_timeout: Duration | None
    hang_timeout: Duration | None
    retries: int
    env: Mapping[str, str] | None
    secrets: Sequence[str] | None
    all_hosts: bool
    keep: bool | None
    joins_jax: Joins
    compare_programs: Comparison


def _accept_any(_: str, value: Any) -> Any:
    """Accept the value of an option that is checked where it is interpreted."""
    return value


@dataclass(frozen=True)
class Elastic:
    """The policy of an elastic job for the loss of a slice.

    Attributes:
        least, most: number of slices that the function may run on.
        max_failures: number of losses that the job survives.
        slice_timeout_s: time to wait for a lost slice, in seconds.
        shrinks: True if the job goes on with the remaining slices meanwhile.
        start_wait_s: time that the first attempt waits for more than `least` slices, in seconds.
    """

    least: int
    most: int
    max_failures: int
    slice_timeout_s: float
    shrinks: bool = False
    start_wait_s: float = 60.0


MAX_FAILURES = 10
SLICE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Options(documents.Record, called="The options of the job"):
    """The valid options of a decorated function. `accelerator` and `spot` become the topology."""

    topology: Topology = field(
        metadata={
            "option": Option(
                "accelerator",
                _accept_any,
                'Slice to run on, such as "cpu", "gpu-l4" or "tpu-v6e-16". `kinetic accelerators` '
                "lists all.",
                "tpu-v5litepod-1",
                Flag(("--accelerator", "-a"), offers="accelerators", required=True),
            )
        }
    )
    container_image: str | None = option(
        checks.image, "Container image of the hosts on a cluster.", becomes="place"
    )
    base_image_repo: str | None = option(
        checks.text, "Repository of the prebuilt images.", becomes="place"
    )
    zone: str | None = option(checks.text, "Zone of the cluster.", becomes="place")
    project: str | None = option(
        checks.text, "Google Cloud project of the cluster.", becomes="place"
    )
    capture_env_vars: tuple[str, ...] = option(
        checks.patterns,
        "Variables of the caller's environment to set for the function: names, or prefixes that "
        'end in "*".',
        unset=(),
        becomes="captured",
    )
    cluster: str | None = option(
        checks.text,
        "Cluster to run on. Without one, the slice is simulated on this machine.",
        becomes="place",
    )
    backend: str | None = option(
        checks.backend,
        "Backend: gke, pathways, local or ray. By default the configured one, or the one that "
        "suits the accelerator.",
        flag=Flag(("--backend",), offers="backends"),
        becomes="place",
    )
    namespace: str | None = option(
        checks.text, "Kubernetes namespace of the jobs.", becomes="place"
    )
    volumes: Mapping[str, Any] = option(
        _accept_any,
        'Data at fixed paths, for example {"/data": kinetic.Data("./images")}. Read-only, except '
        "for folders of buckets that are `writable`.",
        unset={},
        becomes="data",
    )
    output_dir: str | None = option(
        checks.path_text,
        "Folder for the function's output files, which it finds in `KINETIC_OUTPUT_DIR`.",
        flag=Flag(("--output-dir",), "PATH", offers="folders"),
        becomes="output_dir",
    )
    debug: bool = option(
        checks.switch,
        "Start once a debugger has attached (`JobHandle.debug_attach`), or when "
        "`KINETIC_DEBUG_WAIT_TIMEOUT` has passed.",
        False,
    )
    compile_check: bool = option(
        checks.switch,
        "After a run on a simulated TPU slice, compile the leader's programs with the real slice's "
        "compiler, and report which do not compile or fit, and what limits the speed of the others "
        "(needs the extra `tpu-compile`).",
        False,
        flag=Flag(("--compile-check",), takes=Takes.SWITCH),
    )
    name: str = option(
        checks.name_text,
        "Name in lists of jobs; by default that of the function or program.",
        flag=Flag(("--name",)),
        unset="",
        becomes="name",
    )
    slices: int | tuple[int, int] = option(
        checks.slices,
        "Number of slices, joined over the network; or (least, most) for an elastic job, which "
        "continues when it loses a slice.",
        1,
        flag=Flag(("--slices",), "N|LEAST:MOST", Takes.SLICES),
    )
    max_failures: int | None = option(
        checks.failures,
        "Number of slice losses that an elastic job survives; 10 by default.",
        flag=Flag(("--max-failures",), "N", Takes.COUNT),
    )
    slice_timeout_s: float | None = option(
        checks.seconds,
        "Time for which an elastic job waits for a lost slice; 5 minutes by default.",
        name="slice_timeout",
        flag=Flag(("--slice-timeout",), "DURATION", Takes.DURATION),
    )
    start_wait_s: float | None = option(
        checks.seconds,
        "Time for which an elastic job waits for more slices before it starts with the least "
        "number; 1 minute by default.",
        name="start_wait",
        flag=Flag(("--start-wait",), "DURATION", Takes.DURATION),
    )
    on_slice_loss: OnSliceLoss | None = option(
        checks.on_slice_loss,
        'Policy of an elastic job that has lost a slice: "wait" for it, the default; or "shrink", '
        "which continues at once with the other slices and grows back when it returns.",
        flag=Flag(("--on-slice-loss",), "wait|shrink"),
    )
    controller: Controller = option(
        checks.controller,
        'Processes that run the function: "multi", one on every host; or "single", one process '
        "with the devices of all hosts and slices of a TPU, through Pathways on a cluster.",
        "multi",
        flag=Flag(("--controller",), "single|multi", offers="controllers"),
    )
    queue: str | None = option(
        checks.cluster_name,
        "Queue of the cluster (a LocalQueue of Kueue), which admits the job once all its hosts "
        "fit.",
        flag=Flag(("--queue",)),
        becomes="place",
    )
    session: str | None = option(
        checks.cluster_name,
        "Session to run on: the name of slices that `kinetic.session` or `kinetic session start` "
        "holds.",
        flag=Flag(("--session",), offers="sessions"),
        becomes="place",
    )
    priority: str | None = option(
        checks.cluster_name,
        "Priority class on the cluster: of the queue if queue= is set, otherwise of the pods.",
        flag=Flag(("--priority",)),
    )
    reservation: str | None = option(
        checks.reservation,
        "Reservation of machines to run on: its name, or projects/PROJECT/reservations/NAME if "
        "another project shares it or GKE creates its nodes.",
        flag=Flag(("--reservation",)),
    )
    local_storage: str | None = option(
        checks.local_storage,
        "Memory for each pod's `KINETIC_LOCAL_DIR`, for local checkpoints: a size to reserve, such "
        'as "60Gi"; or "multi-tier", the volume of GKE\'s multi-tier checkpointing, which outlives '
        "pods.",
        flag=Flag(("--local-storage",), "SIZE|multi-tier"),
    )
    network_devices: str | None = option(
        checks.network_devices,
        "Network devices that each pod of a multi-slice TPU job claims on its machine (GKE's "
        'DRANET): a number, or "all".',
        flag=Flag(("--network-devices",), "N|all"),
    )
    service_account: str | None = option(
        checks.cluster_name,
        "Service account of the pods, for functions that call the cluster. Pods get a token only "
        "if an account is named.",
        flag=Flag(("--service-account",)),
        becomes="place",
    )
    cpu: str | None = option(
        checks.processors,
        "Processors that each pod requests; without a request, it uses its machine's free ones.",
        flag=Flag(("--cpu",), "N"),
    )
    memory: str | None = option(
        checks.size,
        "Memory that each pod requests, including its folders in memory. On Ray it only selects "
        "nodes: a function that uses more is not ended.",
        flag=Flag(("--memory",), "SIZE"),
    )
    shm: str | None = option(
        checks.size,
        "Size limit of each pod's `/dev/shm`, a folder in memory for data loaders and the like; by "
        "default half of memory=, or half of the memory that the pod may use.",
        flag=Flag(("--shm",), "SIZE"),
    )
    privileged: bool = option(
        checks.switch,
        "Give pods all rights on their machine, as some device plugins and profilers need.",
        False,
        flag=Flag(("--privileged",), takes=Takes.SWITCH),
    )
    pathways_flags: Mapping[str, list[str]] = option(
        checks.component_flags,
        'Additional flags for Pathways\' components "server", "proxy-server" and "worker", with '
        'controller="single": for each, a dict of flags or text such as "--flag=1 --other=2".',
        unset={},
        flag=Flag(("--pathways-flags",), "COMPONENT=FLAGS", Takes.VARIABLES),
    )
    timeout_s: float | None = option(
        checks.seconds,
        "Stop the job when the function has run for this long, in all attempts of an elastic job "
        "together. Waiting for hosts or slices does not count. In seconds, or as 90s, 30m, 1h30m.",
        name="timeout",
        flag=Flag(("--timeout",), "DURATION", Takes.DURATION),
        becomes="limits",
    )
    budget_usd: float | None = option(
        checks.budget,
        "Stop the job, with time to save, when its slices have cost this many dollars at list "
        'price: 50, 12.5 or "$50". Simulated slices cost nothing.',
        name="budget",
        flag=Flag(("--budget",), "DOLLARS"),
        becomes="limits",
    )
    start_timeout_s: float | None = option(
        checks.seconds,
        "Fail if the function has not started on every host this long after submission. It also "
        "limits how long hosts wait in JAX for a host that has not joined.",
        name="start_timeout",
        flag=Flag(("--start-timeout",), "DURATION", Takes.DURATION),
        becomes="limits",
    )
    hang_timeout_s: float | None = option(
        checks.seconds,
        "Stop the job when Python makes no progress on a host for this long, and show its stacks.",
        name="hang_timeout",
        flag=Flag(("--hang-timeout",), "DURATION", Takes.DURATION),
        becomes="limits",
    )
    retries: int = option(
        partial(checks.count, least=0),
        "Number of times that a failed job is restarted.",
        0,
        flag=Flag(("--retries",), "N", Takes.COUNT),
    )
    env: Mapping[str, str] = option(
        checks.variables,
        "Environment variables to set for the function.",
        flag=Flag(("--env",), "NAME=VALUE", Takes.VARIABLES),
        unset={},
    )
    secrets: tuple[str, ...] = option(
        checks.names,
        "Environment variables of the caller to set for the function. Their values are not stored.",
        flag=Flag(("--secret",), "NAME", Takes.NAMES),
        unset=(),
        becomes="secrets",
    )
    all_hosts: bool = option(
        checks.switch,
        "Keep the return values of all hosts, for `JobHandle.results`. A call still returns that "
        "of JAX's process 0.",
        False,
    )
    keep: bool | None = option(
        checks.optional_switch,
        "Run the call in the processes of the session's last kept call: arrays on devices, "
        "compiled functions and the state of modules stay. Needs a session, whose own `keep` is "
        "the default.",
        flag=Flag(("--keep",), takes=Takes.SWITCH),
    )
    joins_jax: Joins = option(
        checks.joins,
        'When the hosts join one world of JAX: "lazy" when JAX is first used, or '
        "`jax.distributed.initialize()` called; True before the function starts; False only when "
        'the function calls that; "program" when a program that the function starts first uses '
        "JAX.",
        "lazy",
    )
    compare_programs: Comparison | None = option(
        checks.comparison,
        "Compare the programs that the hosts run together, and name hosts that differ: True, or "
        '"strict" to end the job then; "inputs" to compare the inputs of every call. By default '
        "True, or `KINETIC_COMPARE_PROGRAMS`.",
    )

    @property
    def most_slices(self) -> int:
        """Number of slices of the whole job, when none is lost."""
        return self.slices if isinstance(self.slices, int) else self.slices[1]

    @property
    def elastic(self) -> Elastic | None:
        """The policy of an elastic job for the loss of a slice; None for any other job."""
        if isinstance(self.slices, int):
            return None
        least, most = self.slices
        return Elastic(
            least,
            most,
            MAX_FAILURES if self.max_failures is None else self.max_failures,
            self.slice_timeout_s or SLICE_TIMEOUT_S,
            shrinks=self.on_slice_loss == "shrink",
            start_wait_s=self.start_wait_s or Elastic.start_wait_s,
        )

    def strip_for_hosts(self) -> Options:
        """Return the options for hosts and backends, without those that have become other parts of
        the plan."""
        defaults = {f.name: documents.default_of(f) for f in fields(self) if _row(f).becomes}
        return replace(self, **defaults)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without defaults; `from_json` turns it back into an equal value."""
        return documents.drop_defaults(self)


def _row(of: Field[Any]) -> Option:
    row: Option = of.metadata["option"]
    return row._replace(name=row.name or of.name)


FIELD_OF = {_row(f).name: f.name for f in fields(Options)}
"""The fields of `Options`, by the public names of the options."""
_SPOT = Option("spot", checks.switch, "Use preemptible machines.", False)
TABLE = {row.name: row for row in (*map(_row, fields(Options)), _SPOT)}
"""All options by their public names. `spot` has no field: it is part of the topology."""
