"""Step 2, plan: turn a call and its options into everything that its hosts must know.

Reads the settings, the environment and the local disk. Writes nothing but the cache of hashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kinetic._config import environment, jax_options
from kinetic._config import settings as configuration
from kinetic._config.settings import Settings
from kinetic._core import checks
from kinetic._core.accelerators import prices
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Cell, Cost, Limits, Plan, Versions, needs_jax
from kinetic._core.ref import new_job_id
from kinetic._core.session import are_alike
from kinetic._core.spec import name_of
from kinetic._core.values import dataclass
from kinetic._core.variables import looks_secret, select_start_variables
from kinetic.errors import NotFound, UsageError
from kinetic.version import __version__

if TYPE_CHECKING:
    from kinetic._backends.base import Backend
    from kinetic._core.accelerators.topology import Topology
    from kinetic._core.ref import JobRef
    from kinetic._datasets.call_data import CallData
    from kinetic._datasets.data import Data
    from kinetic._pickling.call import Packed
    from kinetic._pickling.modules import Shipped
    from kinetic._source.bundle import Bundle
    from kinetic._source.project import Project
    from kinetic._store.base import Store

_MB = 1_000_000
STILL_NOTICE_S = 60.0
"""After all hosts have stood still for this time, the output names the host that holds them up."""
_LARGEST_SHOWN = 5
SECRET_BYTES = 1_000_000
"""Limit for a job's secrets: a Kubernetes Secret holds 1 MiB, including keys that the gang adds."""
_DATA = "kinetic._datasets.data"
"""The module of `kinetic.Data`."""

_SLOW_LIBRARIES = ("keras", "orbax.checkpoint", "flax", "equinox")
"""Libraries that hosts import early: they are slow, and start neither threads nor JAX's backend."""
OPTIONS_THAT_ARE_SETTINGS = (
    *("backend", "project", "zone", "cluster", "namespace", "base_image_repo"),
    *("queue", "priority", "reservation", "local_storage", "network_devices"),
    *("service_account", "session"),
)


@dataclass(frozen=True)
class Target:
    """The place of a job, with its backend and store.

    Attributes:
        place: the selected place.
        settings: the caller's settings.
        backend: the backend of the place.
        store: the store of the jobs' records.
        notice: a line to print before submission; "" for none.
    """

    place: Place
    settings: Settings
    backend: Backend
    store: Store
    notice: str = ""

    def warm_up(self, options: Options) -> None:
        """Tell the backend to start slow preparations while the call is still being planned."""
        from kinetic._backends.base import WarmUp

        if not isinstance(self.backend, WarmUp) or self.settings.preload == "off":
            return
        names, variables = options.capture_env_vars, configuration.variables()
        captured = environment.select_env_vars(names, variables) if names else {}
        secrets = {name: variables.get(name, "") for name in options.secrets}
        self.backend.warm_up(
            needs_jax=needs_jax(options),
            variables={**captured, **secrets, **options.env},
            libraries=[name for name in _SLOW_LIBRARIES if name in sys.modules],
        )


def target_of(options: Options, *, is_for_call: bool = True) -> Target:
    """Return the place, backend and store that settings and options select. A session's own job
    passes `is_for_call=False`, since it never runs on another session."""
    from kinetic._backends import registry

    flags = {name: getattr(options, name) for name in OPTIONS_THAT_ARE_SETTINGS}
    settings = configuration.load(flags=flags)
    if settings.log_level is not None:
        from kinetic._config import verbosity

        verbosity.show(settings.log_level)
    place, notice = registry.select(options, settings)
    store = _open_store(settings.store)
    session = _find_session(options, settings, store) if is_for_call else None
    if session is not None:
        place, notice = dataclasses.replace(session.place, session=session.job_id), ""
        if session.store_uri != store.uri:
            store = _open_store(session.store_uri)
    return Target(place, settings, registry.make(place, store), store, notice)


_REUSED_S = 60.0
"""Seconds for which a bucket is used again. After a longer pause the network may be gone, which a
new store finds out sooner than one that has had answers."""


class _Reused(NamedTuple):
    """The bucket of a submitted job, with all that a new one would be made from."""

    store: Store
    variables: dict[str, str]
    used_at: float


_reused: list[_Reused] = []


def reuse_store(store: Store) -> None:
    """Let the next call use the bucket of a call that was submitted: a new one would log in to
    Google and open its own connections, which takes longer than a short call."""
    from kinetic._store.base import folder_of

    if folder_of(store) is None:
        _reused[:] = [_Reused(store, configuration.variables(), time.monotonic())]


def _open_store(uri: str) -> Store:
    from kinetic._store.open import open_store

    for store, variables, used_at in [*_reused]:
        is_recent = time.monotonic() - used_at <= _REUSED_S
        if store.uri == uri and is_recent and variables == configuration.variables():
            return store
    return open_store(uri)


class EnteredSession(NamedTuple):
    """The session of a `with` block: its job, and the accelerator and number of its slices."""

    ref: JobRef
    topology: Topology
    slices: int


_entered: list[EnteredSession] = []
"""The sessions of open `with` blocks, the innermost last. All threads share them, because a program
may make its calls in a pool of threads."""


def enter_session(session: EnteredSession) -> None:
    """Run calls on this session from now on if their accelerators fit."""
    _entered.append(session)


def leave_session(session: EnteredSession) -> None:
    """Undo `enter_session`."""
    _entered.remove(session)


def _find_session(options: Options, settings: Settings, store: Store) -> JobRef | None:
    """Return the job of the session that a call runs on; None for no session.

    Raises:
        NotFound: the option or the setting names a session that does not exist.
    """
    if options.session is None and _entered:
        entered = _entered[-1]
        fits = are_alike(options.topology, entered.topology)
        return entered.ref if fits and options.most_slices == entered.slices else None
    if not settings.session:
        return None
    from kinetic._store import sessions

    ref = sessions.find(store, settings.session)
    if ref is None:
        source = settings.setting("session").source
        where = "" if source == configuration.FLAG else f" (from {source})"
        raise NotFound(
            f"There is no session {settings.session!r}{where} in {store.uri}. Start it: "
            f"`kinetic session start {options.topology.name} --name {settings.session}`."
        )
    return ref


def default_place(settings: Settings) -> Place:
    """Return the place of a job on the CPU with default options."""
    from kinetic._backends import registry
    from kinetic._core.accelerators.resolve import resolve

    return registry.select(Options(resolve("cpu")), settings)[0]


class BatchMember(NamedTuple):
    """An input whose job is about to be submitted: its batch, its index and the batch's options."""

    group_id: str
    number: int
    job_id: str
    store_uri: str
    retries: int


batch_member: ContextVar[BatchMember | None] = ContextVar("kinetic_batch_member", default=None)
"""The batch input that the next submitted job belongs to; None outside of a batch."""


@contextlib.contextmanager
def member_of_batch(member: BatchMember) -> Iterator[None]:
    """In the `with` block, the first submitted job becomes the job of this batch's input."""
    token = batch_member.set(member)
    try:
        yield
    finally:
        batch_member.reset(token)


def batch_labels(group_id: str, index: int) -> dict[str, str]:
    """Return the labels of the job that runs input `index` of a batch."""
    return {"group_id": group_id, "group_kind": "map", "group_index": str(index)}


@dataclass(frozen=True)
class Planned:
    """A plan, and the content to send with it. `plan_function` makes the part that all calls of a
    function share, without a payload; `with_call` adds the payload of one call.

    Attributes:
        plan: everything that a host must know.
        payload: the pickled call, whose digest is in the plan.
        bundle: the source tree; None if nothing is sent.
        secrets: the values of the plan's secrets, which are in no document.
        warnings: printed before the job is submitted.
        function: the pickled function, if it is not part of the payload.
        data: each local `Data` of the plan with its content.
        installed: content of the files that pods install, by digest.
        settings: the caller's settings.
        project: the function's project.
        captured: environment variables that travel in the payload.
        volumes: data at fixed paths.
    """

    plan: Plan
    payload: bytes = field(repr=False)
    bundle: Bundle | None = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    settings: Settings = field(repr=False)
    project: Project = field(repr=False)
    captured: Mapping[str, str] = field(default_factory=dict, repr=False)
    volumes: Mapping[str, Data] = field(default_factory=dict, repr=False)
    installed: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()
    function: bytes = field(default=b"", repr=False)
    data: tuple[tuple[Data, Bundle], ...] = field(default=(), repr=False)

    def _load_data(self, packed: Packed) -> CallData | None:
        """Read the data of a call; None if it has none."""
        if not self.volumes and not packed.external:
            return None
        from kinetic._datasets import call_data

        cache_dir = self.settings.cache_dir
        return call_data.load(
            cast("tuple[Data, ...]", packed.external),
            self.volumes,
            cache_dir=cache_dir,
            exclude=(self.settings.folder, cache_dir),
        )

    @property
    def shipped(self) -> Shipped:
        """The project's modules that hosts can import."""
        from kinetic._pickling.modules import Shipped

        project = self.project
        search = (*project.sys_path_rel, project.entry_rel, *project.editable_rel)
        return Shipped(
            self.project.root,
            search,
            b"" if self.bundle is None else self.bundle.manifest,
            configuration.worker_environ().get("PYTHONPATH", ""),
        )

    def with_call(
        self, packed: Packed, *, function: Packed | None = None, **changes: Any
    ) -> Planned:
        """Return the plan of one call: its payload `packed`, its `function` if that is pickled
        separately, its data, and new values for the plan's fields in `changes`.

        Raises:
            UsageError: the call's data cannot be read.
        """
        project, bundle, data = self.project, self.bundle, self._load_data(packed)
        shared = b"" if function is None else function.data
        plan = dataclasses.replace(
            self.plan,
            payload=Blob(packed.digest, packed.size_bytes),
            function=None if function is None else Blob(function.digest, function.size_bytes),
            versions=packed.versions,
            tree=None if bundle is None else bundle.tree,
            entry_rel=project.entry_rel,
            cwd_rel=project.cwd_rel,
            sys_path_rel=tuple(project.sys_path_rel),
            editable_rel=tuple(project.editable_rel),
            client_root="" if project.root is None else str(project.root),
            cells=_find_cells(packed.data, shared),
            data=() if data is None else data.data,
            **changes,
        )
        warnings = _list_warnings(plan, bundle, self.settings, packed.parts)
        return dataclasses.replace(
            self,
            plan=plan,
            payload=packed.data,
            function=shared,
            data=() if data is None else data.bundles,
            warnings=(*warnings, *(() if data is None else data.warnings), *packed.warnings),
        )


def plan_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    settings: Settings,
    place: Place,
    name: str = "",
    member: BatchMember | None = None,
    job_id: str | None = None,
    now: float | None = None,
) -> Planned:
    """Plan one call.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: the options of the call.
        settings: the caller's settings.
        place: the job's place.
        name: the job's name, if the options have none.
        member: the batch's input that the job is for; None for a single job.
        job_id: the job's id, for tests; a new one by default.
        now: the time of the plan in seconds since the epoch, for tests.

    Raises:
        UsageError: a part of the call cannot be pickled, a secret is not set, or the source tree
            cannot be sent.
    """
    from kinetic._pickling import call

    shared = plan_function(
        func,
        [(args, kwargs)],
        options,
        settings=settings,
        place=place,
        name=name,
        job_id=job_id,
        now=now,
    )
    how: dict[str, Any] = {
        "env_vars": shared.captured,
        "shipped": shared.shipped,
        "external": data_class(),
    }
    function = None
    if place.session:  # A record of its own, which a kept process reads only once.
        pickler = call.BatchPickler(func, **how)
        packed, function = pickler.pack(tuple(args), kwargs), pickler.function
    else:
        packed = call.pack(func, tuple(args), kwargs, **how)
    if member is None:
        return shared.with_call(packed, function=function)
    labels = batch_labels(member.group_id, member.number)
    return shared.with_call(packed, function=function, job_id=member.job_id, labels=labels)


def plan_function(
    func: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    options: Options,
    *,
    settings: Settings,
    place: Place,
    name: str = "",
    job_id: str | None = None,
    now: float | None = None,
) -> Planned:
    """Plan the part that several calls of a function share. `calls` has the arguments of each call:
    local `Data` in them is left out of the source tree. See `plan_call` for the other arguments."""
    if options.compile_check and place.is_cluster:
        raise UsageError(
            "compile_check= is for slices that are simulated on this machine, but this job goes to "
            f"{place.cluster or 'a cluster'}, which compiles for its slices anyway. Remove "
            'compile_check=, or set backend="local".'
        )
    if options.keep and not place.session:
        raise UsageError(
            "keep=True works only for calls on a session, but this call runs on none. Name a "
            "session with session=, or remove keep=."
        )
    captured, secrets = _read_environment(options)
    _check_secrets(secrets, place)
    cost = _estimate_cost(options, settings, place)
    draft = Plan(
        job_id=job_id or new_job_id(),
        name=options.name or name or name_of(func),
        place=place,
        options=complete_options(options.strip_for_hosts(), settings),
        payload=Blob("", 0),
        versions=Versions(f"{sys.version_info.major}.{sys.version_info.minor}", "", __version__),
        created_at=time.time() if now is None else now,
        captured=tuple(sorted(captured)),
        secrets=tuple(sorted(secrets)),
        output_dir=_make_absolute(options.output_dir or settings.output_dir),
        limits=_make_limits(options, settings, cost),
        jax_options=jax_options.changed_options(without=options.env),
        is_verbose=settings.log_level == "DEBUG",
        cost=cost,
    )
    local_data = _list_data_paths(func, options, calls)
    project, bundle = _read_source(func, settings, local_data, draft)
    draft, installed = _with_installation(draft, settings, project)
    return Planned(
        draft,
        b"",
        bundle,
        secrets,
        settings,
        project,
        captured,
        options.volumes,
        installed,
    )


def _read_environment(options: Options) -> tuple[dict[str, str], dict[str, str]]:
    """Return the caller's environment variables that a job gets: those for the payload, and those
    to send with the secrets. A captured variable is sent with the secrets if its name looks secret,
    or if it takes effect when a process starts. Variables in `env=` are not captured."""
    variables = configuration.variables()
    selected = environment.select_env_vars(options.capture_env_vars, variables)
    free = {k: v for k, v in selected.items() if k not in options.env and k not in options.secrets}
    hidden = {k: v for k, v in free.items() if looks_secret(k)} | select_start_variables(free)
    secrets = environment.secret_values(options.secrets, variables) | hidden
    return {k: v for k, v in free.items() if k not in hidden}, secrets


def _check_secrets(secrets: Mapping[str, str], place: Place) -> None:
    """Refuse secrets that are too large for a process's environment, or for a Kubernetes Secret."""
    for name, value in secrets.items():
        checks.variable_size(f"The secret {name}", name, value)
    size_bytes = sum(len(value.encode(errors="surrogateescape")) for value in secrets.values())
    if place.has_pods and size_bytes > SECRET_BYTES:
        raise UsageError(
            f"The secrets of the job have {size_bytes:,} bytes together; a cluster stores at most "
            f"{SECRET_BYTES:,}. Put the secrets into a secret manager, and fetch them in the "
            "function."
        )


def complete_options(options: Options, settings: Settings) -> Options:
    """Return the options, completed with the settings that hosts need and that apply to the job."""
    single = options.controller == "single"
    joins_slices = options.topology.kind == "tpu" and options.most_slices > 1 and not single
    return dataclasses.replace(
        options,
        priority=settings.priority,
        reservation=None if options.topology.spot else settings.reservation,
        local_storage=None if single else settings.local_storage,
        network_devices=settings.network_devices if joins_slices else None,
        compare_programs=settings.compare_programs
        if options.compare_programs is None
        else options.compare_programs,
    )


def _estimate_cost(options: Options, settings: Settings, place: Place) -> Cost | None:
    """Return the price of all slices together; None if it is unknown.

    Raises:
        UsageError: the price is unknown, and the option `budget=` needs it.
    """
    topology = options.topology
    price = prices.price_of(topology, settings.prices)
    stands_in = settings.pod_simulated if place.is_cluster else topology.kind != "cpu"
    if price is None:
        if options.budget_usd is not None and place.is_cluster:
            kind = topology.family + (prices.SPOT if topology.spot else "")
            raise UsageError(
                f"budget= needs the price of {topology.name}, which is unknown. Set "
                f"KINETIC_PRICES={kind}=DOLLARS, the price of one chip for an hour."
            )
        return None
    return Cost(price.usd_per_hour * options.most_slices, price.origin, stands_in)


def _limit_cost(budget_usd: float | None, cost: Cost | None) -> tuple[float | None, str]:
    """Return the seconds for which all slices can run for this budget, and a text about the budget
    for users; (None, "") without a budget."""
    if budget_usd is None or cost is None or cost.is_simulated or cost.usd_per_hour == 0:
        return None, ""
    text = f"budget of {prices.in_usd(budget_usd)} ({cost.rate})"
    return budget_usd / cost.usd_per_hour * 3600, text


def _make_limits(options: Options, settings: Settings, cost: Cost | None) -> Limits:
    budget_s, budget = _limit_cost(options.budget_usd, cost)
    limits = Limits(
        start_timeout_s=options.start_timeout_s or settings.start_timeout_s,
        timeout_s=options.timeout_s,
        budget_s=budget_s,
        budget=budget,
        hang_timeout_s=options.hang_timeout_s,
        grace_s=settings.grace_s,
        slice_away_s=settings.slice_away_s,
        still_notice_s=STILL_NOTICE_S,
        debug_wait_s=settings.debug_wait_s,
    )
    if not options.debug:
        return limits
    # At a breakpoint all hosts stand still, so a debug job never counts as hung. The wait for the
    # debugger does not count towards the timeout.
    timeout_s = None if limits.timeout_s is None else limits.timeout_s + limits.debug_wait_s
    return dataclasses.replace(limits, timeout_s=timeout_s, hang_timeout_s=None)


def _make_absolute(folder: str | None) -> str | None:
    """Make a path absolute: relative to the caller's working directory, not to a host's."""
    if folder is None or "://" in folder:
        return folder
    return str(Path(folder).expanduser().absolute())


def _list_data_paths(
    func: Callable[..., Any],
    options: Options,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> list[Path]:
    """Return the paths of all local `Data` that the calls use."""
    kind = data_class()
    if kind is None:
        return []
    from kinetic._datasets import call_data
    from kinetic._datasets.data import list_alive

    declared = [*options.volumes.values()]
    for args, kwargs in calls:
        declared += call_data.find_data([args, kwargs])
    ids = set(map(id, declared))
    if any(id(data) not in ids for data in list_alive()):
        # Only pickling finds data inside objects, globals and closures.
        from kinetic._pickling import call

        declared += cast("tuple[Data, ...]", call.find_instances(kind, func, calls))
    return list(dict.fromkeys(Path(data.path) for data in declared if data.is_local))


def data_class() -> type[Data] | None:
    """Return `kinetic.Data`; None if it is not imported, so that no `Data` exists."""
    return getattr(sys.modules.get(_DATA), "Data", None)


def _read_source(
    func: Callable[..., Any], settings: Settings, data: Sequence[Path], draft: Plan
) -> tuple[Project, Bundle | None]:
    from kinetic._source import shipment

    about = shipment.SourceSettings(
        settings.folder,
        settings.cache_dir,
        settings.package_root,
        not settings.no_default_excludes,
        configuration.temporary_folders(),
        configuration.worker_environ().get("PYTHONPATH", ""),
    )
    project, bundle = shipment.of(func, about, data=data, output_dir=draft.output_dir)
    if draft.place.is_cluster and bundle is not None:
        bundle = dataclasses.replace(bundle, warnings=(*bundle.warnings, *_warn_of_hooks(project)))
    return project, bundle


def _list_import_folders(project: Project) -> set[str]:
    """Return the folders of the project that are on the caller's `sys.path`."""
    folders = (*project.sys_path_rel, project.entry_rel, *project.editable_rel)
    return {str(Path(project.root or "", rel)) for rel in folders}


def _warn_of_hooks(project: Project) -> tuple[str, ...]:
    """Return warnings about editable packages that hosts of a cluster cannot import."""
    from kinetic._source import editable

    names = editable.find_hooked(_list_import_folders(project))
    text = (
        f"Not sent: {', '.join(names)}. Its editable install uses an import hook, which cannot be "
        "sent. Install it in the hosts' image, or install it on this machine without -e."
    )
    return (text,) if names else ()


def _with_installation(
    draft: Plan, settings: Settings, project: Project
) -> tuple[Plan, Mapping[str, bytes]]:
    """Add the packages that pods install. Hosts on this machine use the caller's environment."""
    if not draft.place.is_cluster or settings.pod_python:
        return draft, {}
    from kinetic._source import installation

    start = Path.cwd() if project.root is None else project.root / project.entry_rel
    bucket = (settings.pod_store or settings.store).startswith("gs://")
    installed = installation.of(
        draft,
        start,
        imported=_list_import_folders(project),
        cache_dir=settings.cache_dir,
        bucket=bucket,
    )
    changed = dataclasses.replace(
        draft, runtime=installed.runtime, requirements=installed.requirements
    )
    return changed, installed.contents


def _find_cells(*pickles: bytes) -> tuple[Cell, ...]:
    from kinetic._client import notebook
    from kinetic._pickling import cells

    return cells.find_referenced(pickles, notebook.cell_title)


def _list_warnings(
    plan: Plan,
    bundle: Bundle | None,
    settings: Settings,
    parts: Callable[[], Sequence[tuple[str, int]]],
) -> tuple[str, ...]:
    warnings = () if bundle is None else tuple(bundle.warnings)
    if bundle is not None and settings.context_size_warn_mb:
        warnings += bundle.warn_of_number()
    if (
        plan.tree is not None
        and bundle is not None
        and plan.tree.size_bytes > (settings.context_size_warn_mb or math.inf) * _MB
    ):
        large = [
            (rel, size)
            for rel, size in bundle.largest[:_LARGEST_SHOWN]
            if size * 100 >= bundle.largest[0][1]
        ]
        largest = ", ".join(f"{rel} ({_format_mb(size)})" for rel, size in large)
        warnings += (
            f"The source tree {plan.client_root} is large: {_format_mb(plan.tree.size_bytes)}. Its "
            f"largest files: {largest}. Exclude files that the function does not need in "
            ".kineticignore.",
        )
    call_bytes = plan.payload.size_bytes + (
        plan.function.size_bytes if plan.function is not None else 0
    )
    if call_bytes > (settings.payload_size_warn_mb or math.inf) * _MB:
        large = [(name, size) for name, size in parts()[:_LARGEST_SHOWN] if size * 10 >= call_bytes]
        largest = ", ".join(f"{name}: {_format_mb(size)}" for name, size in large)
        named = f" Its largest parts: {largest}." if large else ""
        warnings += (
            f"The call of {plan.name} is large when pickled: {_format_mb(call_bytes)}.{named} "
            "Pass a path, or kinetic.Data, and load the data on the host.",
        )
    return warnings


def _format_mb(size_bytes: int) -> str:
    return f"{size_bytes / _MB:,.1f} MB"
