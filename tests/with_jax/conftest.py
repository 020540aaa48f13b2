"""Tests that start JAX in the process of pytest itself.

They run in a pytest of their own, which `make test` and `make test-all` start after the other one:
once JAX has started a backend, it warns of every fork, and most other tests fork.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ABSENT = Path(__file__).parents[1] / "absent"
"""Stand-ins for large packages that Keras imports where they are installed, without need."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(ABSENT))
