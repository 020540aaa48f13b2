"""Every exception that kinetic itself raises, drawn as a tree.

In: what went wrong, as text and as attributes. Out: exceptions.

    KineticError
    ├── UsageError (ValueError)             what the caller wrote cannot work; nothing was created
    │   ├── UsageTypeError (TypeError)      ... because a value has the wrong type
    │   ├── DataNotFound (FileNotFoundError)   ... because declared data does not exist
    │   ├── UnknownAccelerator              ... because no such accelerator exists
    │   ├── PicklingError                   ... because a part of the call cannot be pickled
    │   └── SourceChanged                   ... because declared data has changed
    ├── PreflightError                      the backend cannot take the job now; nothing was created
    │   └── InsufficientMemory              ... this machine cannot hold the simulated slice
    ├── BackendUnavailable                  the backend does not answer at present, or closed the
    │                                       connection; the job is not affected, and trying again
    │                                       may help
    ├── SubmitError                         creating the job failed;
    │                                       what was created is removed or findable
    ├── StoreError                          the store could not be read or written
    │   ├── StoreFull                       ... no space is left
    │   ├── UnsupportedVersion              ... another version of kinetic wrote the job's records
    │   └── CorruptRecord                   ... a stored file is not what was written
    ├── CheckpointError                     a checkpoint could not be written or read
    │   ├── CheckpointMismatch              ... the state or iterator does not match what was saved
    │   └── CheckpointInUse                 ... another job writes this folder of checkpoints
    ├── NotFound (LookupError)              no such job or object
    ├── WaitTimeout (TimeoutError)          the caller's timeout passed; the job keeps running
    ├── BatchError                          some inputs of a batch have no result;
    │                                       the results of the others are in it
    ├── CoordinatorLost                     an agent could not reach its coordinator in time
    │                                       (host side)
    └── JobFailed (RuntimeError)            the job ran, or tried to, and did not succeed
        ├── UserCodeFailed                  the function raised something that cannot be rebuilt
        │                                   here, or exited
        ├── HostLost                        a host died: killed, out of memory, segfault, os._exit,
        │                                   agent lost
        ├── HostHung                        a host stood still longer than hang_timeout,
        │                                   or kept others waiting in JAX
        ├── GangTimeout (TimeoutError)      not every host got as far as the function within
        │                                   start_timeout
        ├── JobTimeout (TimeoutError)       the job ran longer than timeout
        ├── BudgetUsedUp                    its slices have cost its budget
        ├── JobCancelled                    someone cancelled the job
        ├── SetupFailed                     a host could not prepare: bad bundle, unpickling failed,
        │                                   version mismatch, an image that cannot be pulled
        ├── ResultUnavailable               the function returned,
        │                                   but its value cannot be loaded here
        └── SupervisorLost                  the process that watched the job was killed

A function's own exception is raised as itself, never wrapped, when its class can be rebuilt on the
caller's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class KineticError(Exception):
    """Base of all exceptions of this library."""


class UsageError(KineticError, ValueError):
    """What the caller wrote cannot work. Nothing was created."""


class UsageTypeError(UsageError, TypeError):
    """A value given by the caller has the wrong type. Nothing was created."""


class DataNotFound(UsageError, FileNotFoundError):
    """There is no file or folder of this name to declare as data. Nothing was created."""


class UnknownAccelerator(UsageError):
    """No accelerator has this name.

    Attributes:
        name: the name that was given.
        suggestions: the nearest valid names, best first.
    """

    def __init__(self, message: str, *, name: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.suggestions = tuple(suggestions)


class PicklingError(UsageError):
    """A part of the call cannot be pickled.

    Attributes:
        component: the part, for example "argument 2", "keyword 'model'" or "the function's closure
            variable 'lock'".
    """

    def __init__(self, message: str, *, component: str = "") -> None:
        super().__init__(message)
        self.component = component


class SourceChanged(UsageError):
    """Declared data has changed since it was first used, and the store does not have the original.
    Nothing was created."""


class PreflightError(KineticError):
    """The backend cannot accept the job now. Nothing was created."""


class InsufficientMemory(PreflightError):
    """This machine cannot hold the simulated slice.

    Attributes:
        hosts: hosts that were requested.
        hosts_that_fit: hosts for which there is memory now.
    """

    def __init__(self, message: str, *, hosts: int = 0, hosts_that_fit: int = 0) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.hosts_that_fit = hosts_that_fit


class BackendUnavailable(KineticError):
    """The backend does not answer at present, or closed the connection. The job is not affected;
    trying again may help."""


class SubmitError(KineticError):
    """The job could not be created."""


class StoreError(KineticError):
    """The store could not be read or written."""


class StoreFull(StoreError):
    """The store has no space left."""


class UnsupportedVersion(StoreError):
    """Another version of kinetic wrote the job's records, in a format that this one does not
    read."""


class CorruptRecord(StoreError):
    """A stored file is not what was written: truncated, tampered with, or garbage."""


class CheckpointError(KineticError):
    """A checkpoint could not be written or read.

    Attributes:
        step: of the training, if it is about one.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CheckpointMismatch(CheckpointError):
    """What was saved does not match the state, or the iterator, that restore() was given."""


class CheckpointInUse(CheckpointError):
    """Another job writes this folder of checkpoints.

    Attributes:
        job_id: that job; "" if unknown.
    """

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class NotFound(KineticError, LookupError):
    """No such job or object.

    Attributes:
        suggestions: the nearest existing names, best first.
    """

    def __init__(self, message: str, *, suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.suggestions = tuple(suggestions)


class WaitTimeout(KineticError, TimeoutError):
    """The time that the caller gave to a wait has passed. The job keeps running."""


class BatchError(KineticError):
    """Some inputs of a batch have no result.

    Attributes:
        group_id: the batch.
        failures: handles of the jobs that failed, in the order of the inputs.
        partial_results: a value for each input; None where there is none.
        submission_failures: why an input never became a job, by its index.
    """

    def __init__(
        self,
        group_id: str,
        failures: Sequence[Any],
        partial_results: Sequence[Any],
        submission_failures: Mapping[int, Exception] | None = None,
        *,
        message: str = "",
    ) -> None:
        missing = len(failures) + len(submission_failures or ())
        super().__init__(
            message
            or f"{group_id}: {missing} {'input has' if missing == 1 else 'inputs have'} no result."
        )
        self.group_id = group_id
        self.failures = list(failures)
        self.partial_results = list(partial_results)
        self.submission_failures = dict(submission_failures or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (self.group_id, self.failures, self.partial_results, self.submission_failures),
            {"args": self.args},
        )


class CoordinatorLost(KineticError):
    """An agent could not reach its coordinator for the configured time."""


class JobFailed(KineticError, RuntimeError):
    """The job did not succeed.

    Attributes:
        job_id: the job.
        hosts: indices of the hosts to blame, the first to fail first; empty if none is.
        remote_traceback: text of the remote traceback, or "".
    """

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        hosts: Sequence[int] = (),
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.hosts = tuple(hosts)
        self.remote_traceback = remote_traceback

    @property
    def host(self) -> int | None:
        """The host to blame, or None when no host is."""
        return self.hosts[0] if self.hosts else None


class UserCodeFailed(JobFailed):
    """The function failed with something that cannot be rebuilt here: the message says what."""


class HostLost(JobFailed):
    """A host died without finishing its function."""


class HostHung(JobFailed):
    """A host made no progress for longer than `hang_timeout`. The message carries the stacks."""


class GangTimeout(JobFailed, TimeoutError):
    """Not every host joined, and got as far as the function, within `start_timeout`."""


class JobTimeout(JobFailed, TimeoutError):
    """The job ran longer than `timeout` and was stopped."""


class BudgetUsedUp(JobFailed):
    """The slices of the job have cost its `budget`, and it was stopped."""


class JobCancelled(JobFailed):
    """The job was cancelled."""


class SetupFailed(JobFailed):
    """A host could not prepare the function: damaged bundle, failed unpickling, version mismatch;
    or its pod can never start, for example because its image does not exist."""


class ResultUnavailable(JobFailed):
    """The function returned, but its value could not be pickled there or rebuilt here."""


class SupervisorLost(JobFailed):
    """The process that supervised the job died before it could judge it."""


def text_of(value: object) -> str:
    """Return `str()` of an exception or of another object of the user's."""
    try:
        return str(value)
    except BaseException as problem:  # noqa: BLE001 - their own __str__ may raise anything
        return f"<its text could not be made: {type(problem).__name__}>"


_SOUNDS_LIKE_A_VOWEL = ("a", "e", "i", "o", "u", "ndarray")


def name_some(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first names, and how many there are more: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def a_type(value: object) -> str:
    """Return the name of a value's type, with its article: "an int", "a Mesh"."""
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return the word with its article."""
    return f"{'an' if noun.lower().startswith(_SOUNDS_LIKE_A_VOWEL) else 'a'} {noun}"
