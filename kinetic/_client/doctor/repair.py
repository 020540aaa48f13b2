"""Safe repairs: judging orphaned jobs, and removing what is no longer needed.

In: `Traces`. Out: lines that say what was done. A job's files are removed while its lock is held,
because they may be needed again by now.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kinetic._backends import registry
from kinetic._client.board.reader import JobBoard
from kinetic._client.doctor import leftovers
from kinetic._client.doctor.facts import HERE
from kinetic._client.doctor.leftovers import Traces
from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic._store import index
from kinetic._store.local import LocalStore
from kinetic._system import locks
from kinetic.errors import KineticError


def repair(store: LocalStore, traces: Traces, now: Callable[[], float] = time.time) -> list[str]:
    """Judge and remove; return what was done."""
    return _judge(store, leftovers.orphans(traces), now()) + [
        done
        for job_id, path in leftovers.removable(traces)
        if (done := _remove(store, job_id, Path(path)))
    ]


def _judge(store: LocalStore, job_ids: Sequence[str], now: float) -> list[str]:
    refs, done = list[JobRef](), list[str]()
    for job_id in job_ids:
        try:
            refs.append(index.find(store, job_id))
        except KineticError as error:
            done.append(_explain_unjudged(job_id, error))
    here = [ref for ref in refs if ref.backend == HERE.backend]
    found = JobBoard(store, lambda _: registry.make(HERE, store), lambda: now).settle(here)
    for job_id, outcome in found.items():
        if isinstance(outcome, KineticError):
            done.append(_explain_unjudged(job_id, outcome))
        elif outcome is not None:
            done.append(f"{job_id} is judged: {outcome.verdict}.")
    return done


def _explain_unjudged(job_id: str, why: KineticError) -> str:
    return (
        f"{job_id} could not be judged: {why} `kinetic jobs cleanup {job_id}` removes what is left "
        "of it."
    )


def _remove(store: LocalStore, job_id: str, path: Path) -> str:
    with contextlib.ExitStack() as held:
        if job_id and not held.enter_context(_try_lock(store, job_id)):
            return ""  # it has a supervisor after all
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{path} could not be removed: {error.strerror}."
    return f"{path} is removed."


@contextlib.contextmanager
def _try_lock(store: LocalStore, job_id: str) -> Iterator[bool]:
    """Hold the lock that a job's supervisor would hold; False when one does."""
    lock = store.path(f"{layout.job(job_id)}/local/lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # there never was a supervisor
        return
    except OSError:
        yield False
        return
    try:
        yield locks.try_hold_record(descriptor)
    finally:
        os.close(descriptor)
