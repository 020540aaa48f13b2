"""Where a job stands, under the name by which scripts import it.

In: nothing. Out: `JobStatus`.
"""

from kinetic._core.state import JobStatus

__all__ = ["JobStatus"]
