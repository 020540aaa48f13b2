"""Exit codes of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinetic.errors import (
    BackendUnavailable,
    JobFailed,
    NotFound,
    PreflightError,
    StoreError,
    SubmitError,
    UsageError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
REFUSED = 4
STORE = 5
UNAVAILABLE = 6
TIMED_OUT = 124
INTERRUPTED = 130

TABLE: tuple[tuple[int, str], ...] = (
    (OK, "Success."),
    (
        FAILED,
        "The job failed or was cancelled; `doctor` or `compile` found a problem.",
    ),
    (USAGE, "The command line is wrong. Nothing was created."),
    (NOT_FOUND, "The job or batch does not exist, or its result or logs were removed."),
    (REFUSED, "A job was refused or not submitted; a session with calls stays."),
    (STORE, "The store could not be read or written."),
    (UNAVAILABLE, "The backend does not answer. Try again later."),
    (TIMED_OUT, "`jobs wait` or `jobs result` timed out; the job keeps running."),
    (INTERRUPTED, "Interrupted by Ctrl-C; a running job keeps running."),
)

# JobFailed comes first: GangTimeout and JobTimeout are TimeoutErrors too, but failures of the job.
_BY_TYPE: tuple[tuple[type[BaseException], int], ...] = (
    (JobFailed, FAILED),
    (WaitTimeout, TIMED_OUT),
    (UsageError, USAGE),
    (NotFound, NOT_FOUND),
    (PreflightError, REFUSED),
    (BackendUnavailable, UNAVAILABLE),
    (SubmitError, REFUSED),
    (StoreError, STORE),
    (KeyboardInterrupt, INTERRUPTED),
)


def of_error(error: BaseException) -> int:
    """Return the exit code for an exception that ends the command."""
    return next((code for kind, code in _BY_TYPE if isinstance(error, kind)), FAILED)


def of_outcome(outcome: Outcome) -> int:
    """Return 0 if the job succeeded, else 1."""
    return OK if outcome.ok else FAILED


def of_program(outcome: Outcome) -> int:
    """Return the exit code of `kinetic run`: that of the program on the host that failed first."""
    from kinetic._core.exits import ExitCode

    first = outcome.first
    if first is None:
        return FAILED
    code = first.exit.kind.code
    if code is ExitCode.OWN and first.exit_code:
        return first.exit_code & 0xFF or FAILED
    if code is ExitCode.SIGNAL and first.signal:
        return 128 + first.signal
    return FAILED
