"""Beginning a batch: recorded first, then submitted.

In: a submitter, options of `run_async_map`. Out: `BatchHandle`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict

from kinetic._client.batch.executor import BatchExecutor
from kinetic._client.batch.handle import BatchHandle, way_back
from kinetic._client.batch.ledger import BatchRules, Ledger
from kinetic._client.batch.manifest import Manifest, new_batch
from kinetic._client.batch.submitters import Submitter
from kinetic._client.board import console
from kinetic._client.submission import TAKE_BACK_S
from kinetic._core import checks
from kinetic._store.base import Store
from kinetic.errors import KineticError, UsageError, UsageTypeError

_log = logging.getLogger("kinetic.batch")
_INTERRUPTED = "the call that began the batch was interrupted"
AtOnce = int | Literal["auto"] | None
Tags = Mapping[str, str] | Sequence[str]


class BatchOptions(TypedDict, total=False):
    """The options of `run_async_map`, for type checkers; documented there."""

    input_mode: str
    max_concurrent: AtOnce
    retries: int
    fail_fast: bool
    cancel_running_on_fail: bool
    name: str | None
    tags: Tags | None
    project: str | None
    cluster: str | None


def rules(
    *, max_concurrent: AtOnce, retries: int, fail_fast: bool, cancel_running_on_fail: bool
) -> BatchRules:
    """Check how a batch is to be run.

    Raises:
        UsageError: a value cannot work.
    """
    given = None if max_concurrent == "auto" else max_concurrent
    if isinstance(given, str):
        raise UsageTypeError(
            'max_concurrent must be a whole number, "auto", or None for all at once; it is '
            f"{given!r}."
        )
    return BatchRules(
        max_concurrent=None if given is None else checks.count("max_concurrent", given, least=1),
        fitted=max_concurrent == "auto",
        retries=checks.count("retries", retries, least=0),
        fail_fast=checks.switch("fail_fast", fail_fast),
        cancel_running_on_fail=checks.switch("cancel_running_on_fail", cancel_running_on_fail),
    )


def tags(given: object) -> Any:
    """Check the caller's notes: a dict or a list of strings.

    Raises:
        UsageError: they are something else.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(
        isinstance(text, str) for pair in given.items() for text in pair
    ):
        return dict(given)
    if isinstance(given, list | tuple) and all(isinstance(text, str) for text in given):
        return list(given)
    raise UsageTypeError(f"tags must be a dict of strings or a list of strings; it is {given!r}.")


def launch(
    submitter: Submitter, store: Store, total: int, how: BatchRules, *, name: str, notes: Any
) -> BatchHandle[Any]:
    """Begin a batch. Everything is submitted as it is now: in the background, or before this
    returns if nothing has to wait.

    Raises:
        UsageError: there are too many inputs, or no room to keep them; nothing was submitted.
        StoreError: the store is full or cannot be written; nothing was submitted.
    """
    if total * (how.retries + 1) > _MOST_IDS:
        raise UsageError(
            f"{total:,} inputs with {how.retries} retries are too many for one batch: make several."
        )
    if how.fitted:
        how = replace(how, max_concurrent=submitter.room(), fitted=False)
        _tell(how, total)
    here = how.max_concurrent is None and not how.retries and not how.cancels
    if not here:
        submitter.keep_inputs()
    batch = new_batch(
        store,
        total,
        known_ids=submitter.known_ids,
        now=time.time(),
        retries=how.retries,
        name=name,
        tags=notes,
    )
    executor = BatchExecutor(Ledger(total, how), Manifest(store, batch), submitter)
    try:
        Manifest.begin(store, batch)
        handle: BatchHandle[Any] = BatchHandle(executor)
        executor.start(here=here)
        return handle
    except KeyboardInterrupt:
        _take_back(executor)
        raise


def _take_back(executor: BatchExecutor) -> None:
    """Submit nothing more of a batch whose beginning was interrupted, and say what there is of it;
    if there is no job, remove its records."""
    try:
        executor.give_up(_INTERRUPTED, TAKE_BACK_S)
        if not executor.count_submitted():
            executor.manifest.remove()
    except (KineticError, OSError) as error:
        _log.info("%s could not be taken back: %s", executor.manifest.batch.group_id, error)
    finally:  # A second Ctrl-C ends the wait.
        console.notice(f"\nkinetic: {_say_what_is_left(executor)}", once=False)


def _say_what_is_left(executor: BatchExecutor) -> str:
    group_id, total = executor.manifest.batch.group_id, executor.manifest.batch.total
    submitted = executor.count_submitted()
    what = f"the submission of {group_id} was interrupted:"
    of_all = f"of its {total:,} {'input' if total == 1 else 'inputs'}"
    if not submitted:
        return f"{what} none {of_all} was submitted."
    others = "" if submitted == total else ", the others are not"
    return (
        f"{what} {submitted:,} {of_all} {'was' if submitted == 1 else 'were'} submitted{others}; "
        f"{way_back(group_id)}"
    )


def _tell(how: BatchRules, total: int) -> None:
    if how.max_concurrent is not None and how.max_concurrent < total:
        console.notice(
            f"kinetic: {total:,} inputs, {how.max_concurrent} at a time: what there is room for "
            "here; max_concurrent= changes it"
        )


_MOST_IDS = 5_000_000
"""All are recorded before the first job."""
