"""`make demo-ray`: run a script with a real Ray cluster here, which ends with the script."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from doubles.ray_cluster import end_cluster, start_cluster, why_impossible


def main(arguments: list[str]) -> int:
    if problem := why_impossible():
        print(f"demo-ray: this machine cannot run a cluster: {problem}.", file=sys.stderr)
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
