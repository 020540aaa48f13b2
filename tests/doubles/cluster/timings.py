"""Delays of the cluster's components, shorter than real ones so that tests are quick. The states
still follow each other in the real order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    settle_s: float = 0.0
    """Time from a container's end until the pod's phase changes (about 1 s with a real kubelet)."""
    pull_s: float = 0.0
    """Time to pull an image that the node lacks."""
    backoff_s: float = 0.2
    """Pause before a Job's second pod, doubled for each further pod (really 10 s)."""
    crash_backoff_s: float = 0.2
    """Pause before a container's third start with restartPolicy OnFailure, doubled for each further
    start (really 10 s)."""
    image_retry_s: float = 0.3
    """Pause between attempts to pull an image that does not exist (really 13 s and more)."""
    mount_retry_s: float = 0.2
    """Pause between attempts to mount a missing object (really 0.5 s, doubling)."""
    create_retry_s: float = 0.2
    """Pause before a Job's pod that was refused is created again (really 1 s)."""
    node_grace_s: float = 0.3
    """Time after a node's last report until the node counts as not ready (really 45 s)."""
    eviction_s: float | None = 0.3
    """Time for which pods tolerate a lost node (really 300 s); None: use their tolerations."""
    pod_collection_s: float = 0.1
    """Time after a Node object's deletion until its pods are deleted (really up to a minute)."""
    bookmark_s: float = 60.0
    """Pause between bookmarks in a watch that requests them."""


REAL = Timings(1.0, 0.6, 10.0, 10.0, 13.0, 0.5, 1.0, 45.0, None, 54.0)
