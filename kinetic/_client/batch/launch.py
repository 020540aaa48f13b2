"""The start of a batch. Its record comes before its first job: any process can attach to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict

from kinetic._client.batch.handle import BatchHandle, describe_reattaching
from kinetic._client.batch.records import BatchRecords, new_batch
from kinetic._client.batch.run import BatchRules, BatchSubmitter, BatchView
from kinetic._client.batch.sources import JobSource
from kinetic._client.board import console
from kinetic._client.submission import TAKE_BACK_S
from kinetic._core import checks
from kinetic._store.base import Store
from kinetic.errors import KineticError, UsageError, UsageTypeError

_log = logging.getLogger("kinetic.batch")
_MOST_INPUTS = 5_000_000
AtOnce = int | Literal["auto"] | None
Tags = Mapping[str, str] | Sequence[str]


class BatchOptions(TypedDict, total=False):
    """The options of `RemoteCallable.run_async_map`, for type checkers."""

    input_mode: str
    max_concurrent: AtOnce
    retries: int
    fail_fast: bool
    cancel_running_on_fail: bool
    name: str | None
    tags: Tags | None
    project: str | None
    cluster: str | None


def check_rules(
    *, max_concurrent: AtOnce, fail_fast: bool, cancel_running_on_fail: bool
) -> BatchRules:
    """Return the checked rules of a batch.

    Raises:
        UsageError: a value is invalid.
    """
    limit = None if max_concurrent == "auto" else max_concurrent
    if isinstance(limit, str):
        raise UsageTypeError(
            'max_concurrent must be a whole number, "auto", or None for all at once; got '
            f"{limit!r}."
        )
    return BatchRules(
        max_concurrent=None if limit is None else checks.count("max_concurrent", limit, least=1),
        fitted=max_concurrent == "auto",
        fail_fast=checks.switch("fail_fast", fail_fast),
        cancel_running_on_fail=checks.switch("cancel_running_on_fail", cancel_running_on_fail),
    )


def check_tags(notes: object) -> Any:
    """Return a copy of the caller's notes; {} for None.

    Raises:
        UsageError: the notes are not a dict or a list of strings.
    """
    if notes is None:
        return {}
    if isinstance(notes, Mapping) and all(
        isinstance(text, str) for pair in notes.items() for text in pair
    ):
        return dict(notes)
    if isinstance(notes, list | tuple) and all(isinstance(text, str) for text in notes):
        return list(notes)
    raise UsageTypeError(f"tags must be a dict of strings or a list of strings; got {notes!r}.")


def launch(
    source: JobSource, store: Store, total: int, batch_rules: BatchRules, *, name: str, notes: Any
) -> BatchHandle[Any]:
    """Start a batch and return its handle. Jobs are submitted in the background, from copies of the
    inputs. If nothing limits the number of jobs, all are submitted before this function returns.

    Raises:
        UsageError: the inputs are too many; nothing was submitted.
        StoreError: the store is full or cannot be written; nothing was submitted.
    """
    if total > _MOST_INPUTS:
        raise UsageError(
            f"{total:,} inputs are too many for one batch, which can have {_MOST_INPUTS:,}. Split "
            "them into several batches."
        )
    if batch_rules.fitted:
        batch_rules = replace(batch_rules, max_concurrent=source.room(), fitted=False)
        if batch_rules.max_concurrent is not None and batch_rules.max_concurrent < total:
            console.notice(
                f"kinetic: running {total:,} inputs, {batch_rules.max_concurrent} at a time to fit "
                "the available resources; max_concurrent= changes this"
            )
    blocking = batch_rules.max_concurrent is None and not batch_rules.cancels
    if not blocking:
        source.snapshot_inputs()
    records = BatchRecords(store, new_batch(total, now=time.time(), name=name, tags=notes))
    view = BatchView(records, batch_rules)
    submitter = BatchSubmitter(view, source)
    try:
        records.begin()
        handle: BatchHandle[Any] = BatchHandle(view)
        submitter.start(blocking=blocking)
        return handle
    except KeyboardInterrupt:
        _take_back(view, submitter)
        raise


def _take_back(view: BatchView, submitter: BatchSubmitter) -> None:
    """Stop a batch whose start was interrupted, and print how many inputs have a job. Without any
    job, remove the batch's records."""
    group_id, total = view.records.batch.group_id, view.records.batch.total
    try:
        submitter.give_up("the call that started the batch was interrupted", TAKE_BACK_S)
        if not view.count_submitted():
            view.records.remove()
    except (KineticError, OSError) as error:
        _log.info("%s could not be removed: %s", group_id, error)
    finally:  # Also after a second Ctrl-C, which ends the wait.
        submitted = view.count_submitted()
        event = f"the submission of {group_id} was interrupted:"
        of_all = f"of its {total:,} {'input' if total == 1 else 'inputs'}"
        others = "" if submitted == total else ", the others will not be"
        count = (
            f"{submitted:,} {of_all} {'was' if submitted == 1 else 'were'} submitted{others}; "
            f"{describe_reattaching(group_id)}"
            if submitted
            else f"none {of_all} was submitted."
        )
        console.notice(f"\nkinetic: {event} {count}", repeat=True)
