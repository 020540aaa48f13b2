"""Functions with which tests begin a batch, attach to it and wait for it."""

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
    """Start a batch like `launch.launch`, but always in the background; return its handle."""
    records = BatchRecords(source.store, new_batch(total, now=0.0, **more))
    records.begin()
    view = BatchView(records, rules)
    handle = BatchHandle(view)  # Before the first job: a handle shows only ends that follow.
    BatchSubmitter(view, source).start(blocking=False)
    return handle


def leave(store, batch):
    """Write the records of a batch whose process was killed: no end, and a dead process id."""
    records = BatchRecords(store, batch)
    records.begin()
    records._ended.set()
    records._stamp(Stamp(1, "not the one that has this id now", machine.container_id(), "machine"))
    return records


@contextlib.contextmanager
def attached(batch, source):
    """Yield the handle that another process gets when it attaches to the batch."""
    with registry.substitute_backend("local", lambda _, store: source):
        yield handles._attach(source.store, batch.group_id)


def until(batch, look):
    """Wait on the batch until `look()` is true; fail after `PATIENCE_S` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        with contextlib.suppress(TimeoutError):
            batch.wait(timeout=0.01)


NUMBERS = itertools.count()
