"""What is said to who leaves a job before having its value: whether it runs, and how to come back.

In: a job's id. Out: sentences.
"""

from __future__ import annotations


def say_how_it_is(job_id: str, *, ended: bool, is_here: bool) -> str:
    """For who is interrupted; whether the job has ended, and whether the handle has its value, so
    that the records may be removed."""
    if not ended:
        return f"kinetic: {job_id} keeps running; {_way_back(job_id)}"
    way = "this handle's result()" if is_here else f'kinetic.attach("{job_id}").result()'
    return f"kinetic: {job_id} has ended: {way} returns its value, or raises its error."


def say_it_goes_on(job_id: str, fault: str) -> str:
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
