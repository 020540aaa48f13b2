"""All exceptions that kinetic itself raises.

    KineticError
    ├── UsageError (ValueError)             an argument or setting is invalid; nothing was created
    │   ├── UsageTypeError (TypeError)      ... because a value has the wrong type
    │   ├── DataNotFound (FileNotFoundError)   ... because declared data does not exist
    │   ├── UnknownAccelerator              ... because no such accelerator exists
    │   ├── PicklingError                   ... because a part of the call cannot be pickled
    │   └── SourceChanged                   ... because declared data has changed
    ├── PreflightError                      the backend cannot take the job now; nothing was created
    │   └── InsufficientMemory              ... this machine cannot hold the simulated slice
    ├── BackendUnavailable                  the backend does not answer; the job is not affected,
    │                                       and a retry may help
    ├── SubmitError                         the job could not be created
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
    │                                       the error has the results of the others
    ├── CoordinatorLost                     an agent could not reach its coordinator in time
    │                                       (host side)
    └── JobFailed (RuntimeError)            the job ran, or tried to, and did not succeed
        ├── UserCodeFailed                  the function raised an exception that cannot be rebuilt
        │                                   by the caller, or exited
        ├── HostLost                        a host died: killed, out of memory, segfault, os._exit,
        │                                   agent lost
        ├── HostHung                        a host stood still longer than hang_timeout,
        │                                   or kept others waiting in JAX
        ├── GangTimeout (TimeoutError)      the function did not start on every host within
        │                                   start_timeout
        ├── JobTimeout (TimeoutError)       the job ran longer than timeout
        ├── BudgetUsedUp                    the cost of the job's slices has reached its budget
        ├── JobCancelled                    someone cancelled the job
        ├── SetupFailed                     a host could not prepare: bad bundle, unpickling failed,
        │                                   version mismatch, an image that cannot be pulled
        ├── ResultUnavailable               the function returned,
        │                                   but the caller cannot load its value
        └── SupervisorLost                  the process that supervised the job was killed

A function's own exception is raised as itself, never wrapped, if the caller can rebuild its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class KineticError(Exception):
    """Base class of all exceptions of kinetic: catch it to handle any of them."""


class UsageError(KineticError, ValueError):
    """An argument, option or setting is invalid; nothing was created. The message says what to
    fix."""


class UsageTypeError(UsageError, TypeError):
    """An argument, option or setting has the wrong type; no job was created."""


class DataNotFound(UsageError, FileNotFoundError):
    """The file or folder that was declared as data does not exist. Relative paths start at the
    working directory; a host has only the data that its call passes to the function."""


class UnknownAccelerator(UsageError):
    """No accelerator has this name. `kinetic accelerators` lists all names.

    Attributes:
        name: the unknown name.
        suggestions: the nearest valid names, best first.
    """

    def __init__(self, message: str, *, name: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.suggestions = tuple(suggestions)


class PicklingError(UsageError):
    """A part of the call cannot be pickled; nothing was created. Create locks, open files,
    generators and threads inside the function.

    Attributes:
        component: the part, for example "argument 2", "keyword 'model'" or "the function's closure
            variable 'lock'".
    """

    def __init__(self, message: str, *, component: str = "") -> None:
        super().__init__(message)
        self.component = component


class SourceChanged(UsageError):
    """Declared data has changed since it was first used, and the store does not have the original;
    nothing was created. Create a new `Data` to send the current content."""


class PreflightError(KineticError):
    """The backend cannot accept the job at present; nothing was created. The message says which
    part of the cluster or machine to fix."""


class InsufficientMemory(PreflightError):
    """This machine cannot hold the simulated slice. Choose a smaller slice.

    Attributes:
        hosts: number of hosts that were requested.
        hosts_that_fit: number of hosts for which the machine has memory now.
    """

    def __init__(self, message: str, *, hosts: int = 0, hosts_that_fit: int = 0) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.hosts_that_fit = hosts_that_fit


class BackendUnavailable(KineticError):
    """The backend does not answer at present, or closed the connection. The job is not affected;
    try again."""


class SubmitError(KineticError):
    """The job could not be created. Its records were removed, or the message says which remain."""


class StoreError(KineticError):
    """The store could not be read or written. The message names the file or object."""


class StoreFull(StoreError):
    """The store has no space left. `kinetic jobs prune` removes old jobs."""


class UnsupportedVersion(StoreError):
    """Another version of kinetic wrote the job's records, in a format that this version does not
    read. Use the version that submitted the job."""


class CorruptRecord(StoreError):
    """A stored file was truncated or changed after it was written, or is not kinetic's."""


class CheckpointError(KineticError):
    """A checkpoint could not be written or read.

    Attributes:
        step: step of the training run; None if the error is not about a single step.
    """

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not match the state, or the iterator, that was passed to `restore`."""


class CheckpointInUse(CheckpointError):
    """Another job writes to this folder of checkpoints. Cancel that job, or use another folder.

    Attributes:
        job_id: the job that writes; "" if unknown.
    """

    def __init__(self, message: str, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class NotFound(KineticError, LookupError):
    """The job or object does not exist.

    Attributes:
        suggestions: the nearest existing names, best first.
    """

    def __init__(self, message: str, *, suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.suggestions = tuple(suggestions)


class WaitTimeout(KineticError, TimeoutError):
    """The caller's `timeout` for a wait has passed. The job keeps running; wait again."""


class BatchError(KineticError):
    """Some inputs of a batch have no result.

    Attributes:
        group_id: id of the batch.
        failures: handles of the jobs that failed, in the order of the inputs.
        partial_results: a value for each input; None for inputs without a result.
        submission_failures: errors of inputs that never became a job, by index.

    Example:
        ```python
        try:
            losses = batch.results()
        except kinetic.BatchError as error:
            print(error.partial_results, error.failures)
        ```
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
    """A host could not reach the job's coordinator for the configured time. Raised on hosts."""


class JobFailed(KineticError, RuntimeError):
    """The job did not succeed.

    Attributes:
        job_id: id of the job.
        hosts: indices of the hosts that failed, the first one first; () if no host is to blame.
        remote_traceback: text of the remote traceback, or "".

    Example:
        ```python
        try:
            loss = job.result()
        except kinetic.errors.JobFailed as error:
            print(error.host, error.remote_traceback)
        ```
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
        """The first host to blame, or None if no host is to blame."""
        return self.hosts[0] if self.hosts else None


class UserCodeFailed(JobFailed):
    """The function exited, or raised an exception that the caller cannot rebuild. The message has
    the exception's text and the remote traceback."""


class HostLost(JobFailed):
    """A host died without finishing its function: killed, out of memory, crashed or unreachable.
    The message has its last lines of output."""


class HostHung(JobFailed):
    """A host made no progress for longer than `hang_timeout`, or kept others waiting in JAX. The
    message has the stacks of the hosts."""


class GangTimeout(JobFailed, TimeoutError):
    """The function did not start on every host within `start_timeout`. The message names the
    missing hosts."""


class JobTimeout(JobFailed, TimeoutError):
    """The job ran longer than `timeout` and was stopped."""


class BudgetUsedUp(JobFailed):
    """The cost of the job's slices has reached `budget`, and the job was stopped."""


class JobCancelled(JobFailed):
    """The job was cancelled."""


class SetupFailed(JobFailed):
    """A host could not prepare the function: damaged bundle, failed unpickling, version mismatch;
    or its pod can never start, for example because its image does not exist."""


class ResultUnavailable(JobFailed):
    """The function returned, but the host could not pickle its value, or the caller cannot rebuild
    it. Return plain data, or write files to `KINETIC_OUTPUT_DIR`."""


class SupervisorLost(JobFailed):
    """The process that supervised the job was killed before it judged the job. Run it again."""


def text_of(value: object) -> str:
    """Return `str(value)`, or a placeholder if the user's `__str__` raises."""
    try:
        return str(value)
    except BaseException as problem:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<str() failed: {type(problem).__name__}>"


_VOWEL_SOUNDS = ("a", "e", "i", "o", "u", "ndarray")


def name_some(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` names, and the number of the others: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def a_type(value: object) -> str:
    """Return the name of a value's type with its article: "an int", "a Mesh"."""
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if noun.lower().startswith(_VOWEL_SOUNDS) else 'a'} {noun}"
