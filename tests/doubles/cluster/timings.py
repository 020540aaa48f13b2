"""The delays of the cluster's components. They are shorter than real ones, with the same order of
states, so that tests are quick.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    settle_s: float = 0.0
    """The time from a container's end until its pod's phase says so (a real kubelet: about 1 s)."""
    pull_s: float = 0.0
    """The time to pull an image that is not on the node."""
    backoff_s: float = 0.2
    """The pause before a Job's second pod, doubled for each further one (really 10 s)."""
    crash_backoff_s: float = 0.2
    """The pause before a container's third start with restartPolicy OnFailure, doubled for each
    further one (really 10 s)."""
    image_retry_s: float = 0.3
    """The pause between two pulls of an image that does not exist (really 13 s and more)."""
    mount_retry_s: float = 0.2
    """The pause between two tries to mount a missing object (really 0.5 s, doubling)."""
    create_retry_s: float = 0.2
    """The pause before a Job tries to create a refused pod again (really 1 s)."""
    node_grace_s: float = 0.3
    """The time from a node's last report until it counts as not ready (really 45 s)."""
    eviction_s: float | None = 0.3
    """The time for which pods tolerate a lost node (really 300 s); None: that of their tolerations.
    """
    pod_collection_s: float = 0.1
    """The time from a Node object's deletion until its pods are deleted (really up to a minute)."""
    bookmark_s: float = 60.0
    """The pause between two bookmarks of a watch that requests them."""


REAL = Timings(1.0, 0.6, 10.0, 10.0, 13.0, 0.5, 1.0, 45.0, None, 54.0)
