"""`python -m kinetic.runner`: one host's agent, as a backend starts it where hosts are not forked from a supervisor.

In: `KINETIC_*` variables (see identity). Out: the agent's exit code: 0 when its report was delivered. Called by a backend's
manifests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kinetic.errors import KineticError
from kinetic.job import paths, record
from kinetic.job.plan import Plan
from kinetic.runner.agent import Agent
from kinetic.runner.identity import Identity, from_environ
from kinetic.storage.base import Store
from kinetic.storage.local import LocalStore
from kinetic.storage.open import open_store


def main() -> int:
    """Run the agent of this host."""
    try:
        who = from_environ()
        store = open_store(who.store_uri)
        plan = Plan.from_json(record.parse(store.get(paths.plan(who.job_id))))
        Path(who.scratch).mkdir(parents=True, exist_ok=True, mode=0o700)
    except (KineticError, OSError) as error:
        sys.stderr.write(f"kinetic.runner: {error}\n")
        return 2
    return Agent(who, plan, store, _logs(who, store)).run()


def _logs(who: Identity, store: Store) -> tuple[Path, Path]:
    """The files of the host's output: in the store where that is a folder, else beside the work."""
    if isinstance(store, LocalStore):
        return store.path(paths.log(who.job_id, who.host)), store.path(paths.log_index(who.job_id, who.host))
    return Path(who.scratch) / f"log-{who.host}", Path(who.scratch) / f"log-{who.host}.idx"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Threads of gRPC would keep the process for a while.
