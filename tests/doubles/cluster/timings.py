"""How long the cluster's components take and wait. Shorter than real ones: order and states are the
same, and tests are quick.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    settle_s: float = 0.0
    """From a container's end until its pod's phase says so (a real kubelet: about 1 s)."""
    pull_s: float = 0.0
    """Pulling an image that is not on the node."""
    backoff_s: float = 0.2
    """Before a Job's second pod; doubles (really 10 s)."""
    crash_backoff_s: float = 0.2
    """Before a container's third start with restartPolicy OnFailure; doubles (really 10 s)."""
    image_retry_s: float = 0.3
    """Between two pulls of an image that does not exist (really 13 s and more)."""
    mount_retry_s: float = 0.2
    """Between two tries to mount what does not exist (really 0.5 s, doubling)."""
    create_retry_s: float = 0.2
    """Before a Job tries again to create a pod that was refused (really 1 s)."""
    node_grace_s: float = 0.3
    """From a node's last sign of life until it counts as not ready (really 45 s)."""
    eviction_s: float | None = 0.3
    """In place of the 300 s for which pods tolerate a lost node. None: as their tolerations say."""
    pod_collection_s: float = 0.1
    """From a Node object's deletion until its pods go (really up to a minute)."""
    bookmark_s: float = 60.0
    """Between two bookmarks of a watch that asks for them."""


REAL = Timings(1.0, 0.6, 10.0, 10.0, 13.0, 0.5, 1.0, 45.0, None, 54.0)
