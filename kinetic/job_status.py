"""Public: the status of a job."""

from kinetic._core.state import JobStatus

__all__ = ["JobStatus"]
