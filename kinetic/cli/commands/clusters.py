"""`kinetic init`, `up`, `down`, `status` and `pool`: clusters on Google Cloud, or on this machine.

The commands choose, show and ask; `kinetic._clusters` decides and does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kinetic._clusters.wanted import (
    QUEUE,
    Mode,
    Wanted,
    check_mode,
    check_name,
    choose_location,
    name_bucket,
    plan_pools,
)
from kinetic._clusters.zones import fits_location
from kinetic._config import profiles, settings
from kinetic.cli import output
from kinetic.cli.lazy import Lazy, LazyGroup, complete_with
from kinetic.cli.options import ignore_option, json_option, yes_option
from kinetic.errors import NotFound, PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._clusters.convergence import Doors
    from kinetic._clusters.observed import Document
    from kinetic._clusters.releases import Release
    from kinetic._clusters.status import ClusterState

F = TypeVar("F", bound=Callable[..., Any])
Options = Mapping[str, Any]
CLUSTER = "kinetic-cluster"
"""The name of a cluster that nobody has named, as in keras-kinetic."""

_INIT_HELP = """Join a cluster that exists, create one, or find out what does not work.

\b
Example:
  kinetic init
"""
_UP_HELP = """Create a cluster with all that jobs need, show its price first, and use it.

Without --standard it is an Autopilot cluster: machines with accelerators come with a job and go
with it. Run the same command again after an interruption; it continues with what is missing.

\b
Examples:
  kinetic up --project ID --accelerator tpu-v6e-16 --preview
  kinetic up --zone us-central1-a --standard --accelerator v5e-8 --spot
  kinetic up --kind --accelerator tpu-v6e-16      on this machine, fake chips
  kinetic up --ray --accelerator tpu-v6e-16 > ray.yaml
"""
_DOWN_HELP = """Remove a cluster that `kinetic up` has made. Its bucket with all records stays.

\b
Examples:
  kinetic down
  kinetic down --delete-store BUCKET      removes the bucket, too
"""
_STATUS_HELP = """Show a cluster: its version, node pools, queues, quotas, and what it costs now.

\b
Examples:
  kinetic status
  kinetic status --json
"""
_POOL_HELP = """Add, remove and list node pools of a Standard cluster.

On Autopilot node pools come with the jobs that need them.

\b
Examples:
  kinetic pool add --accelerator tpu-v6e-16 --spot
  kinetic pool remove tpu-v6e-16-spot-0
"""
_ADD_HELP = """Add node pools for an accelerator: for each TPU slice of several hosts one.

\b
Example:
  kinetic pool add --accelerator tpu-v6e-16 --slices 2 --reservation NAME
"""
_REMOVE_HELP = """Remove a node pool that `kinetic up` or `kinetic pool add` has made.

\b
Example:
  kinetic pool remove tpu-v6e-16-0
"""
_LIST_HELP = """List the node pools; on Autopilot the kinds of nodes that exist now.

\b
Example:
  kinetic pool list --json
"""


def _join_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _flag(*names: str, help: str) -> Callable[[Any], Any]:
    return click.option(*names, is_flag=True, help=help)


def _value(name: str, metavar: str, help: str) -> Callable[[Any], Any]:
    return click.option(name, metavar=metavar, help=help)


def _number(name: str, least: int, help: str) -> Callable[[Any], Any]:
    return click.option(name, metavar="N", type=click.IntRange(least), default=least, help=help)


_place_options = _join_options(
    _value("--project", "ID", "Google Cloud project."),
    _value("--zone", "ZONE", "Zone, or for Autopilot region, of the cluster."),
    _value("--cluster", "NAME", f"Name of the cluster (default: {CLUSTER})."),
)
_profile_options = _join_options(
    _value("--namespace", "NAME", "Kubernetes namespace for the jobs."),
    _value("--profile-name", "NAME", "Name of the profile that is written."),
)
_preview_option = _flag("--preview", "--dry-run", "preview", help="Show steps and price only.")
_capacity_options = _join_options(
    _number("--slices", 1, "Slices of each accelerator."),
    _number("--min-nodes", 0, "Machines of each node pool that stay without jobs, and cost."),
    _flag("--spot", help="Machines that Google may take away, for less."),
    _value("--reservation", "NAME", "Machines of this reservation."),
    _flag("--flex-start", help="Wait for machines, for up to 7 days of use."),
    _flag("--queued", help="Get all machines together, through the queue."),
    _flag("--network-devices", help="Several network devices (DRANET)."),
)


def _accelerator_option(*, required: bool) -> Callable[[F], F]:
    return click.option(
        "--accelerator",
        "accelerators",
        metavar="NAME",
        multiple=True,
        required=required,
        shell_complete=complete_with("accelerators"),
        help="Accelerator of the jobs, such as tpu-v6e-16. Repeatable.",
    )


def _confirm(question: str, *, yes: bool, name: str = "") -> None:
    """Ask before something is done; with `name`, the user must type it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("Nothing was done. Add --yes to confirm the steps above.")
    if not name:
        click.confirm(question, abort=True, err=True)
    elif click.prompt(f"{question} Type its name", err=True) != name:
        raise UsageError("That is not its name. Nothing was done.")


# --- up


@click.command("up", help=_UP_HELP, short_help="Create a cluster.")
@_place_options
@_accelerator_option(required=False)
@_capacity_options
@_flag("--standard", help="A Standard cluster with node pools, in one zone.")
@_flag("--multi-tier", help="GKE's multi-tier checkpoints.")
@_flag("--no-queue", help="Install no queue (Kueue).")
@_value("--jobset-manifest", "FILE|URL", "Install this JobSet instead.")
@_value("--kueue-manifest", "FILE|URL", "Install this Kueue instead.")
@_flag("--kind", help="A cluster on this machine, with Docker and kind.")
@_flag("--ray", help="Print the manifest of a RayCluster; apply nothing.")
@_value("--gcsfuse", "BUCKET", "With --ray: mount this bucket at /data.")
@_profile_options
@ignore_option("--force-destroy/--no-force-destroy", is_flag=True)
@_preview_option
@yes_option
def up(**options: Any) -> int | None:
    """Create a cluster, or what is missing of it."""
    from kinetic._backends.kubernetes.cluster import check_packages
    from kinetic._clusters import convergence, preview
    from kinetic._clusters.difference import difference
    from kinetic._clusters.releases import RELEASES

    slices, pools = plan_pools(options)
    loaded = settings.load(flags={n: options[n] for n in ("project", "zone", "cluster")})
    named = loaded.cluster or CLUSTER
    name = check_name(named.removeprefix("kind-") if options["kind"] else named)
    standard = options["standard"]
    has_queue = not options["no_queue"]
    manifests = ("jobset", "kueue") if has_queue else ("jobset",)
    space = options["namespace"] or loaded.namespace or "default"
    wanted = Wanted(name, "", "", Mode.KIND, slices, (), space, "", manifests, has_queue)
    if options["ray"]:
        _print_ray(wanted, options)
        return None
    if options["gcsfuse"]:
        raise UsageError("--gcsfuse mounts a bucket in the pods of a Ray cluster. Add --ray.")
    check_packages()
    releases = {
        key: release.replace_source(options[f"{key}_manifest"]) for key, release in RELEASES.items()
    }
    if options["kind"]:
        return _up_on_kind(wanted, releases, options)
    check_mode(pools, options)
    project = _require_project(loaded)
    wanted = replace(
        wanted,
        project=project,
        location=choose_location(loaded.zone or "", slices, standard=standard),
        mode=Mode.STANDARD if standard else Mode.AUTOPILOT,
        pools=pools if standard else (),
        bucket=name_bucket(project, name),
        multi_tier=options["multi_tier"],
        networks=options["network_devices"],
    )
    profile = _Profile(options["profile_name"] or name, wanted, f"gs://{wanted.bucket}")
    doors = convergence.open_doors(project, settings.variables(), releases)
    steps = difference(wanted, convergence.observe(wanted, doors), releases)
    output.line(preview.describe(wanted, steps, loaded.prices))
    if options["preview"]:
        return None
    profile.check()
    if steps:
        _confirm(f"Create this in {project}?", yes=options["yes"])
        convergence.converge(wanted, doors, output.line, steps)
    _write_access(wanted, doors)
    if wanted.has_queue:
        output.line('To send jobs through the queue: queue="kinetic", or KINETIC_QUEUE=kinetic.')
    return profile.use()


def _require_project(loaded: settings.Settings) -> str:
    if (loaded.cluster or "").startswith("kind-"):
        raise UsageError(
            f"{loaded.cluster} is a cluster on this machine, and this command is for Google Cloud. "
            "Name another cluster with --cluster."
        )
    if not loaded.project:
        raise UsageError(
            "No project is named. Name one with --project; `gcloud projects list` shows yours."
        )
    return loaded.project


class _Profile:
    """The profile of a cluster."""

    def __init__(self, name: str, wanted: Wanted, store: str) -> None:
        self.name = name
        kind = wanted.mode is Mode.KIND
        cluster = wanted.context if kind else wanted.name
        values = {"project": wanted.project, "zone": wanted.location, "cluster": cluster}
        values |= {"namespace": wanted.namespace, "store": store}
        self.values = {key: value for key, value in values.items() if value}
        self.path = settings.profiles_file()

    def check(self) -> None:
        """Refuse a profile that could not be written, before anything is created."""
        from kinetic.cli.commands.profile import check_readers

        check_readers(self.path, self.values)
        stored = profiles.read(self.path).by_name.get(profiles.check_name(self.name), self.values)
        if any(stored.get(key) != self.values.get(key) for key in ("project", "cluster")):
            raise UsageError(
                f"The profile {self.name!r} exists already, for the cluster "
                f"{stored.get('cluster', 'none')} of the project {stored.get('project', 'none')}. "
                "Choose another name with --profile-name."
            )

    def use(self) -> int:
        """Write the profile, make it the current one, and run the doctor."""
        from kinetic.cli.commands.doctor import doctor

        def add(before: profiles.Profiles) -> profiles.Profiles:
            return before.with_profile(self.name, self.values, force=True).with_current(self.name)

        profiles.change(self.path, add)
        output.line(f"The current profile is {self.name}, in {self.path}. kinetic doctor:")
        settings.choose_profile(self.name)
        context = click.get_current_context()
        context.call_on_close(lambda: settings.choose_profile(None))
        return int(context.invoke(doctor, as_json=False))


def _write_access(wanted: Wanted, doors: Doors) -> None:
    from kinetic._clusters import access

    cluster = _require(wanted, doors.gke.get_cluster(wanted))
    path = access.write(access.make_access(wanted.context, cluster), doors.variables)
    output.line(f"For kubectl: KUBECONFIG={path} kubectl --context {wanted.context} get nodes")


def _print_ray(wanted: Wanted, options: Options) -> None:
    from kinetic._clusters.ray_cluster import make_ray_cluster
    from kinetic.cli.manifests import Format, format_documents

    if not wanted.slices:
        raise UsageError(
            "Name the accelerators of the Ray cluster, for example --accelerator tpu-v6e-8."
        )
    bucket = (options["gcsfuse"] or "").removeprefix("gs://")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    needs = replace(wanted, bucket=bucket, networks=options["network_devices"])
    output.line(format_documents(make_ray_cluster(needs, version), Format.YAML))
    output.notice(
        "Nothing was applied. Save the manifest as ray.yaml, then:\n"
        "  kubectl apply --server-side -f ray.yaml\n"
        f"  kubectl -n {wanted.namespace} port-forward svc/{wanted.name}-head-svc 8265:8265"
    )


def _up_on_kind(wanted: Wanted, releases: Mapping[str, Release], options: Options) -> int | None:
    from kinetic._clusters import convergence, kind, preview
    from kinetic._clusters.difference import difference
    from kinetic._clusters.observed import Observed

    variables, store = settings.variables(), Path(settings.load(profile={}).home)
    kind.check_installed(variables)
    kind.make_config(wanted, store)
    output.line(preview.describe(wanted, difference(wanted, Observed(), releases), {}))
    if options["preview"]:
        return None
    profile = _Profile(options["profile_name"] or wanted.name, wanted, str(store))
    profile.check()
    _confirm("Create this on this machine?", yes=options["yes"])
    output.line(f"create cluster {wanted.name}")
    entry = kind.create(wanted, store, variables)
    convergence.fill_cluster(wanted, entry, variables, releases, output.line)
    return profile.use()


# --- a cluster that exists


def _find(options: Options) -> tuple[Wanted, Doors, Document | None]:
    """Return a cluster by its name, wherever it is, as it would be wanted; its services; and its
    document, None if there is none."""
    from kinetic._backends.kubernetes.cluster import check_packages
    from kinetic._clusters import convergence
    from kinetic._clusters.observed import mode_of

    check_packages()
    loaded = settings.load(flags={n: options[n] for n in ("project", "zone", "cluster")})
    project, zone = _require_project(loaded), loaded.zone or ""
    name = (loaded.cluster or CLUSTER).rpartition("_")[2]  # of a context such as gke_p_zone_dev
    doors = convergence.open_doors(project, settings.variables())
    clusters = [c for c in doors.gke.list_clusters() if c["name"] == name]
    fitting = [c for c in clusters if fits_location(str(c["location"]), zone)]
    if len(fitting) > 1 or (clusters and not fitting):
        places = ", ".join(sorted(str(cluster["location"]) for cluster in clusters))
        if not fitting:
            raise UsageError(
                f"{project} has no cluster {name} in {zone}, but in {places}. Correct --zone."
            )
        raise UsageError(
            f"{project} has several clusters {name}, in {places}. Choose one with --zone."
        )
    cluster = fitting[0] if fitting else None
    location, mode = (cluster["location"], mode_of(cluster)) if cluster else (zone, Mode.STANDARD)
    space, bucket = loaded.namespace or "default", name_bucket(project, name)
    wanted = Wanted(name, project, location, mode, namespace=space, bucket=bucket)
    return wanted, doors, cluster


def _require(wanted: Wanted, cluster: Document | None) -> Document:
    """Return the document of a cluster that must exist."""
    if cluster is None:
        raise NotFound(
            f"{wanted.project} has no cluster {wanted.name}. Create it with `kinetic up`, or name "
            "another with --cluster; `kinetic init` lists all."
        )
    return cluster


@click.command("down", help=_DOWN_HELP, short_help="Remove a cluster.")
@_place_options
@_flag("--force", help="Remove it although jobs run.")
@_value("--delete-store", "BUCKET", "Remove this bucket, with all records.")
@_preview_option
@yes_option
def down(**options: Any) -> None:
    """Remove a cluster."""
    from kinetic._clusters import convergence, kind, preview
    from kinetic._clusters.difference import list_remains, list_removals

    named, store = options["cluster"] or settings.load().cluster or "", options["delete_store"]
    if named.startswith("kind-"):
        name = named.removeprefix("kind-")
        kind.check_installed(settings.variables())
        if options["preview"]:
            return output.line(f"kind delete cluster --name {name}")
        _confirm(f"Remove the cluster {name}?", yes=options["yes"], name=name)
        return kind.remove(Wanted(name, "", "", Mode.KIND), settings.variables())
    wanted, doors, _ = _find(options)
    if store is not None and store.removeprefix("gs://") != wanted.bucket:
        raise UsageError(
            f"The bucket of the cluster {wanted.name} is {wanted.bucket}, not {store}. Nothing was "
            f"removed. To remove it with the cluster, write --delete-store {wanted.bucket}."
        )
    decide = partial(list_removals, wanted, with_bucket=store is not None)
    observed = convergence.observe(wanted, doors, whole=False)
    steps = decide(observed)
    lines = preview.list_steps(steps) if steps else []
    for line in [*lines, *list_remains(wanted, observed, with_bucket=store is not None)]:
        output.line(line)
    if not steps:
        cause = f": {wanted.project} has no cluster {wanted.name}"
        return output.notice(f"There is nothing to remove{'' if observed.cluster else cause}.")
    if options["preview"]:
        return None
    jobs = () if options["force"] else convergence.list_jobs(wanted, observed, doors)
    if jobs:
        raise PreflightError(
            f"Nothing was removed, because jobs of {wanted.name} have not ended: "
            f"{', '.join(jobs)}. Cancel them with `kinetic jobs cancel`, or add --force."
        )
    _confirm(f"Remove {wanted.name}?", yes=options["yes"], name=wanted.name)
    convergence.remove(wanted, doors, decide, output.line)
    stored = profiles.read(settings.profiles_file())
    for name in [n for n, v in stored.by_name.items() if v.get("cluster") == wanted.name]:
        output.line(f"The profile {name} names the cluster still: kinetic profile rm {name}")
    return None


def _read_state(options: Options) -> ClusterState:
    from kinetic._clusters.status import read_state

    wanted, doors, cluster = _find(options)
    return read_state(wanted, doors, _require(wanted, cluster), settings.load().prices)


@click.command("status", help=_STATUS_HELP, short_help="Show a cluster and what it costs now.")
@_place_options
@json_option
def status(as_json: bool, **options: Any) -> None:
    """Print the state of a cluster."""
    from kinetic._client.board import text

    state = _read_state(options)
    if as_json:
        return output.json_document(state.to_json())
    output.line(text.align_pairs(state.list_facts()) + "\n")
    return output.table(state.COLUMNS, [row.cells for row in state.pools])


# --- node pools


@click.group(
    "pool",
    cls=LazyGroup,
    lazy={
        "add": Lazy("kinetic.cli.commands.clusters:add_pool", "Add node pools."),
        "remove": Lazy("kinetic.cli.commands.clusters:remove_pool", "Remove a node pool."),
        "list": Lazy("kinetic.cli.commands.clusters:list_pools", "List the node pools."),
    },
    aliases={"ls": "list", "rm": "remove"},
    help=_POOL_HELP,
)
def pool() -> None:
    """Commands for node pools."""


def _find_standard(options: Options) -> tuple[Wanted, Doors]:
    wanted, doors, cluster = _find(options)
    _require(wanted, cluster)
    if wanted.mode is Mode.AUTOPILOT:
        raise UsageError(
            f"{wanted.name} is an Autopilot cluster: its nodes come with the jobs that need them "
            "and go with them, so no node pool is needed. `kinetic pool list` shows the nodes."
        )
    return wanted, doors


@click.command("add", help=_ADD_HELP, short_help="Add node pools.")
@_place_options
@_accelerator_option(required=True)
@_capacity_options
@_preview_option
@yes_option
def add_pool(**options: Any) -> None:
    """Add node pools for an accelerator."""
    from kinetic._clusters import convergence, preview
    from kinetic._clusters.difference import difference

    slices, pools = plan_pools(options)
    if not pools:
        raise UsageError("Processors need no node pool: the default pool has them.")
    wanted, doors = _find_standard(options)
    choose_location(wanted.location, slices, standard=True)
    wanted = replace(wanted, slices=slices, pools=pools, has_queue=True)
    observed = convergence.observe(wanted, doors)
    if f"ClusterQueue {QUEUE}" not in observed.objects:
        wanted = replace(wanted, has_queue=False)  # There is no queue to enlarge.
    steps = difference(wanted, observed)
    output.line(preview.describe(wanted, steps, settings.load().prices))
    if steps and not options["preview"]:
        _confirm(f"Add this to {wanted.name}?", yes=options["yes"])
        convergence.converge(wanted, doors, output.line, steps)


@click.command("remove", help=_REMOVE_HELP, short_help="Remove a node pool.")
@click.argument("name")
@_place_options
@_preview_option
@yes_option
def remove_pool(name: str, **options: Any) -> None:
    """Remove one node pool."""
    from kinetic._clusters import convergence, preview
    from kinetic._clusters.difference import list_pool_removal

    wanted, doors = _find_standard(options)
    decide = partial(list_pool_removal, wanted, name=name)
    steps = decide(convergence.observe(wanted, doors, whole=False))
    output.line("\n".join(preview.list_steps(steps)))
    if not options["preview"]:
        question = f"Remove the node pool {name} of {wanted.name}? Jobs on it end."
        _confirm(question, yes=options["yes"], name=name)
        convergence.remove(wanted, doors, decide, output.line)


@click.command("list", help=_LIST_HELP, short_help="List the node pools.")
@_place_options
@json_option
def list_pools(as_json: bool, **options: Any) -> None:
    """Print one line for each node pool."""
    state = _read_state(options)
    if as_json:
        return output.json_document(state.to_json()["pools"])
    if state.wanted.mode is Mode.AUTOPILOT:
        output.notice(f"{state.wanted.name} is an Autopilot cluster: nodes come and go with jobs.")
    return output.table(state.COLUMNS, [row.cells for row in state.pools])


# --- init


@click.command("init", help=_INIT_HELP, short_help="Join or create a cluster, or check it.")
@_place_options
@_profile_options
@yes_option
@click.pass_context
def init(ctx: click.Context, /, **options: Any) -> int | None:
    """Ask what to do, and do it."""
    from kinetic._backends.kubernetes.cluster import check_packages
    from kinetic.cli.commands.doctor import doctor

    check_packages()
    if not sys.stdin.isatty():
        raise UsageError(
            "`kinetic init` asks questions, and there is no terminal. `kinetic up --project ID` "
            "creates a cluster, `kinetic profile create NAME --project ID --zone ZONE --cluster "
            "NAME` uses one of your kubeconfig, and `kinetic doctor` checks it."
        )
    choices = click.Choice(["join", "create", "troubleshoot"])
    choice = click.prompt("What do you want to do?", type=choices, default="join", err=True)
    if choice == "troubleshoot":
        return int(ctx.invoke(doctor, as_json=False))
    project = options["project"] or settings.load().project
    options["project"] = project or click.prompt("Google Cloud project", err=True)
    if choice == "join":
        return _join(options)
    accelerator = click.prompt("Accelerator of your jobs (cpu for none)", "tpu-v6e-8", err=True)
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value and name != "yes"
    ]
    words += ["--yes"] if options["yes"] else []
    with up.make_context("up", ["--accelerator", accelerator, *words], parent=ctx) as context:
        return up.invoke(context)  # type: ignore[no-any-return]


def _join(options: Options) -> int:
    """Use a cluster that exists: choose it, write the access and a profile."""
    from kinetic._clusters import convergence

    project = options["project"]
    doors = convergence.open_doors(project, settings.variables())
    name = options["cluster"]
    clusters = [c for c in doors.gke.list_clusters() if name in (None, c["name"])]
    if not clusters:
        raise NotFound(
            f"The project {project} has no such cluster. `kinetic up --project {project}` creates "
            "one."
        )
    for number, row in enumerate(clusters, 1):
        output.line(f"{number:>3}. {row['name']} in {row['location']}, {row.get('status')}")
    number = click.prompt("Number", type=click.IntRange(1, len(clusters)), default=1, err=True)
    name, location = str(clusters[number - 1]["name"]), str(clusters[number - 1]["location"])
    wanted = Wanted(name, project, location, namespace=options["namespace"] or "default")
    store = f"gs://{name_bucket(project, name)}"
    if doors.cloud.read_bucket(name_bucket(project, name)) is None:
        store = click.prompt("Store of the jobs (gs://BUCKET)", err=True)
    profile = _Profile(options["profile_name"] or name, wanted, store)
    profile.check()
    _write_access(wanted, doors)
    return profile.use()
