"""The right to write a folder of checkpoints, which one process has at a time.

A record names the owner: its job, process and machine, and a beat, a number that the owner counts
up while it lives. An owner whose record has not changed for `SILENT_S` counts as dead. In a folder,
the owner also locks the record's file, which the kernel unlocks however the owner ends; beats are
needed only if several machines may share the folder. A beat replaces only the owner's previous
beat, so an owner that was suspended never overwrites its successor's record.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._store.base import Swaps
from kinetic._system import locks, machine
from kinetic.errors import CheckpointError, CheckpointInUse, KineticError, NotFound

RECORD = "kinetic-owner.json"
KEY = f"kinetic-owner/{RECORD}"
BEAT_S = 10.0
SILENT_S = 35.0
"""Seconds without a beat after which an owner counts as dead."""
_SAME_JOB_S = 20.0
"""The longest wait for the end of the same job's previous attempt, in seconds."""
_POLL_S = 0.5

_own: dict[str, Owner | None] = {}
"""The leases of this process, which the kernel's locks do not exclude from each other. To open and
close a locked file again would free its lock."""


@dataclass(frozen=True)
class Owner:
    """The owner of a lease.

    Attributes:
        job_id: the job, or "" outside of jobs.
        token: a random text, different for each lease.
        process: the id of the process.
        machine: the name of its machine.
        beat: a number that the owner counts up while it lives.
    """

    job_id: str
    token: str
    process: int
    machine: str
    beat: int = 0

    def __str__(self) -> str:
        writer = self.job_id or "a process without a job"
        return f"{writer} (process {self.process} on {self.machine})"


class Lease:
    """The right to write a folder. One process at a time has it, until it is released.

    Args:
        record: the record of the owner.
        target: the folder or URI that the owner alone may write, as messages name it.
        me: the process that acquires the lease.
        sleep: function that waits for the given number of seconds.
    """

    def __init__(
        self,
        record: InFolder | InStore,
        target: str,
        me: Owner,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._record = record
        self._target = target
        self._me = me
        self._sleep = sleep
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._is_mine = False
        self._written = me
        self._lost = ""

    def acquire(self) -> Owner | None:
        """Become the owner; return the previous owner if it ended without a release, else None.

        Raises:
            CheckpointInUse: another job has the lease.
            CheckpointError: the record cannot be written.
        """
        try:
            return self._acquire()
        except OSError as error:
            raise CheckpointError(
                f"The {self._target} cannot be written to: {error.strerror or error}. Choose a "
                "folder to which you may write."
            ) from error

    def _acquire(self) -> Owner | None:
        waited_s = 0.0
        while not self._record.take():
            owner, _ = self._record.read()
            if owner is None or owner.job_id != self._me.job_id or waited_s >= _SAME_JOB_S:
                raise self._in_use(owner)
            self._sleep(_POLL_S)  # This job's previous attempt is the owner, and is ending.
            waited_s += _POLL_S
        try:
            owner, before = self._watch_owner()
            if not self._record.replace(before, self._me):
                raise self._in_use(self._record.read()[0])
        except BaseException:
            self._record.free(remove=False)
            raise
        self._is_mine = True
        if self._record.needs_beats:
            count = functools.partial(count_up, self._beat, self._ended, BEAT_S)
            threading.Thread(target=count, name="kinetic-lease", daemon=True).start()
        return owner

    def _watch_owner(self) -> tuple[Owner | None, Any]:
        """Return a dead owner with its record; raise `CheckpointInUse` if the owner is alive."""
        owner, content = self._record.read()
        if owner is None or not self._record.needs_beats or owner.job_id == self._me.job_id != "":
            return owner, content
        waited_s = 0.0
        while waited_s < SILENT_S:
            self._sleep(_POLL_S)
            waited_s += _POLL_S
            now, content = self._record.read()
            if now is None:
                return None, content
            if now != owner:
                raise self._in_use(now)
        return owner, content

    def _in_use(self, owner: Owner | None) -> CheckpointInUse:
        writer = "another process" if owner is None else str(owner)
        return CheckpointInUse(
            f"The {self._target} is being written by {writer}. Wait until that process ends, stop "
            "its job (`kinetic jobs cancel`), or use another folder for this training.",
            job_id="" if owner is None else owner.job_id,
        )

    def check(self) -> None:
        """Check that this process still has the lease.

        Raises:
            CheckpointInUse: another process has taken the lease over.
            CheckpointError: the folder or the record was removed.
        """
        if self._lost:
            raise CheckpointInUse(self._lost)
        if not self._record.exists():
            raise CheckpointError(
                f"The {self._target}, or {RECORD} in it, was removed: nothing more is saved, as "
                "another job may write there now. Start this job again."
            )

    def release(self) -> None:
        """Give up the lease, so that other processes can acquire it. Idempotent."""
        with self._end() as was_mine, contextlib.suppress(OSError, KineticError):
            if was_mine:
                mine = self._record.read()[0]
                self._record.free(remove=mine is not None and mine.token == self._me.token)

    @contextlib.contextmanager
    def _end(self) -> Iterator[bool]:
        """Stop the beats, which could overwrite the next owner's record. Yield True if this process
        was the owner until now."""
        self._ended.set()
        with self._writing:
            was_mine, self._is_mine = self._is_mine, False
            yield was_mine

    def _beat(self, number: int) -> bool:
        """Write a beat; return True if the beats must end."""
        beat = replace(self._me, beat=number)
        with self._writing:
            if self._ended.is_set():
                return True
            if self._record.renew(self._written, beat):
                self._written = beat
                return False
            owner, _ = self._record.read()
            if owner is not None and owner.token == self._me.token:
                self._written = owner  # An earlier beat was written, but the answer was lost.
                return False
        writer = "another process" if owner is None else str(owner)
        self._lost = (
            f"The {self._target} was taken over by {writer} while this job did not respond. "
            "Nothing more is saved."
        )
        return True


def count_up(beat: Callable[[int], object], ended: threading.Event, every_s: float) -> None:
    """Call `beat` with 1, 2, ... every `every_s` seconds until it returns True or `ended` is set. A
    beat that fails is skipped, because the next one may succeed."""
    for number in itertools.count(1):
        if ended.wait(every_s):
            return
        with contextlib.suppress(OSError, KineticError):
            if beat(number):
                return


def _parse_owner(content: bytes) -> Owner | None:
    with contextlib.suppress(ValueError, TypeError):
        document = json.loads(content)
        names = ("job_id", "token", "process", "machine", "beat")
        return Owner(**{name: document[name] for name in names if name in document})
    return None


def _encode_owner(owner: Owner) -> bytes:
    return json.dumps(vars(owner), sort_keys=True).encode()  # Equal owners are equal bytes.


class InFolder:
    """A record in a folder of this machine.

    Attributes:
        needs_beats: true for a folder shared by machines, where the lock may not exclude an owner.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        # With the process id: a forked process does not hold the lock.
        self._name = f"{os.getpid()} {os.path.realpath(self._path)}"
        self._fd = -1
        self.needs_beats = machine.is_shared_folder(folder)

    def take(self) -> bool:
        """Lock the file; return False if another process or lease holds the lock."""
        if self._name in _own:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not locks.try_hold_record(fd):
            os.close(fd)
            return False
        self._fd = fd
        _own[self._name] = None
        return True

    def read(self) -> tuple[Owner | None, Any]:
        """Return the owner, and None as the argument `before` of `replace`. The owner itself reads
        through the locked descriptor: closing another one would free the lock."""
        if self._fd >= 0:
            return _parse_owner(os.pread(self._fd, 1 << 16, 0)), None
        if self._name in _own:
            return _own[self._name], None
        with contextlib.suppress(OSError):
            return _parse_owner(self._path.read_bytes()), None
        return None, None

    def is_held(self) -> bool:
        """True if a process has locked the file."""
        return self._name in _own or locks.is_record_held(self._path)

    def exists(self) -> bool:
        """True unless the locked file was removed or replaced. On a network file system, True also
        after other errors, and if the file has another inode number now: the next write notices a
        loss."""
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self.needs_beats or os.path.samestat(named, os.fstat(self._fd))

    def replace(self, before: Any, owner: Owner) -> bool:
        """Write the owner and return True: the lock excludes other writers."""
        _own[self._name] = owner
        self._write(owner)
        return True

    def renew(self, before: Owner, owner: Owner) -> bool:
        """Write the owner if the record still belongs to this process; return True if it does. A
        network file system may have given the lock to another machine meanwhile."""
        current = self.read()[0]
        is_own = current is not None and current.token == before.token
        if not is_own or not locks.try_hold_record(self._fd):
            return False
        self._write(owner)
        return True

    def _write(self, owner: Owner) -> None:
        """Overwrite the record without ever emptying it: readers take an empty one for no owner."""
        content = _encode_owner(owner)
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))

    def free(self, *, remove: bool) -> None:
        """Unlock the record's file; with `remove`, empty the file first. It is not deleted, because
        other processes that wait for the lock have it open."""
        if self._fd >= 0:
            if remove:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1
            _own.pop(self._name, None)


class InStore:
    """A record in a bucket, or another store without a folder."""

    needs_beats = True

    def __init__(self, store: Swaps) -> None:
        self._store = store

    def take(self) -> bool:
        """Return True: a store has no locks."""
        return True

    def read(self) -> tuple[Owner | None, Any]:
        """Return the owner, None if there is none, and the stored content, which `replace` takes as
        `before`."""
        try:
            content = self._store.get(KEY)
        except NotFound:
            return None, None
        return _parse_owner(content), content

    def exists(self) -> bool:
        """Return True: the next beat notices a missing record."""
        return True

    def replace(self, before: Any, owner: Owner) -> bool:
        """Write the owner and return True if the content is still `before`. Of several processes,
        only one succeeds."""
        content = _encode_owner(owner)
        if before is None:
            return self._store.put(KEY, content, if_absent=True)
        return self._store.swap(KEY, before, content)

    def renew(self, before: Owner, owner: Owner) -> bool:
        """Write the owner and return True if the record is still `before`: an owner that was
        suspended must not overwrite its successor."""
        return self._store.swap(KEY, _encode_owner(before), _encode_owner(owner))

    def free(self, *, remove: bool) -> None:
        """Delete the record if `remove` is True."""
        if remove:
            self._store.delete(KEY)


def open_record(directory: str) -> InFolder | InStore:
    """Return the record of a folder or URI, without reading it."""
    if "://" not in directory or directory.startswith("file://"):
        return InFolder(Path(directory.removeprefix("file://")))
    from kinetic._store.open import open_store

    store = open_store(directory)
    if not isinstance(store, Swaps):
        raise CheckpointError(
            f"Checkpoints cannot be written to {store.uri}: this kind of store cannot ensure that "
            "only one job writes them."
        )
    return InStore(store)
