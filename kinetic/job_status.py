"""Where a job stands, under the name by which scripts import it.

In: nothing. Out: `JobStatus`.
"""

from kinetic._backends.base import Phase as JobStatus

__all__ = ["JobStatus"]
