"""The errors of a batch: one for each input without a value, and a `BatchError` for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

from kinetic._client.batch.inputs import BatchEnd, InputState
from kinetic._client.batch.run import BatchView
from kinetic._core.failure import name_logs
from kinetic.errors import BatchError, JobCancelled, KineticError, NotFound, SubmitError, text_of

_NAMED = 5


def error_of(view: BatchView, index: int) -> BaseException | None:
    """Return the error of an input that has ended; None if its job succeeded."""
    batch, state, job = view.records.batch, view.states[index], view.handles[index]
    if state is InputState.SUCCEEDED:
        return None
    if state is InputState.FAILED and job is not None:
        return job.error()
    if state is InputState.SKIPPED:
        return SubmitError(
            f"Input {index} of {batch.group_id} was not submitted, because {view.stopped}. To run "
            "this input, submit it again."
        )
    if index in view.errors:
        return view.errors[index]
    return NotFound(
        f"Input {index} of {batch.group_id} has no result: the records of its job, "
        f"{batch.job_id(index)}, were removed. Submit the input again."
    )


def batch_error(
    view: BatchView, values: Mapping[int, Any], failed: Mapping[int, BaseException]
) -> BatchError:
    """Return the error of a batch. `failed` has the errors of inputs without a value, `values` an
    entry for each input. Its cause is the first failed input's error, else of a cancelled or
    skipped one."""
    batch = view.records.batch

    def rank(index: int) -> tuple[int, int]:
        """Return a sort key: failed inputs first, then cancelled, then skipped ones."""
        is_skipped = view.states[index] is InputState.SKIPPED
        return 2 if is_skipped else int(isinstance(failed[index], JobCancelled)), index

    blamed = sorted(failed, key=rank)
    jobs = {index: view.handles[index] for index in sorted(failed)}
    lines = []
    for index in blamed[:_NAMED]:
        job, words = jobs[index], text_of(failed[index]).strip().splitlines()[:1]
        title = f"input {index}" if job is None else f"input {index} ({job.job_id})"
        lines.append(f"  {': '.join([title, type(failed[index]).__name__, *words])}")
    lines += [f"  and {len(failed) - _NAMED} more"] if len(failed) > _NAMED else []
    first = next((job for index in blamed if (job := jobs[index]) is not None), None)
    if first is not None:
        outcome = None
        with contextlib.suppress(KineticError):
            outcome = first.outcome()
        host = 0 if outcome is None or outcome.first is None else outcome.first.host
        lines.append(f"{name_logs(first.job_id, host)}, kinetic jobs list --group {batch.group_id}")
    title = (
        f"{len(failed)} of {len(values)} inputs of {batch.name or 'the batch'} "
        f"({batch.group_id}) {'has' if len(failed) == 1 else 'have'} no result:"
    )
    error = BatchError(
        batch.group_id,
        [job for job in jobs.values() if job is not None],
        [None if index in failed else values[index] for index in range(len(values))],
        {index: cast("Exception", failed[index]) for index, job in jobs.items() if job is None},
        message="\n".join([title, *lines]),
    )
    error.__cause__ = failed[blamed[0]]
    return error


def describe_left_out(end: BatchEnd | None) -> str:
    """Return how many inputs were not submitted because the batch was stopped, and why it was; ""
    for none."""
    if end is None or not end.skipped:
        return ""
    return f"{_count_inputs(len(end.skipped))}, because {end.stopped or 'the batch was stopped'}"


def describe_unsubmitted(failures: Mapping[int, Exception]) -> str:
    """Return a text with the number of inputs without a job and the first error; "" for none."""
    if not failures:
        return ""
    return f"{_count_inputs(len(failures))} without a job. {text_of(failures[min(failures)])}"


def _count_inputs(number: int) -> str:
    return "1 input" if number == 1 else f"{number:,} inputs"
