"""What a job is submitted as: an entry of Ray's Jobs API.

In: a plan, `HostSettings`. Out: a plain document, without secrets: Ray shows all of it to everybody
who sees its dashboard. Pure.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from kinetic._backends.base import Document
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic._ray.jobs_api import Submission

DRIVER = "kinetic._host.ray"
NO_INTERPRETER = 69
STOP_MARGIN_S = 10
"""Time for the hosts' reports, after the function's grace."""
_RAYLETS = r"s/^--python_worker_command=\([^ ]*\).*/\1/p"
_HAS_RAY = 'import importlib.util as u, sys; sys.exit(not u.find_spec("ray"))'


@dataclass(frozen=True)
class HostSettings:
    """What a job is submitted with, besides the plan.

    Attributes:
        archive: the SHA-256 of kinetic's archive.
        store_uri: the store, as nodes of the cluster reach it.
        python: an interpreter that all nodes have; "" for that of Ray's own workers.
        simulated: whether virtual devices of the processor replace chips.
    """

    archive: str
    store_uri: str
    python: str = ""
    simulated: bool = False

    @property
    def has_store_on_head(self) -> bool:
        """Whether the cluster itself keeps the store (see `_store.ray`)."""
        return self.store_uri.startswith("ray+")


def render(plan: Plan, settings: HostSettings) -> Document:
    """Return the document that submits a plan."""
    variables = {
        "KINETIC_JOB_ID": plan.job_id,
        "KINETIC_STORE": settings.store_uri,
        # Ray's own limit is 3 s.
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
    """Return the runtime environment in which programs find kinetic."""
    # Not working_dir: each node unpacks that anew, though nodes of one machine share the folder.
    return {"py_modules": [f"gcs://{package_of(archive)}"]}


def package_of(digest: str) -> str:
    """Return the name that Ray has for the archive with this SHA-256."""
    return f"_ray_pkg_{digest[:32]}.zip"


def read(document: Document, lines: Sequence[str] = ()) -> Submission:
    """Return what is sent for a document, whose cluster installs these lines first."""
    runtime_env = dict(document["runtime_env"])
    if lines:
        runtime_env["uv"] = {"packages": list(lines)}
    own = (document["submission_id"], document["entrypoint"])
    return Submission(*own, runtime_env, document["metadata"])


def entrypoint(python: str, *, installs: bool, module: str = DRIVER) -> str:
    """Return the command of a driver: with the interpreter of Ray's own workers, which is often
    not the first one on the PATH. Their raylet is the parent of the shell's parent, and has it in
    its command line; where the job installs something, Ray puts its environment on the PATH.
    """
    workers = (
        "$(tr '\\0' '\\n' 2>/dev/null "
        "</proc/$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status)/cmdline "
        f"| sed -n {shlex.quote(_RAYLETS)})"
    )
    found = f'"{workers}"'
    tried = ["python", found, "python3"] if installs else [found, "python", "python3"]
    named = [shlex.quote(python)] if python else tried
    said = (
        "kinetic: no Python that has Ray was found where the driver runs (tried: "
        f"{python or 'that of the raylet, python, python3'}). Set KINETIC_POD_PYTHON to it."
    )
    return (
        f"for p in {' '.join(named)}; do "
        f'if [ -n "$p" ] && "$p" -c {shlex.quote(_HAS_RAY)} 2>/dev/null; '
        f'then exec "$p" -m {module}; fi; done; '
        f"echo {shlex.quote(said)} >&2; exit {NO_INTERPRETER}"
    )
