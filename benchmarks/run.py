"""Run every benchmark of this folder in turn, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ORDER = (
    "startup.py",
    "calls.py",
    "sessions.py",
    "programs.py",
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
    folder = Path(__file__).resolve().parent
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    paths = [folder / name for name in ORDER if (folder / name).exists()]
    codes = [
        subprocess.run([sys.executable, path], env=env, check=False).returncode for path in paths
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
