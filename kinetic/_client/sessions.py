"""Sessions on the caller's side: start, find, list and stop them, and run calls on them."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kinetic._backends import stored
from kinetic._backends.attempt_logs import ASK_EVERY_S
from kinetic._backends.session import list_waiting_calls
from kinetic._client import planning, submission
from kinetic._client.board import console, text
from kinetic._client.handle import JobHandle
from kinetic._client.options import check_options
from kinetic._client.planning import EnteredSession, Target
from kinetic._core import checks, layout
from kinetic._core.accelerators.prices import in_usd
from kinetic._core.duration import Duration
from kinetic._core.options import Options
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.session import DEFAULT_NAME, IDLE_S, LIFETIME_S, Session
from kinetic._core.state import UNKNOWN, JobStanding, JobStatus
from kinetic._core.tracebacks import hide_frames
from kinetic._store import cancellation, sessions
from kinetic._store.base import is_near
from kinetic.errors import KineticError, NotFound, SubmitError, UsageError

if TYPE_CHECKING:
    from kinetic._store.base import Store

_MOST_LOSSES = 1000
"""A session ends after this many lost slices."""
_POLL_S = 0.2


class SessionStatus(NamedTuple):
    """The state of a session.

    Attributes:
        name: the session's name.
        job_id: the id of the session's own job, which holds the slices.
        accelerator: the type of the held slices.
        slices: the number of held slices.
        state: the state of the session's own job, or "UNKNOWN".
        reason: why the job is in this state; "" if there is no reason.
        held_s: seconds for which all hosts have been up, until now or the end of the session.
        usd_per_hour: price of the slices; None if unknown. Simulated slices cost nothing.
        cost_usd: cost so far, in US dollars; None if unknown.
        calls: ids of the running call and of the waiting calls, in order.
    """

    name: str
    job_id: str
    accelerator: str
    slices: int
    state: str
    reason: str
    held_s: float
    usd_per_hour: float | None
    cost_usd: float | None
    calls: tuple[str, ...]


class SessionHandle:
    """A session: slices that are held, on which calls run one after the other.

    In a `with` block, decorated functions with the session's accelerator run on it. The session
    outlives the block and this process: it ends after `idle_timeout` without a call, or by `stop`.

    Attributes:
        name: name of the session.
        job: handle of the session's own job.

    Example:
        ```python
        with kinetic.session("tpu-v6e-16", name="dev") as session:
            loss = train(1000)
        session.stop()
        ```
    """

    def __init__(self, ref: JobRef, plan: Plan, store: Store) -> None:
        self.job: JobHandle[Any] = JobHandle(ref, store=store)
        self.name = ref.session_name
        self._plan = plan
        self._store = store
        self._terms = plan.holds or Session(self.name)
        self._entry = EnteredSession(ref, plan.topology, plan.options.most_slices)

    def __repr__(self) -> str:
        return f"<SessionHandle {self.name}: {self.job.job_id} on {self._plan.topology.name}>"

    def __enter__(self) -> Self:
        planning.enter_session(self._entry)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        planning.leave_session(self._entry)

    def _read_standing(self) -> JobStanding:
        return self.job.read_standings([self.job.ref])[self.job.job_id]

    def status(self) -> SessionStatus:
        """Return the state of the session, its cost and its calls."""
        return self.describe(self._read_standing())

    def describe(self, standing: JobStanding) -> SessionStatus:
        """Return the state of the session, given the standing of its own job."""
        cost = self._plan.cost
        gang, until = self.job._board.gang(self.job.ref), standing.ended_at or time.time()
        paid_s = gang.paid_s(self._plan.options.most_slices, until)
        has_ended = standing.state not in (JobStatus.PENDING, JobStatus.RUNNING, UNKNOWN)
        calls = [] if has_ended else list_waiting_calls(self._store, self.job.job_id)
        return SessionStatus(
            self.name,
            self.job.job_id,
            self._plan.topology.name,
            self._plan.options.most_slices,
            str(standing.state),
            standing.reason,
            gang.ran_s(until),
            None if cost is None else 0.0 if cost.is_simulated else cost.usd_per_hour,
            None if cost is None else cost.for_seconds(paid_s),
            tuple(calls),
        )

    @hide_frames
    def wait_until_ready(self, on_reason: Callable[[str], object] = lambda reason: None) -> None:
        """Wait until all hosts of the session are up.

        Args:
            on_reason: Called with the reason why the session still waits, whenever it changes.

        Raises:
            SubmitError: The session ended before its hosts were up.
        """
        reason = ""
        while (standing := self._read_standing()).state == JobStatus.PENDING:
            if standing.reason not in ("", reason):
                on_reason(reason := standing.reason)
            time.sleep(_POLL_S if is_near(self._store) else ASK_EVERY_S)
        if standing.state != JobStatus.RUNNING:
            why = standing.reason or f"it is {standing.state}"
            raise SubmitError(f"The session {self.name} has not started: {why}")

    @hide_frames
    def stop(self, *, force: bool = False) -> None:
        """End the session and free its slices; return at once.

        Args:
            force: End it even while a call runs, or calls wait.

        Raises:
            UsageError: The session has calls, and `force` is false.
        """
        calls = list_waiting_calls(self._store, self.job.job_id)
        if calls and not force and not self._read_standing().status.ended:
            more = len(calls) - 1
            waiting = f", and {text.count(more, 'call')} wait{'s' * (more == 1)}" if more else ""
            raise UsageError(
                f"The session {self.name} runs {calls[0]}{waiting}. Wait for it, cancel it with "
                f"`kinetic jobs cancel {calls[0]}`, or end it with the session: "
                f"stop(force=True), `kinetic session stop --force {self.name}`."
            )
        _started.pop(self.job.job_id, None)
        stop = partial(self.job.cancel, cleanup_timeout=0)
        cancellation.request(self._store, self.job.job_id, stop)

    def describe_slices(self) -> str:
        """Return what the session holds, with its price: "tpu-v6e-16 ($43.20 an hour)"."""
        cost = self._plan.cost
        price = ""
        if cost is not None and not cost.is_simulated:
            price = f" ({in_usd(cost.usd_per_hour)} an hour)"
        return f"{_name_slices(self._plan.options)}{price}"

    def describe_existence(self, ignored: Sequence[str] = ()) -> str:
        """Return a sentence for a caller who asked to start a session that already exists.

        Args:
            ignored: The caller's options that the session does not have, such as `keep=True`.
        """
        words = (
            f"The session {self.name} exists already ({self.job.job_id}), and keeps the options "
            "with which it was started"
        )
        if not ignored:
            return f"{words}."
        keep = next((f", or set {o} on the function" for o in ignored if o.startswith("keep=")), "")
        return (
            f"{words}: {', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect. "
            f"Stop the session and start it again{keep}."
        )

    def describe_end(self) -> str:
        """Return when the session ends by itself, as the end of a sentence."""
        terms, budget_s = self._terms, self._plan.limits.budget_s
        latest, budget = f"at the latest {text.limit(terms.max_lifetime_s)} after its start", ""
        if budget_s and self._plan.cost is not None:
            usd = in_usd(self._plan.cost.usd_per_hour / 3600 * budget_s)
            budget = f" or when its budget of {usd} is spent"
        return f"after {text.limit(terms.idle_timeout_s)} without a call, and {latest}{budget}"


def list_ignored(
    session: SessionHandle,
    *,
    idle_timeout: Duration,
    max_lifetime: Duration,
    keep: object,
    budget: object,
) -> list[str]:
    """Return those of a caller's options that differ from those with which the session was started.
    Default values fit any session."""
    terms, plan = session._terms, session._plan
    wanted = _make_terms(session.name, idle_timeout, max_lifetime)
    usd = checks.budget("budget", budget)
    fits = {
        "idle_timeout=": wanted.idle_timeout_s in (IDLE_S, terms.idle_timeout_s),
        "max_lifetime=": wanted.max_lifetime_s in (LIFETIME_S, terms.max_lifetime_s),
        "budget=": usd is None or f"of {in_usd(usd)} (" in plan.limits.budget,
        f"keep={keep}": keep is None or keep is bool(plan.options.keep),
    }
    return [option for option, is_same in fits.items() if not is_same]


@hide_frames
def session(
    accelerator: str = "tpu-v5litepod-1",
    *,
    name: str = DEFAULT_NAME,
    idle_timeout: Duration = IDLE_S,
    max_lifetime: Duration = LIFETIME_S,
    **options: Any,
) -> SessionHandle:
    """Hold slices, so that one call after the other runs on them without waiting for machines.

    If a session with this name is held already, return it. This function does not wait for the
    hosts; calls do.

    Args:
        accelerator: Slice to hold, as for `kinetic.run`.
        name: Name of the session, with which any process that reads the store finds it.
        idle_timeout: Time without a call after which the session ends.
        max_lifetime: Time after which the session ends, even while a call runs.
        options: Options of `kinetic.run` that concern machines and hosts: `slices`, `spot`,
            `budget`, `secrets`, `env`, `cluster`, `project`, `zone`, `namespace`, `queue`,
            `reservation`, `container_image`, `cpu`, `memory`, `start_timeout`, ...; with `keep`,
            the workers of all calls stay for later calls.

    Raises:
        UsageError: An option is invalid, or the session with this name holds other slices.
        PreflightError: The slices cannot be held; nothing was submitted.

    Example:
        ```python
        with kinetic.session("cpu:2", name="dev") as session:
            loss = train(1000)
        session.stop()
        ```
    """
    handle, is_new = hold(
        accelerator, name=name, idle_timeout=idle_timeout, max_lifetime=max_lifetime, **options
    )
    if is_new:
        if not _started:
            atexit.register(_name_held, os.getpid())
        _started[handle.job.job_id] = handle
    elif ignored := list_ignored(
        handle,
        idle_timeout=idle_timeout,
        max_lifetime=max_lifetime,
        keep=options.get("keep"),
        budget=options.get("budget"),
    ):
        console.notice(f"kinetic: {handle.describe_existence(ignored)}")
    return handle


_started: dict[str, SessionHandle] = {}
"""The sessions that `session` has started in this process and `stop` has not stopped, by job id."""


def _name_held(pid: int) -> None:
    """At exit, print which sessions of this process still hold slices."""
    if os.getpid() != pid:  # A fork of the process that started them.
        return
    for handle in _started.values():
        with contextlib.suppress(KineticError, OSError):
            if stored.read_verdict(handle._store, handle.job.ref) is not None:
                continue
            console.notice(
                f"kinetic: the session {handle.name} still holds {handle.describe_slices()}; it "
                f"ends after {text.limit(handle._terms.idle_timeout_s)} without a call. "
                f"kinetic session stop {handle.name} ends it now."
            )


def hold(
    accelerator: str,
    *,
    name: str = DEFAULT_NAME,
    idle_timeout: Duration = IDLE_S,
    max_lifetime: Duration = LIFETIME_S,
    **options: Any,
) -> tuple[SessionHandle, bool]:
    """Find or start a session, as `session` does. Return its handle, and True if this call has
    started it. Raises the errors of `session`."""
    from kinetic._config import settings

    if settings.on_host():
        raise UsageError(
            "A job cannot hold a session: nobody would end it. Start the session in the script "
            "that submits the jobs."
        )
    if options.get("session") is not None:
        raise UsageError("kinetic.session has no option session=. Pass the name as name=.")
    checked = check_options(None, {"accelerator": accelerator, **options})
    if checked.elastic is not None or checked.controller == "single":
        raise UsageError(
            "A session holds a fixed number of slices, with a process on each host. Give slices= "
            "as one number, and no controller=."
        )
    terms = _make_terms(name, idle_timeout, max_lifetime)
    number = checked.most_slices
    held = dataclasses.replace(
        checked, slices=(number, number), max_failures=_MOST_LOSSES, name=f"session {name}"
    )
    target = planning.target_of(held, is_for_call=False)
    live = _find_live(target.store, terms.name, held)
    return (live, False) if live is not None else _start(terms, held, target)


def _make_terms(name: str, idle_timeout: Duration, max_lifetime: Duration) -> Session:
    return Session(
        checks.cluster_name("name", name) or DEFAULT_NAME,
        checks.seconds("idle_timeout", idle_timeout) or IDLE_S,
        checks.seconds("max_lifetime", max_lifetime) or LIFETIME_S,
    )


def _find_live(store: Store, name: str, wanted: Options) -> SessionHandle | None:
    """Return the session with this name; None if it has ended or somebody has stopped it."""
    if (ref := sessions.find(store, name)) is None:
        return None
    try:
        handle = open_handle(ref, store)
    except NotFound:  # Somebody has removed its records by hand.
        return None
    if sessions.is_stopped(store, ref.job_id) or handle._read_standing().status.ended:
        return None
    held = handle._plan.options
    if (held.topology, held.most_slices) != (wanted.topology, wanted.most_slices):
        raise UsageError(
            f"The session {name} holds {_name_slices(held)}, not {_name_slices(wanted)}. Stop it "
            f"with `kinetic session stop {name}`, or choose another name."
        )
    return handle


def _name_slices(options: Options) -> str:
    number = options.most_slices
    return options.topology.name if number == 1 else f"{number} slices of {options.topology.name}"


def _start(terms: Session, held: Options, target: Target) -> tuple[SessionHandle, bool]:
    planned = planning.plan_call(
        _hold_slices,
        (),
        {},
        dataclasses.replace(held, keep=False),
        settings=target.settings,
        place=target.place,
    )
    options = dataclasses.replace(planned.plan.options, keep=held.keep)
    plan = dataclasses.replace(
        planned.plan, options=options, holds=terms, tree=None, client_root=""
    )
    planned = dataclasses.replace(planned, plan=plan, bundle=None)
    store = target.store
    while True:
        claim = sessions.read_claim(store, terms.name)
        if sessions.is_starting(store, claim):
            time.sleep(_POLL_S)
        elif (other := _find_live(store, terms.name, held)) is not None:
            return other, False
        elif sessions.claim(store, terms.name, plan.job_id, claim):
            break
    submission.warn(target, planned.warnings, None)
    try:
        ref = submission.submit(planned, target.backend, store)
    except BaseException:
        sessions.release(store, terms.name, plan.job_id)
        raise
    return SessionHandle(ref, plan, store), True


def _hold_slices() -> None:
    """Do nothing: the plan of a session's own job needs a function, but the job runs none."""


def open_handle(ref: JobRef, store: Store) -> SessionHandle:
    """Return the handle of a session.

    Raises:
        NotFound: its plan was removed.
    """
    return SessionHandle(ref, Plan.read(store.get(layout.JobKeys(ref.job_id).plan)), store)
