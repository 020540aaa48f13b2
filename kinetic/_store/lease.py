"""The right to write a folder of checkpoints, which one process has at a time.

One record names the owner: its job, process, machine and a beat, a number that it counts up while
it lives. An owner whose record has not changed for `SILENT_S` is gone. In a folder of this machine
the record's file is locked, too, and no beat is needed: the kernel frees the lock however its owner
ends. Each beat replaces the one before only: an owner that was suspended writes nothing over its
successor's record.
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
"""An owner that has not counted up for so long is gone."""
_SAME_JOB_S = 20.0
"""How long the attempt before this one may take to be gone."""
_POLL_S = 0.5

_own: dict[str, Owner | None] = {}
"""What this process owns: its own record locks do not keep it out, and looking would free them."""


@dataclass(frozen=True)
class Owner:
    """Who writes.

    Attributes:
        job_id: the job, or "" outside of jobs.
        token: of this lease alone.
        process: its id, on its own machine.
        machine: the name of that.
        beat: counted up while it lives.
    """

    job_id: str
    token: str
    process: int
    machine: str
    beat: int = 0

    def __str__(self) -> str:
        who = self.job_id or "a process without a job"
        return f"{who} (process {self.process} on {self.machine})"


class Lease:
    """A right that one process has, until it is released.

    Args:
        place: of the record.
        what: may be written by the owner alone; as messages name it.
        me: who asks.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        place: InFolder | InStore,
        what: str,
        me: Owner,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._place = place
        self._what = what
        self._me = me
        self._sleep = sleep
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._is_mine = False
        self._written = me
        self._lost = ""

    def acquire(self) -> Owner | None:
        """Become the owner; return the one before, if it ended without saying so.

        Raises:
            CheckpointInUse: another job writes here.
            CheckpointError: the record cannot be written.
        """
        try:
            return self._acquire()
        except OSError as error:
            raise CheckpointError(
                f"The {self._what} cannot be written to: {error.strerror or error}."
            ) from error

    def _acquire(self) -> Owner | None:
        waited_s = 0.0
        while not self._place.take():
            owner, _ = self._place.read()
            if owner is None or owner.job_id != self._me.job_id or waited_s >= _SAME_JOB_S:
                raise self._in_use(owner)
            self._sleep(_POLL_S)  # an attempt of this job that is being ended
            waited_s += _POLL_S
        try:
            owner, before = self._watch_owner()
            if not self._place.replace(before, self._me):
                raise self._in_use(self._place.read()[0])
        except BaseException:
            self._place.free(remove=False)
            raise
        self._is_mine = True
        if self._place.counts:
            count = functools.partial(count_up, self._beat, self._ended, BEAT_S)
            threading.Thread(target=count, name="kinetic-lease", daemon=True).start()
        return owner

    def _watch_owner(self) -> tuple[Owner | None, Any]:
        """The record of an owner that is gone."""
        owner, record = self._place.read()
        if owner is None or not self._place.counts or owner.job_id == self._me.job_id != "":
            return owner, record
        waited_s = 0.0
        while waited_s < SILENT_S:
            self._sleep(_POLL_S)
            waited_s += _POLL_S
            now, record = self._place.read()
            if now is None:
                return None, record
            if now != owner:
                raise self._in_use(now)
        return owner, record

    def _in_use(self, owner: Owner | None) -> CheckpointInUse:
        who = "another process" if owner is None else str(owner)
        return CheckpointInUse(
            f"The {self._what} is being written by {who}. Wait until that "
            "ends, or stop it (`kinetic jobs cancel`), or give this training a folder of its own.",
            job_id="" if owner is None else owner.job_id,
        )

    def check(self) -> None:
        """Check that nobody has taken the folder over, or removed it.

        Raises:
            CheckpointInUse: somebody has taken it over.
            CheckpointError: it was removed.
        """
        if self._lost:
            raise CheckpointInUse(self._lost)
        if not self._place.is_there():
            raise CheckpointError(
                f"The {self._what} was removed, or its {RECORD}: another "
                "job may write there now, so nothing more is saved. Start this job again."
            )

    def release(self) -> None:
        """Let others write. Idempotent."""
        with self._end() as was_mine, contextlib.suppress(OSError, KineticError):
            if was_mine:
                mine = self._place.read()[0]
                self._place.free(remove=mine is not None and mine.token == self._me.token)

    @contextlib.contextmanager
    def _end(self) -> Iterator[bool]:
        """End to count up: one that does so now would write over the next owner. Yield whether this
        was the owner until now."""
        self._ended.set()
        with self._writing:
            was_mine, self._is_mine = self._is_mine, False
            yield was_mine

    def _beat(self, number: int) -> bool:
        """Count up; return whether somebody else has become the owner."""
        with self._writing:
            return self._ended.is_set() or self._write_beat(number)

    def _write_beat(self, number: int) -> bool:
        beat = replace(self._me, beat=number)
        if self._place.renew(self._written, beat):
            self._written = beat
            return False
        owner, _ = self._place.read()
        if owner is not None and owner.token == self._me.token:
            self._written = owner  # The answer to an earlier beat was lost.
            return False
        who = "somebody" if owner is None else str(owner)
        self._lost = (
            f"The {self._what} was taken over by {who}, while "
            "this job did not answer. Nothing more is saved."
        )
        return True


def count_up(beat: Callable[[int], object], ended: threading.Event, every_s: float) -> None:
    """Show that this process lives, where the kernel's locks say little: call `beat` with 1, 2, ...
    until it says that this is over. One that fails is no end: the next may arrive."""
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
        counts: whether an owner that is not locked out has to count up.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self._name = f"{os.getpid()} {os.path.realpath(self._path)}"  # A fork holds no such lock.
        self._fd = -1
        self.counts = machine.is_shared_folder(folder)

    def take(self) -> bool:
        """Lock the file; return False when somebody else has."""
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
        """Return the record, and what `replace` takes. Read through the descriptor that holds the
        lock, which another one would free."""
        if self._fd >= 0:
            return _parse_owner(os.pread(self._fd, 1 << 16, 0)), None
        if self._name in _own:
            return _own[self._name], None
        with contextlib.suppress(OSError):
            return _parse_owner(self._path.read_bytes()), None
        return None, None

    def is_held(self) -> bool:
        """Whether a process has locked the file."""
        return self._name in _own or locks.is_record_held(self._path)

    def is_there(self) -> bool:
        """Whether the locked file still has its name. File systems of a network may number a file
        anew, or fail for a moment: what is written next meets that, too."""
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self.counts or os.path.samestat(named, os.fstat(self._fd))

    def replace(self, before: Any, owner: Owner) -> bool:
        """Write; the lock keeps others out."""
        _own[self._name] = owner
        self._write(owner)
        return True

    def renew(self, before: Owner, owner: Owner) -> bool:
        """Write if the record is still this process's; return whether it is. A file system of a
        network may have given the lock to a machine that has taken the folder over."""
        current = self.read()[0]
        is_own = current is not None and current.token == before.token
        if not is_own or not locks.try_hold_record(self._fd):
            return False
        self._write(owner)
        return True

    def _write(self, owner: Owner) -> None:
        """Write in place; who reads meanwhile, on another machine, never finds it empty: an empty
        record has no owner."""
        content = _encode_owner(owner)
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))

    def free(self, *, remove: bool) -> None:
        """Unlock; with `remove`, empty the file, which stays: who waits for its lock has it
        open."""
        if self._fd >= 0:
            if remove:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1
            _own.pop(self._name, None)


class InStore:
    """A record in a bucket, or another store without a folder."""

    counts = True

    def __init__(self, store: Swaps) -> None:
        self._store = store

    def take(self) -> bool:
        """Nothing can be locked."""
        return True

    def read(self) -> tuple[Owner | None, Any]:
        """Return the record, and its content, which `replace` takes."""
        try:
            content = self._store.get(KEY)
        except NotFound:
            return None, None
        return _parse_owner(content), content

    def is_there(self) -> bool:
        """The thread that counts up looks."""
        return True

    def replace(self, before: Any, owner: Owner) -> bool:
        """Write if the object is still what was seen: one of several wins."""
        content = _encode_owner(owner)
        if before is None:
            return self._store.put(KEY, content, if_absent=True)
        return self._store.swap(KEY, before, content)

    def renew(self, before: Owner, owner: Owner) -> bool:
        """Write if the object is what this process has written last; return whether it is: an
        owner that was suspended must not write over the next one."""
        return self._store.swap(KEY, _encode_owner(before), _encode_owner(owner))

    def free(self, *, remove: bool) -> None:
        """With `remove`, delete the object."""
        if remove:
            self._store.delete(KEY)


def place_of(directory: str) -> InFolder | InStore:
    """Return the record of a folder or URI."""
    if "://" not in directory or directory.startswith("file://"):
        return InFolder(Path(directory.removeprefix("file://")))
    from kinetic._store.open import open_store

    store = open_store(directory)
    if not isinstance(store, Swaps):
        raise CheckpointError(f"The store {store.uri} cannot hold a lease.")
    return InStore(store)
