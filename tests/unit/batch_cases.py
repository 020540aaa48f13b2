"""Batches that tests begin and attach to."""

from __future__ import annotations

import contextlib
import itertools
import time

from kinetic._backends import registry
from kinetic._client.batch import handle as handles
from kinetic._client.batch.executor import BatchExecutor
from kinetic._client.batch.handle import BatchHandle
from kinetic._client.batch.ledger import BatchRules, Ledger
from kinetic._client.batch.manifest import Manifest, new_batch

PATIENCE_S = 200.0


def begin(source, total, rules=None, **more):
    """As `launch.launch` does, but always in the background."""
    rules = rules or BatchRules()
    batch = new_batch(
        source.store, total, known_ids=source.known_ids, now=0.0, retries=rules.retries, **more
    )
    executor = BatchExecutor(Ledger(total, rules), Manifest.begin(source.store, batch), source)
    handle = BatchHandle(executor)  # Before the first job: what ended earlier is not told.
    executor.start(here=False)
    return handle


@contextlib.contextmanager
def attached(batch, source):
    """The batch as another process sees it."""
    with registry.substitute_backend("local", lambda _, store: source):
        yield handles._attach(source.store, batch.group_id)


def until(batch, look):
    """Wait, together with the batch, until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        with contextlib.suppress(TimeoutError):
            batch.wait(timeout=0.01)


NUMBERS = itertools.count()
