"""The start message that an agent sends its worker when the whole gang is ready.

In: identity, plan, workspace, the leader's address. Out: the fields of `Start`. The environment in
it makes programs on a host import the job's tree, not the caller's folder, and puts the programs of
this Python environment first on PATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinetic._core import preemption
from kinetic._core.plan import Plan
from kinetic._core.variables import LOADER_PATH
from kinetic._host.agent.workspace import REFORM_FILE, Workspace
from kinetic._host.identity import Identity
from kinetic._host.worker import jaxworld
from kinetic._host.worker.joining import World
from kinetic._host.worker.start import ElasticSlices

WORLD_FILE = "world"
"""A file in the host's folder that names the process that has joined the world; see `joining`."""
_MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_PYTHONPATH = "PYTHONPATH"
_SIMULATED_CALLS = 20
"""Number of calls of each program whose inputs are compared on simulated slices."""


def start_message(
    identity: Identity,
    plan: Plan,
    space: Workspace,
    leader: str,
    debugging: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the message with which the worker runs the function.

    Args:
        identity: identity of the host.
        plan: plan of the job.
        space: workspace of the host.
        leader: "address:port,port": the leader's address, with the port of JAX's coordination
            service and a free one for other frameworks.
        debugging: the debugger's port and window in a debug job, else None.
    """
    coordinator, _, port = leader.partition(",")
    # Simulated hosts imitate Pathways' devices only in jobs that may lose slices.
    is_real = not identity.simulated or plan.elastic_controller is not None
    platform = plan.platform if is_real else plan.topology.kind
    shares = identity.is_program or identity.session or plan.elastic_gang is not None
    world = World(
        coordinator,
        identity.hosts,
        identity.host,
        plan.devices_per_host,
        platform,
        identity.simulated,
        slices=_count_slices(identity, plan),
        port=int(port or 0),
        file=str(space.root / WORLD_FILE),
        limit_s=plan.limits.start_timeout_s,
        store=identity.store_uri if shares and not plan.has_single_controller else "",
    )
    calls = {"inputs": sys.maxsize, False: 0}.get(
        plan.options.compare_programs, _SIMULATED_CALLS if identity.simulated else 1
    )
    return {
        "attempt": identity.attempt,
        "places": list(space.data.places),
        "mounts": [asdict(mount) for mount in space.data.mounts],
        "home": None if space.home is None else asdict(space.home),
        "payload": str(space.payload),
        "payload_digest": plan.payload.digest,
        "function": "" if space.function is None else str(space.function),
        "env": _environ(identity, plan, space, world, debug=debugging is not None),
        "cwd": str(space.cwd),
        "sys_path": [*space.sys_path, *_requested_path(identity, plan, space)],
        "editable": list(space.editable),
        "scratch": str(space.root),
        "world": world.to_json(),
        "joins_jax": plan.options.joins_jax,
        "jax_options": dict(plan.jax_options),
        "name": plan.name,
        "tree": str(space.tree),
        "client_root": plan.client_root,
        "all_hosts": plan.options.all_hosts,
        "cells": [vars(cell) for cell in plan.cells],
        "debugger": debugging,
        "elastic": _elastic(plan),
        "programs": space.programs,
        "compares": calls if world.processes > 1 else 0,
        "keeps": identity.assignment is not None and identity.assignment.world > 0,
    }


def _elastic(plan: Plan) -> dict[str, Any] | None:
    rules = plan.elastic_controller
    if rules is None:
        return None
    machines = plan.options.most_slices * plan.topology.hosts
    return asdict(ElasticSlices(rules, machines, plan.limits.slice_away_s))


def _environ(
    identity: Identity, plan: Plan, space: Workspace, world: World, *, debug: bool
) -> dict[str, str]:
    """Return the worker's environment. The caller's settings override all others."""
    own = {
        "KINETIC_JOB_ID": identity.job_id,
        "JOB_ID": identity.job_id,
        "KINETIC_HOST_INDEX": str(identity.host),
        "KINETIC_HOSTS": str(identity.hosts),
        "KINETIC_ACCELERATOR": plan.topology.name,
        "KINETIC_ATTEMPT": str(identity.attempt),
        "KINETIC_SLICE_INDEX": str(_slice_index(identity, plan)),
        "KINETIC_NUM_SLICES": str(_count_slices(identity, plan)),
        "KINETIC_OUTPUT_DIR": space.output_dir,
        preemption.VARIABLE: str(space.root),
    }
    if plan.options.elastic is not None:
        own["KINETIC_LEAST_SLICES"] = str(plan.options.elastic.least)
        own["KINETIC_MOST_SLICES"] = str(plan.options.most_slices)
        own["KINETIC_REFORM_FILE"] = str(space.root / REFORM_FILE)
    if identity.lost_at:
        own["KINETIC_LOST_AT"] = str(identity.lost_at)
    debugging: dict[str, str] = {}
    if debug:
        from kinetic._host.worker.debugger import ENVIRON  # few jobs are debugged

        debugging = ENVIRON
    options = plan.options
    requested = dict(options.env) | dict(identity.secrets)
    # The inherited variable already has the caller's folders, and those that a GPU pod needs.
    if LOADER_PATH in identity.base_env:
        requested.pop(LOADER_PATH, None)
    overrides = own | debugging | requested | _python_path(identity, plan, space, requested)
    if identity.is_led_from_afar and plan.topology.kind == "tpu":
        base = {k: v for k, v in identity.base_env.items() if k not in _MEGASCALE}
        overrides = _megascale_variables(identity, plan, world) | overrides
    else:
        base = dict(identity.base_env)
    base |= prefer_environment(
        base,
        executable=sys.executable,
        prefix=sys.prefix,
        is_virtual=sys.prefix != sys.base_prefix,
    )
    return jaxworld.environ(world, base, overrides, automatic=options.joins_jax == "program")


def _megascale_variables(identity: Identity, plan: Plan, world: World) -> dict[str, str]:
    """Return the variables with which libtpu joins this attempt's slices. With those that
    Kubernetes sets, libtpu would wait for all slices of the job, lost ones too. Ray sets none."""
    slices = _count_slices(identity, plan)
    if slices == 1 or identity.simulated:
        return {}
    address, index = world.coordinator.rpartition(":")[0], _slice_index(identity, plan)
    return dict(zip(_MEGASCALE, (address, str(slices), str(index)), strict=True))


def _slice_index(identity: Identity, plan: Plan) -> int:
    """Return the host's slice; 0 for a single process with the devices of all slices."""
    return identity.host * _count_slices(identity, plan) // identity.hosts


def _count_slices(identity: Identity, plan: Plan) -> int:
    assignment = identity.assignment
    return plan.options.most_slices if assignment is None else len(assignment.slices)


def _python_path(
    identity: Identity, plan: Plan, space: Workspace, requested: Mapping[str, str]
) -> dict[str, str]:
    """Return PYTHONPATH, with which programs import from the tree. If the caller has set it in env=
    (`requested`), return that value, with paths of the tree instead of the project's."""
    root, tree = plan.client_root, str(space.tree)
    if _PYTHONPATH in requested:
        return {_PYTHONPATH: _move_path(requested[_PYTHONPATH], client_root=root, tree=tree)}
    value = make_search_path(
        (*space.sys_path, *space.editable),
        identity.base_env.get(_PYTHONPATH, ""),
        client_root=root,
        tree=tree,
    )
    return {_PYTHONPATH: value} if value else {}


def _requested_path(identity: Identity, plan: Plan, space: Workspace) -> list[str]:
    """Return the folders of the PYTHONPATH in the caller's env=, for sys.path: the worker is
    started without that variable."""
    requested = (dict(plan.options.env) | dict(identity.secrets)).get(_PYTHONPATH, "")
    moved = _move_path(requested, client_root=plan.client_root, tree=str(space.tree))
    return [str(space.cwd / entry) for entry in moved.split(os.pathsep) if entry]


def make_search_path(folders: Sequence[str], inherited: str, *, client_root: str, tree: str) -> str:
    """Return a PYTHONPATH for programs on a host: the tree's folders first, then the caller's
    entries, of which those in the project are replaced by the same folders in the tree.

    Omit a folder of the tree with a module named like one of the standard library, because it would
    hide that module from every program. Folders of the caller's own PYTHONPATH stay.

    Args:
        folders: folders of the tree from which the job imports.
        inherited: the caller's PYTHONPATH; "" if not set.
        client_root: the project's folder on the caller's machine.
        tree: the project's folder on this host.
    """
    own = [folder for folder in folders if not _hides_standard_modules(folder)]
    theirs = (
        _move_path(inherited, client_root=client_root, tree=tree).split(os.pathsep)
        if inherited
        else []
    )
    return os.pathsep.join(dict.fromkeys([*own, *theirs]))


def _move_path(value: str, *, client_root: str, tree: str) -> str:
    """Return a search path in which the project's folders are replaced by the tree's, if the tree
    has them."""
    return os.pathsep.join(
        _move_entry(entry, client_root, tree) for entry in value.split(os.pathsep)
    )


def prefer_environment(
    inherited: Mapping[str, str], *, executable: str, prefix: str, is_virtual: bool
) -> dict[str, str]:
    """Return the variables that activate this interpreter's environment, so that `python` and
    console scripts are its own. The job may have been submitted without activating it.

    Args:
        inherited: the variables so far.
        executable: path of the interpreter.
        prefix: folder of its environment.
        is_virtual: True for a virtual environment, which goes first on PATH; any other one only has
            to be on PATH.
    """
    programs = str(Path(executable).parent) if executable else ""
    entries = inherited.get("PATH", os.defpath).split(os.pathsep)
    if not programs or (programs in entries if not is_virtual else entries[0] == programs):
        return {}
    path = os.pathsep.join(dict.fromkeys([programs, *entries]))
    return {"PATH": path} | ({"VIRTUAL_ENV": prefix} if is_virtual else {})


def _move_entry(entry: str, client_root: str, tree: str) -> str:
    root = client_root.rstrip("/")
    real = os.path.realpath(entry) if entry.startswith("/") and client_root else ""
    if real != client_root and not real.startswith(f"{root}/"):
        return entry
    moved = tree + real[len(root) :]
    # A folder that was not sent, such as a virtual environment, keeps its path.
    return moved if Path(moved).is_dir() else entry


def _hides_standard_modules(folder: str) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(
        name.removesuffix(".py") in sys.stdlib_module_names
        and (name.endswith(".py") or Path(folder, name, "__init__.py").is_file())
        for name in names
    )
