"""Batches that tests begin and attach to."""

from __future__ import annotations

import contextlib
import itertools
import time

from kinetic._backends import registry
from kinetic._client.batch import handle as handles
from kinetic._client.batch.handle import BatchHandle
from kinetic._client.batch.records import BatchRecords, Stamp, new_batch
from kinetic._client.batch.run import BatchSubmitter, BatchView
from kinetic._system import machine

PATIENCE_S = 200.0


def begin(source, total, rules=None, **more):
    """As `launch.launch` does, but always in the background."""
    records = BatchRecords(source.store, new_batch(total, now=0.0, **more))
    records.begin()
    view = BatchView(records, rules)
    handle = BatchHandle(view)  # Before the first job: no end that came earlier is shown.
    BatchSubmitter(view, source).start(blocking=False)
    return handle


def leave(store, batch):
    """A batch whose process was killed: there is no end, and its process is gone."""
    records = BatchRecords(store, batch)
    records.begin()
    records._ended.set()
    records._stamp(Stamp(1, "not the one that has this id now", machine.container_id(), "machine"))
    return records


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
