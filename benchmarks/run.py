"""Run every benchmark of this folder, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ORDER = (
    "startup.py",
    "calls.py",
    "batch.py",
    "submit_tree.py",
    "store_calls.py",
    "logs.py",
    "metrics.py",
    "cluster.py",
    "ray_jobs.py",
    "deaths.py",
    "gang_scale.py",
    "checkpoints.py",
    "recovery.py",
    "compiling.py",
    "dashboard.py",
)


def main() -> int:
    here = Path(__file__).resolve().parent
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    there = [here / name for name in ORDER if (here / name).exists()]
    codes = [
        subprocess.run([sys.executable, path], env=env, check=False).returncode for path in there
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
