"""`python -m kinetic.runner`: one host's agent, as a backend starts it where hosts are not forked
from a supervisor.

In: `KINETIC_*` variables (see identity). Out: the agent's exit code: 0 when its report was
delivered.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kinetic._core import layout, record
from kinetic._core.plan import Plan
from kinetic._host.agent.identity import from_environ
from kinetic._host.agent.loop import Agent
from kinetic._host.agents import log_files
from kinetic._store.open import open_store
from kinetic.errors import KineticError


def main() -> int:
    """Run the agent of this host."""
    try:
        who = from_environ()
        store = open_store(who.store_uri)
        plan = Plan.from_json(record.parse(store.get(layout.plan(who.job_id))))
        Path(who.scratch).mkdir(parents=True, exist_ok=True, mode=0o700)
    except (KineticError, OSError) as error:
        sys.stderr.write(f"kinetic.runner: {error}\n")
        return 2
    return Agent(who, plan, store, log_files(who, store)).run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Threads of gRPC would keep the process for a while.
