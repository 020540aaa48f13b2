"""What is said to who leaves a job before having its value: whether it runs, and how to come back.

In: a job's id. Out: sentences.
"""

from __future__ import annotations


def keeps_running(job_id: str) -> str:
    """For who is interrupted."""
    return f"kinetic: {job_id} keeps running; {_way_back(job_id)}"


def has_ended(job_id: str) -> str:
    """For who has not waited until it had ended."""
    return f'kinetic: {job_id} has ended: kinetic.attach("{job_id}").result()'


def goes_on(job_id: str, fault: str) -> str:
    """For an error; `fault` is why it cannot be told whether the job runs."""
    it = "It keeps running"
    if fault:
        it = f"Whether it keeps running cannot be told now ({fault.rstrip('.')})"
    return f"{it}; {_way_back(job_id)}"


def _way_back(job_id: str) -> str:
    return (
        f'reattach with kinetic.attach("{job_id}").result() or `kinetic jobs logs -f {job_id}`, '
        f"stop it with `kinetic jobs cancel {job_id}`."
    )
