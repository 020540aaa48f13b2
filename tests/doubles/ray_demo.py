"""`make demo-ray`: a script on a real Ray cluster of this machine, which ends with it.

In: a script and its arguments. Out: its output, and its exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from doubles.ray_cluster import end_cluster, start_cluster, why_impossible


def main(arguments: list[str]) -> int:
    if problem := why_impossible():
        print(f"demo-ray: there can be no cluster here: {problem}.", file=sys.stderr)
        return 1
    print("demo-ray: starting a Ray cluster of 5 nodes ...", file=sys.stderr, flush=True)
    cluster = start_cluster()
    try:
        with tempfile.TemporaryDirectory(prefix="kinetic-demo-") as store:
            env = {
                **os.environ,
                "KINETIC_BACKEND": "ray",
                "KINETIC_ADDRESS": cluster.address,
                "KINETIC_STORE": store,
                "KINETIC_POD_PYTHON": sys.executable,
                "KINETIC_POD_SIMULATED": "1",
                "RAY_AUTH_TOKEN": cluster.token,
            }
            return subprocess.call([sys.executable, *arguments], env=env)
    finally:
        end_cluster(cluster.folder, cluster.pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
