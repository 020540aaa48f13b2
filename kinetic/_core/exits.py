"""The ways in which a function can end on a host: one table, one row for each `Exit`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from kinetic import errors
from kinetic.errors import JobFailed


class Exit(StrEnum):
    """The way in which the function ended on one host."""

    RETURNED = "returned"
    RAISED = "raised"
    SYS_EXIT = "sys_exit"
    """The function called sys.exit with a code other than 0 (0 and None are RETURNED)."""
    OS_EXIT = "os_exit"
    """The process ended by itself without a report: os._exit, or an exit in native code."""
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    OVER_BUDGET = "over_budget"
    HANG = "hang"
    DIFFERED = "differed"
    """The host ran another program than others, or gave it other inputs, with
    `compare_programs="strict"`."""
    CANCELLED = "cancelled"
    UNPICKLE_FAILED = "unpickle_failed"
    RESULT_UNPICKLABLE = "result_unpicklable"
    SETUP_FAILED = "setup_failed"
    """Fetching, verifying or preparing failed before the function was called."""
    STOPPED = "stopped"
    """The agent ended the function because another host had failed."""
    REFORMED = "left"
    """The function ended early, so that an elastic job's next attempt can use a returned slice."""
    NEVER_JOINED = "never_joined"
    AGENT_LOST = "agent_lost"
    """The agent died, or its heartbeats stopped."""
    EVICTED = "evicted"
    """The cluster asked the host to end, and the job had not been cancelled."""

    @property
    def kind(self) -> ExitKind:
        """The exit's row of the table."""
        return KINDS[self]


class Leaving(BaseException):
    """Raised in a function to end it, so that its job can continue with another number of slices.
    This is not an `Exception`, so that the function does not catch it by mistake."""


class HostState(StrEnum):
    """The state of a host, for users."""

    PLANNED = "planned"
    PENDING = "pending"
    JOINED = "joined"
    RUNNING = "running"
    STALLED = "stalled"
    """The function runs, but neither computes nor prints."""
    RETURNED = "returned"
    FAILED = "failed"
    STOPPED = "stopped"
    """The host ended without a failure of its own: cancelled, timed out, or another host failed."""


class ExitCode(Enum):
    """The exit code of `kinetic run`."""

    OK = "0"
    FAILED = "1"
    OWN = "the code of the process"
    SIGNAL = "128 + the signal"


class ProgramCode(IntEnum):
    """The exit code of `python -m kinetic.runner`, by which a cluster decides whether to restart
    the hosts."""

    DELIVERED = 0
    """The report was delivered; on host 0: the outcome was written."""
    UNDELIVERED = 1
    UNUSABLE = 2
    """This host could not start."""
    START_AGAIN = 3
    """On host 0: a host is missing for the next attempt, so the cluster must restart all hosts."""
    WORKER_LOST = 4
    """On a host of an elastic job: its worker was killed between two attempts."""
    TAKEN_AWAY = 43
    """On host 0: like START_AGAIN, but the cluster took a host away; the attempt does not count."""
    CODE_FAILED = 42
    """The report was delivered: the function itself failed here, so a restart would not help."""


CAUSE_RANK = 1
SILENT_RANK = 3
EVICTED_RANK = 4
"""Rank of a host that its cluster asked to end, perhaps because another host fell silent."""
ABORTED_RANK = 5
"""Rank of a host that died of SIGABRT: JAX aborts processes that have lost a peer of their gang."""
PEER_ABORTED_RANK = 6
"""Rank of an aborted host, other than host 0, that was part of JAX's world: JAX aborts it if host
0, which has JAX's coordination service, aborts."""
CONSEQUENCE_RANK = 7
"""Rank of a host whose error follows from another host's death, whatever the host's exit."""


class ExitKind(NamedTuple):
    """One row of the table.

    Attributes:
        rank: order of blame; the host with the lowest rank is blamed. 0: the whole job was stopped;
            `CAUSE_RANK`: the host failed by itself; 2: its value cannot be stored; `SILENT_RANK`:
            it fell silent; `EVICTED_RANK`: it was taken away; `ABORTED_RANK` and
            `PEER_ABORTED_RANK`: it aborted; `CONSEQUENCE_RANK`: another host's death made it fail;
            9 and 10: it did not fail.
        state: the state of the host in tables and drawings.
        error: exception that the caller gets if the function's own exception is not raised.
        code: exit code of `kinetic run`.
        fatal: True if the host died, as opposed to code that failed.
        retryable: True if another attempt could succeed.
        of_the_job: True if no host caused the exit, so that no host's output explains it.
        has_traceback: True if the error's traceback points into the user's code.
        hearsay: True if another process inferred the exit; a report by the host itself replaces it.
    """

    rank: int
    state: HostState = HostState.FAILED
    error: type[JobFailed] = JobFailed
    code: ExitCode = ExitCode.FAILED
    fatal: bool = False
    retryable: bool = True
    of_the_job: bool = False
    has_traceback: bool = False
    hearsay: bool = False

    @property
    def code_failed(self) -> bool:
        """True if the user's code failed: other hosts run the same code and may fail alike."""
        return self.rank == CAUSE_RANK and not self.fatal

    @property
    def is_final(self) -> bool:
        """True if the failure does not depend on the machine and would happen again."""
        return self.code_failed or not (self.retryable or self.of_the_job)


_STOPPED = HostState.STOPPED

KINDS: Mapping[Exit, ExitKind] = MappingProxyType(
    {
        Exit.CANCELLED: ExitKind(
            0, _STOPPED, errors.JobCancelled, retryable=False, of_the_job=True
        ),
        Exit.TIMEOUT: ExitKind(0, _STOPPED, errors.JobTimeout, of_the_job=True),
        Exit.OVER_BUDGET: ExitKind(
            0, _STOPPED, errors.BudgetUsedUp, retryable=False, of_the_job=True
        ),
        Exit.HANG: ExitKind(0, error=errors.HostHung),
        Exit.DIFFERED: ExitKind(0, retryable=False, hearsay=True),
        Exit.NEVER_JOINED: ExitKind(0, error=errors.GangTimeout, of_the_job=True),
        Exit.SETUP_FAILED: ExitKind(CAUSE_RANK, error=errors.SetupFailed, retryable=False),
        Exit.UNPICKLE_FAILED: ExitKind(
            CAUSE_RANK, error=errors.SetupFailed, retryable=False, has_traceback=True
        ),
        Exit.RAISED: ExitKind(CAUSE_RANK, error=errors.UserCodeFailed, has_traceback=True),
        Exit.SYS_EXIT: ExitKind(CAUSE_RANK, error=errors.UserCodeFailed, code=ExitCode.OWN),
        Exit.OUT_OF_MEMORY: ExitKind(
            CAUSE_RANK, error=errors.HostLost, code=ExitCode.SIGNAL, fatal=True
        ),
        Exit.SIGNAL: ExitKind(CAUSE_RANK, error=errors.HostLost, code=ExitCode.SIGNAL, fatal=True),
        Exit.OS_EXIT: ExitKind(CAUSE_RANK, error=errors.HostLost, code=ExitCode.OWN, fatal=True),
        Exit.RESULT_UNPICKLABLE: ExitKind(2, error=errors.ResultUnavailable, retryable=False),
        Exit.AGENT_LOST: ExitKind(SILENT_RANK, error=errors.HostLost, fatal=True, hearsay=True),
        Exit.EVICTED: ExitKind(EVICTED_RANK, error=errors.HostLost, fatal=True, hearsay=True),
        Exit.REFORMED: ExitKind(9, _STOPPED, hearsay=True),
        Exit.STOPPED: ExitKind(9, _STOPPED, hearsay=True),
        Exit.RETURNED: ExitKind(10, HostState.RETURNED, code=ExitCode.OK),
    }
)
