"""Where a job stands, under the name by which scripts import it.

In: nothing. Out: `JobStatus`. Called by users; the same enumeration as `kinetic.backends.base.Phase`.
"""

from kinetic.backends.base import Phase as JobStatus

__all__ = ["JobStatus"]
