"""The Ray backend. Ray's Jobs API starts a driver process, which leads the job: it reserves slices,
and Ray actors start the hosts.

A job's entry in the Jobs API has the job's id. Output and verdicts are read from the store, so they
outlive the cluster. Pure functions come first: they judge a driver's state and a cluster's
capacity, and render the submission.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kinetic._backends import attempt_logs, stored
from kinetic._backends.base import Document, HostStatus, LogRequest, Status
from kinetic._config import settings as configuration
from kinetic._config.settings import Settings
from kinetic._core import layout, record
from kinetic._core.accelerators.topology import Topology
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.log_format import STDERR, LogChunk, Position
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._core.quantities import amount_of, bytes_of
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass
from kinetic._ray import address, store_servers
from kinetic._ray.jobs_api import (
    JobsApi,
    JobsApiLimits,
    RayJob,
    RayNode,
    Submission,
    secrets_package,
)
from kinetic._ray.refusals import last_words
from kinetic._store import cancellation
from kinetic._store.base import Store
from kinetic.errors import BackendUnavailable, NotFound, PreflightError, UsageError

STARTING = "its driver is starting"
INSTALLING = "Ray installs its packages, and then starts its driver"
RESERVING = "its hosts are starting"
FORGOTTEN = "Ray does not know its driver any more"
STOPPED = "its driver was stopped in Ray"
CANCELLED = "The job was cancelled."
_SHELL_KILLED = 137
_INSTALLERS = ("uv", "pip", "conda")
_RAY_LINE = re.compile(r"\[?\d{4}-\d\d-\d\d |Job entrypoint command failed|Running entrypoint for ")
"""Ray's own lines in the output of a driver."""
_UNIMPORTABLE = "ModuleNotFoundError: No module named "


@dataclass(frozen=True)
class DriverFacts:
    """The facts from which `judge` derives a job's status. Functions read the store, so `judge`
    uses them only if needed.

    Attributes:
        job: Ray's entry of the job; None if there is none.
        hosts: the number of hosts.
        is_cancelled: returns whether the job was cancelled.
        has_begun: returns whether all hosts were ever ready.
        had_leader: returns whether the job ever had a leader.
        waits_for: returns what the leader waits for; "" if it does not say.
    """

    job: RayJob | None
    hosts: int
    is_cancelled: Callable[[], bool]
    has_begun: Callable[[], bool]
    had_leader: Callable[[], bool]
    waits_for: Callable[[], str]


def judge(facts: DriverFacts) -> Status:
    """Return the status of a job without a verdict."""
    phase = "" if facts.job is None else facts.job.status
    if facts.job is not None and phase == "PENDING":
        installs = any(name in facts.job.runtime_env for name in _INSTALLERS)
        return Status(JobStatus.PENDING, INSTALLING if installs else STARTING)
    if phase == "RUNNING":
        if facts.has_begun():
            return Status(JobStatus.RUNNING, facts.waits_for())
        return Status(JobStatus.PENDING, facts.waits_for() or RESERVING)
    if facts.is_cancelled():
        ended = (JobStatus.CANCELLED, CANCELLED, Exit.CANCELLED)
        everywhere = tuple(HostStatus(host, *ended) for host in range(facts.hosts))
        return Status(JobStatus.CANCELLED, CANCELLED, everywhere)
    if facts.job is not None:
        unable = phase != "STOPPED" and _was_unable(facts.job) and not facts.had_leader()
        exit = Exit.SETUP_FAILED if unable else None
        return _fail(STOPPED if phase == "STOPPED" else _why_failed(facts.job), exit)
    return _fail(FORGOTTEN) if facts.had_leader() else Status(JobStatus.NOT_FOUND)


def _fail(why: str, exit: Exit | None = None) -> Status:
    return Status(JobStatus.FAILED, why, (HostStatus(0, JobStatus.FAILED, why, exit),))


def _was_unable(job: RayJob) -> bool:
    """True if a driver could not begin: its interpreter, packages or environment were at fault."""
    return (
        job.error_type in ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")
        or job.exit_code in (NO_INTERPRETER, ProgramCode.UNUSABLE)
        or _UNIMPORTABLE in job.message
    )


def _why_failed(job: RayJob) -> str:
    """Explain why a driver ended without a verdict, from its last output in Ray's message."""
    lines = [line.strip() for line in job.message.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("kinetic: ")]
    missing = next((line for line in lines if line.startswith(_UNIMPORTABLE)), "")
    if own:
        return own[-1].removeprefix("kinetic: ")
    if missing:
        name = missing.removeprefix(_UNIMPORTABLE).strip("'")
        return (
            f"the driver's Python has no {name}, which kinetic needs: add it to the job's "
            "requirements or to the cluster's image"
        )
    code = job.exit_code
    if code is None:
        text = "Ray could not set up its packages" if _was_unable(job) else "Ray ended its driver"
        return f"{text}: {last_words(job.message) or 'it does not say why'}"
    if code < 0 or code == _SHELL_KILLED:
        return "its driver was killed"
    if code == ProgramCode.TAKEN_AWAY:
        return "its driver was asked to end"
    last = next((line for line in reversed(lines) if not _RAY_LINE.match(line)), "")
    return f"its driver ended with exit code {code}" + (f": {last_words(last)}" if last else "")


OLDEST_RAY = (2, 49)
"""The first version whose placement groups have labels. Dashboards up to 2.44 also damaged uploaded
files, by adding a letter in front of each."""


def check_versions(ray: str, python: str, ours: str) -> None:
    """Refuse a cluster whose Ray is too old, or whose Python differs from this process's.

    Raises:
        PreflightError: the versions do not fit.
    """
    if tuple(map(int, re.findall(r"\d+", ray)[:2])) < OLDEST_RAY:
        raise PreflightError(
            f"The cluster runs Ray {ray}, but jobs need Ray {'.'.join(map(str, OLDEST_RAY))} or "
            "later, because older versions cannot reserve whole slices. Update Ray on the cluster."
        )
    theirs, mine = (version.split(".")[:2] for version in (python, ours))
    if python and theirs != mine:
        raise PreflightError(
            f"The cluster runs Python {python}, this machine {ours}, and functions are sent as "
            f"code of one version. Use a cluster with Python {'.'.join(mine)}, or Python "
            f"{'.'.join(theirs)} here."
        )


_SLICE, _TYPE, _SHAPE = (f"ray.io/tpu-{name}" for name in ("slice-name", "pod-type", "topology"))
_MEMORY = "memory"
_UNITS = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


def check_capacity(plan: Plan, nodes: Sequence[RayNode], *, grows: bool = False) -> None:
    """Refuse a job that is too large for the whole cluster, unless the cluster may grow (`grows`).

    Raises:
        PreflightError: the job is too large; the message has its needs and the cluster's nodes.
    """
    topology = plan.topology
    least = plan.options.elastic.least if plan.options.elastic else plan.options.most_slices
    alive = [node for node in nodes if node.is_alive]
    needed = _list_needed(plan)
    if grows or _count_slices(topology, needed, alive) >= least:
        return
    raise PreflightError(
        f"The Ray cluster is too small for {_describe_job(topology, needed, least)}: "
        f"{_describe_cluster(needed, alive)}. Add nodes, or ask for less."
    )


def _list_needed(plan: Plan) -> dict[str, float]:
    """List the resources that each host needs, by Ray's names. The accelerator comes first."""
    topology, cpus, memory = plan.topology, plan.options.cpu, plan.options.memory
    unit = _UNITS[topology.kind]
    needed = {unit: 1.0 if unit == "CPU" else float(topology.chips_per_host)}
    if cpus:
        needed["CPU"] = amount_of(cpus)
    if memory:
        needed[_MEMORY] = bytes_of(memory)
    return needed


def _count_slices(topology: Topology, needed: Mapping[str, float], nodes: Sequence[RayNode]) -> int:
    """Count the slices of this shape in the cluster."""
    able = [
        node
        for node in nodes
        if all(node.resources.get(name, 0) >= amount for name, amount in needed.items())
    ]
    if topology.kind != "tpu":
        return len(able) // topology.hosts
    own = [node for node in able if _fits_slice(topology, node)]
    if not topology.multi_host:
        return len(own)
    hosts = Counter(node.labels.get(_SLICE, "") for node in own)
    return sum(count >= topology.hosts for name, count in hosts.items() if name)


def _fits_slice(topology: Topology, node: RayNode) -> bool:
    """True if a node belongs to a slice of this shape. The number in the name of the node's pod
    type is ignored, because it may count cores instead of chips."""
    generation = node.labels.get(_TYPE, "").partition("-")[0]
    shape = node.labels.get(_SHAPE, topology.shape_text)
    return generation == topology.family.replace("tpu", "v") and shape == topology.shape_text


def _describe_job(topology: Topology, needed: Mapping[str, float], slices: int) -> str:
    hosts = slices * topology.hosts
    many = f"{slices} slices of " if slices > 1 else ""
    noun = "host" if hosts == 1 else "hosts"
    share = " and ".join(_describe_amount(name, amount) for name, amount in needed.items())
    need = "need" if slices > 1 else "needs"
    per_host = " each" if hosts > 1 else ""
    return f"{many}{topology.name}, which {need} {hosts} {noun} with {share}{per_host}"


def _describe_amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB" if name == _MEMORY else f"{amount:g} {name}"


def _describe_cluster(needed: Mapping[str, float], nodes: Sequence[RayNode]) -> str:
    unit, *others = needed
    kinds = Counter(
        f"{_name_node(node, unit)} ({_describe_node(node, unit, others)} on each)"
        for node in nodes
        if node.resources.get(unit)
    )
    if not kinds:
        return f"none of its nodes has {unit}" if nodes else "no node of the cluster runs"
    text = ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))
    return f"the cluster's nodes ({len(nodes)}) are {text}"


def _describe_node(node: RayNode, unit: str, others: Sequence[str]) -> str:
    more = [_describe_amount(name, node.resources.get(name, 0)) for name in others]
    return ", ".join([f"{node.resources[unit]:g}", *more])


def _name_node(node: RayNode, unit: str) -> str:
    labels = node.labels
    return f"{labels[_TYPE]} {labels.get(_SHAPE, '')}".strip() if _TYPE in labels else unit


DRIVER = "kinetic._host.ray"
NO_INTERPRETER = 69
STOP_MARGIN_S = 10
"""Seconds added to the function's grace period for the hosts' last reports."""
_RAYLETS = r"s/^--python_worker_command=\([^ ]*\).*/\1/p"
_HAS_RAY = 'import importlib.util as u, sys; sys.exit(not u.find_spec("ray"))'


@dataclass(frozen=True)
class HostSettings:
    """The settings of a submission that are not in the plan.

    Attributes:
        archive: the SHA-256 of kinetic's archive.
        store_uri: the address of the store for nodes of the cluster.
        python: an interpreter that all nodes have; "" for the interpreter of Ray's own workers.
        simulated: whether virtual devices of the processor replace chips.
    """

    archive: str
    store_uri: str
    python: str = ""
    simulated: bool = False

    @property
    def has_store_on_head(self) -> bool:
        """True if the store lies on the cluster's head (see `_store.ray`)."""
        return self.store_uri.startswith("ray+")


def render(plan: Plan, settings: HostSettings) -> Document:
    """Return the document of a plan's submission."""
    variables = {
        "KINETIC_JOB_ID": plan.job_id,
        "KINETIC_STORE": settings.store_uri,
        # Ray's default is 3 s.
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(plan.limits.grace_s) + STOP_MARGIN_S),
    }
    if settings.simulated:
        variables["KINETIC_SIMULATED"] = "1"
    return Submission(
        plan.job_id,
        entrypoint(settings.python, installs=plan.requirements is not None),
        runtime_env=environment_of(settings.archive) | {"env_vars": variables},
        metadata={"kinetic": plan.versions.kinetic, "name": plan.name},
    ).to_json()


def environment_of(archive: str) -> dict[str, Any]:
    """Return the runtime environment in which programs can import kinetic."""
    # Without eager_install, only the nodes that run a job install its packages. Do not use
    # working_dir: every node would unpack it again, even nodes that share a folder.
    return {
        "py_modules": [f"gcs://{package_of(archive)}"],
        "config": {"eager_install": False},
    }


def package_of(digest: str) -> str:
    """Return Ray's name for the archive with this SHA-256."""
    return f"_ray_pkg_{digest[:32]}.zip"


def read_submission(document: Document, lines: Sequence[str] = ()) -> Submission:
    """Return the submission in a document; Ray first installs the requirements in `lines`."""
    runtime_env = dict(document["runtime_env"])
    if lines:
        runtime_env["uv"] = {"packages": list(lines)}
    own = (document["submission_id"], document["entrypoint"])
    return Submission(*own, runtime_env, document["metadata"])


def entrypoint(python: str, *, installs: bool, module: str = DRIVER) -> str:
    """Return the shell command of a driver, which runs a module of kinetic.

    Without `python` the driver uses the interpreter of Ray's own workers, often not the first one
    on the PATH. The shell reads its path from the command line of the raylet, the parent of its own
    parent. If the job installs packages (`installs`), the first interpreter on the PATH is used:
    Ray puts the environment with the packages there.
    """
    workers = (
        "$(tr '\\0' '\\n' 2>/dev/null "
        "</proc/$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status)/cmdline "
        f"| sed -n {shlex.quote(_RAYLETS)})"
    )
    raylets_own = f'"{workers}"'
    usual = ["python", raylets_own, "python3"] if installs else [raylets_own, "python", "python3"]
    candidates = [shlex.quote(python)] if python else usual
    refusal = (
        "kinetic: no Python that has Ray was found on the driver's node (tried: "
        f"{python or 'that of the raylet, python, python3'}). Set KINETIC_POD_PYTHON to its path."
    )
    return (
        f"for p in {' '.join(candidates)}; do "
        f'if [ -n "$p" ] && "$p" -c {shlex.quote(_HAS_RAY)} 2>/dev/null; '
        f'then exec "$p" -m {module}; fi; done; '
        f"echo {shlex.quote(refusal)} >&2; exit {NO_INTERPRETER}"
    )


_LEAVING_S, _STOPPING_S = 20.0, 20.0
"""Longest waits in seconds: for a driver to end by itself, and for a stopped one to end."""


class RayBackend:
    """Jobs of one Ray cluster. The promises are those of `backends.base.Backend`."""

    name = "ray"

    def __init__(
        self,
        store: Store,
        open_api: Callable[[], JobsApi],
        read_archive: Callable[[], tuple[Blob, bytes]],
        settings: HostSettings,
    ) -> None:
        """Create the backend without connecting.

        Args:
            store: the store of jobs.
            open_api: opens the connection to the dashboard.
            read_archive: returns kinetic's archive.
            settings: the settings of submissions; their `archive` is ignored.
        """
        self._store = store
        self._open_api = open_api
        self._read_archive = functools.cache(read_archive)
        self._settings = settings
        self._opened: JobsApi | None = None

    @property
    def _api(self) -> JobsApi:
        if self._opened is None:
            self._opened = self._open_api()
        return self._opened

    # -- submission --------------------------------------------------------------------------------

    def preflight(self, plan: Plan) -> None:
        """Refuse a plan that the cluster cannot run, after a few calls; nothing is sent."""
        if plan.has_single_controller:
            raise PreflightError(
                'controller="single" needs Pathways, which Ray does not have. Use '
                'backend="pathways", or remove controller=.'
            )
        ray, python = self._api.versions()
        check_versions(ray, "" if self._settings.python else python, plan.versions.python)
        check_capacity(plan, self._api.nodes(), grows=self._api.can_grow())
        if self._settings.has_store_on_head:
            self._start_store_server()

    def _start_store_server(self) -> None:
        """Start the server of a store on the cluster's head; later writes wait for its answer."""
        archive = self._send_kinetic()
        command = entrypoint(self._settings.python, installs=False, module=store_servers.MODULE)
        store_servers.ensure_server(self._api, command, environment_of(archive))

    def _send_kinetic(self) -> str:
        blob, data = self._read_archive()
        self._api.send_package(package_of(blob.digest), data)
        return blob.digest

    def render(self, plan: Plan) -> list[Document]:
        """Return the submission to the Jobs API as the only document."""
        blob, _ = self._read_archive()
        return [render(plan, replace(self._settings, archive=blob.digest))]

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Send kinetic's archive, unless the cluster has it, and the secrets. Then create the job's
        entry in the Jobs API, which starts the driver."""
        (document,) = documents
        plan = Plan.read(self._store.get(layout.JobKeys(ref.job_id).plan))
        lines: list[str] = []
        if plan.requirements is not None:
            lines = self._store.get(layout.blob(plan.requirements.digest)).decode().splitlines()
        self._send_kinetic()
        if secrets:
            package = json.dumps(dict(secrets)).encode()
            self._api.lend_package(secrets_package(ref.job_id), package)
        self._api.submit(read_submission(document, lines))

    # -- status ------------------------------------------------------------------------------------

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """Return the status of jobs, from their verdicts or by one call to the cluster."""
        verdicts = {ref.job_id: stored.read_verdict(self._store, ref) for ref in refs}
        statuses = {job_id: verdict for job_id, verdict in verdicts.items() if verdict is not None}
        open_refs = [ref for ref in refs if ref.job_id not in statuses]
        jobs = self._list_jobs(open_refs)
        return statuses | {ref.job_id: self._status(ref, jobs.get(ref.job_id)) for ref in open_refs}

    def _list_jobs(self, refs: Sequence[JobRef]) -> Mapping[str, RayJob]:
        if len(refs) > 1:
            return {job.job_id: job for job in self._api.list()}
        jobs = {ref.job_id: self._api.find(ref.job_id) for ref in refs}
        return {job_id: job for job_id, job in jobs.items() if job is not None}

    def _status(self, ref: JobRef, job: RayJob | None) -> Status:
        status = judge(
            DriverFacts(
                job,
                ref.hosts,
                is_cancelled=lambda: self._store.has(layout.JobKeys(ref.job_id).cancellation),
                has_begun=lambda: stored.has_begun(self._store, ref),
                had_leader=lambda: self._store.has(layout.JobKeys(ref.job_id).events),
                waits_for=lambda: self._read_wait(ref),
            )
        )
        # The leader may have written the verdict meanwhile.
        return (stored.read_verdict(self._store, ref) if status.phase.ended else None) or status

    def _read_wait(self, ref: JobRef, *, still: bool = True) -> str:
        """Return what the leader wrote about why the job is waiting; "" if it wrote nothing. With
        `still`, also return "" if the wait is over."""
        try:
            note = record.parse(self._store.get(layout.JobKeys(ref.job_id).wait_note))
            return "" if still and note.get("is_over") else str(note["reason"])
        except (NotFound, LookupError):
            return ""

    def why_waiting(self, ref: JobRef) -> str | None:
        """Return why the job does not run yet, as its leader wrote it."""
        return self.status([ref])[ref.job_id].why_waiting

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Return "": the leader's own report of the loss is complete."""
        return ""

    def why_unready(self, ref: JobRef) -> str:
        """Return what the leader last waited for."""
        reason = self._read_wait(ref, still=False)
        return f"{reason[0].upper()}{reason[1:]}." if reason else ""

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Ask the leader to kill the hosts' actors, which ends their functions and agents too."""
        if signum != signal.SIGKILL:
            raise UsageError(
                "Hosts on a Ray cluster take no other signal than KILL, which ends them at once."
            )
        if self.status([ref])[ref.job_id].phase is not JobStatus.RUNNING:
            return ()
        return stored.ask_to_kill(self._store, ref, hosts)

    # -- output ------------------------------------------------------------------------------------

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read the hosts' output from the store; with `follow`, until the job ends.

        Ray's own log of the driver comes a second late, has no positions and is lost with the
        cluster. It is read only if the driver ended before it led hosts.
        """
        yield from attempt_logs.read_of_cluster(self._store, ref, request, self.status)
        is_wanted = request.failures and not request.metrics and 0 in (request.hosts or (0,))
        if is_wanted and not self._store.has(layout.JobKeys(ref.job_id).events):
            yield from self._read_driver(ref, request)

    def _read_driver(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk]:
        """Yield Ray's log of an ended driver as output of host 0."""
        try:
            job = self._api.find(ref.job_id)
            if job is None or not job.has_ended:
                return
            printed = self._api.logs(ref.job_id) or job.message
        except (NotFound, BackendUnavailable):
            return
        data = printed.encode()
        end = Position(1, len(data))
        if request.tail is not None:
            data = attempt_logs.last_lines(data, request.tail)
        if data and request.after.get(0, Position()) < end:
            yield LogChunk(0, STDERR, time.time_ns(), data, end)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self, ref: JobRef) -> None:
        """Record the request in the store and stop the driver, which ends its hosts first."""
        cancellation.request(self._store, ref.job_id, lambda: self._api.stop(ref.job_id))

    def cleanup(self, ref: JobRef) -> None:
        """Stop the driver, unless it has written the verdict and ends by itself.

        The job's entry in the Jobs API stays: if it were deleted while Ray still watches for the
        driver's end, Ray would create the entry again with the state failed.
        """
        if self._store.has(layout.JobKeys(ref.job_id).outcome) and self._has_ended_within(
            _LEAVING_S, ref
        ):
            return
        self._api.stop(ref.job_id)
        if not self._has_ended_within(_STOPPING_S, ref):
            raise BackendUnavailable(
                f"Ray has not ended the driver process of {ref.job_id} within {_STOPPING_S:g} s. "
                "Try again."
            )

    def _has_ended_within(self, limit_s: float, ref: JobRef) -> bool:
        until = time.monotonic() + limit_s
        while (job := self._api.find(ref.job_id)) is not None and not job.has_ended:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True


def find_address(settings: Settings) -> str:
    """Return the address of the Jobs API in the settings or the environment."""
    return address.resolve_address(settings.address or "", configuration.variables())


def open_api(url: str, *, limits: JobsApiLimits | None = None) -> JobsApi:
    """Open the dashboard with this URL, with the token of the caller's environment."""
    return JobsApi(url, address.find_token(configuration.variables()), limits=limits)


def make_backend(place: Place, store: Store) -> RayBackend:
    """Return the backend of a place, with the settings of this process."""
    chosen = configuration.load()

    def read_archive() -> tuple[Blob, bytes]:
        from kinetic._source import runtime

        archive = runtime.archive(chosen.cache_dir)
        return archive.blob, archive.data

    return RayBackend(
        store,
        lambda: open_api(place.address),
        read_archive,
        HostSettings(
            archive="",
            store_uri=chosen.pod_store or store.uri,
            python=chosen.pod_python,
            simulated=chosen.pod_simulated,
        ),
    )
