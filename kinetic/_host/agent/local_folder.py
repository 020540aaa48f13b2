"""The folder of a host in its machine's memory: kept from attempt to attempt.

In: identity, plan. Out: a `Home` for the worker; folders.
"""

from __future__ import annotations

from pathlib import Path

from kinetic._core.place import MULTI_TIER
from kinetic._core.plan import Plan
from kinetic._host.identity import Identity
from kinetic._host.worker.home import Home
from kinetic._system import memory_folder

VARIABLE = "KINETIC_LOCAL_DIR"


def prepare(identity: Identity, plan: Plan) -> Home | None:
    """Make the folder of a simulated host, or find that of a pod; None where there is none.

    In the volume of GKE's multi-tier checkpointing a service of the cluster says which process of
    JAX a host is, so that folder is left alone.

    Raises:
        OSError: the folder that the user named in `env=` cannot be made.
    """
    if identity.is_pod:
        folder = identity.base_env.get(VARIABLE, "")
        is_managed = plan.options.local_storage == MULTI_TIER and not identity.simulated
        return Home(folder, folder, identity.index, 1) if folder and not is_managed else None
    if not identity.simulated:
        return None
    hosts = plan.hosts
    name = f"host-{identity.index}"
    if given := plan.options.env.get(VARIABLE):
        own, place = Path(given, name), Path(given)
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Home(str(own), str(place), identity.index, hosts)
    made = memory_folder.make(plan.job_id, name)
    shared = memory_folder.make(plan.job_id, "local") if hosts > 1 else made
    if made is None or shared is None:
        return None
    return Home(str(made), str(shared), identity.index, hosts)
