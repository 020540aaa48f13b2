"""Jobs seen from outside, under the name by which scripts import them.

In: nothing. Out: `JobHandle`, `JobStatus`, `attach`, `list_jobs`. Called by users.
"""

from kinetic.handle import JobHandle, attach, list_jobs
from kinetic.job_status import JobStatus

__all__ = ["JobHandle", "JobStatus", "attach", "list_jobs"]
