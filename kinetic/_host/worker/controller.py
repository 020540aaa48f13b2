"""The worker of an elastic job with a single controller: it calls the function again in the same
process after a slice was lost or is back.

`Calls` decides if the function is called again; pathwaysutils knows which slices respond. The
host's output names each loss.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

from kinetic._core.exits import Leaving
from kinetic._core.gang.controller import Calls, Cause, NextCall, cause_of
from kinetic._core.gang.policy import (
    GiveUp,
    count_slices,
    describe_returned,
    name_attempt,
    name_slices,
)
from kinetic._core.options import Elastic
from kinetic._host.worker import proxy, streams
from kinetic._host.worker.joining import World
from kinetic.errors import HostLost


class _Own(BaseException):
    """Carries an exception that the function itself has raised. Not an `Exception`: pathwaysutils
    would catch that."""


class Controller:
    """Calls a function on the Pathways slices that respond, again and again if slices are lost.

    Promises:
        1. An exception that the function itself raises ends the calls, unchanged.
        2. The arrays of a failed call are freed before the next one.
        3. The function reads its attempt and its slices in the environment, as in any other job.
    """

    def __init__(
        self, rules: Elastic, world: World, reform_file: str, tell: Callable[[dict[str, str]], None]
    ) -> None:
        """Make a controller. `reform_file` exists while a slice is back; `tell` updates the
        function's environment."""
        self._rules = rules
        self._slices = proxy.PathwaysSlices(world, reform_file)
        self._tell = tell
        self._calls = Calls(rules)
        self._raised: BaseException | None = None
        self._given_up = ""
        self._lost_at = 0.0

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function until it returns, or raises an exception of its own.

        Raises:
            HostLost: slices were lost too often, or for too long; names every failure.
        """
        try:
            return self._slices.call(
                lambda: self._attempt(func, args, kwargs),
                least=self._rules.least,
                limit_s=self._rules.slice_timeout_s,
                begins=self._begin,
                goes_on=self._goes_on,
            )
        except _Own:
            pass
        except TimeoutError:
            self._given_up = self._calls.too_few(self._slices.find_answering()).reason
        except RuntimeError:
            if not (self._given_up or self._raised):
                raise
        if self._raised is not None:
            raise self._raised
        raise HostLost(self._given_up, hosts=(0,))

    def _attempt(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lost: Exception
        try:
            return func(*args, **kwargs)
        except Leaving:
            lost = proxy.scale_up()
        except Exception as error:  # noqa: BLE001 - any exception is the function's
            self._raised = error
            loss = _loss_in(error)
            if loss is None:
                raise _Own from None
            lost = loss
        raise lost  # Without the function's frames, which hold its arrays.

    def _begin(self) -> None:
        """Tell the function its slices and its attempt."""
        slices, most = self._slices.taking_part, self._rules.most
        variables = {"NUM_SLICES": str(len(slices)), "SLICES": ",".join(map(str, slices))}
        self._tell({f"KINETIC_{name}": value for name, value in variables.items()})
        self._raised = None
        if not self._lost_at:
            return
        self._calls.begin_attempt()
        self._tell({"KINETIC_ATTEMPT": str(self._calls.attempt)})
        on = f"{name_slices(slices)} of {most}" if len(slices) < most else f"all {most} slices"
        number = name_attempt(self._calls.attempt, self._rules.max_failures)
        _say(f"attempt {number} begins on {on}.")
        took_s = time.monotonic() - self._lost_at
        self._tell({"KINETIC_LOST_AT": str(self._lost_at)})
        _say(f"the function runs again, {took_s:.1f} s after the interruption.")
        self._lost_at = 0.0

    def _goes_on(self, error: Exception) -> bool:
        self._lost_at = time.monotonic()
        before = self._slices.taking_part
        answering = self._slices.find_answering()
        if isinstance(error, type(proxy.scale_up())):
            if back := [each for each in answering if each not in before]:
                _say(describe_returned(back))
            self._calls.handle_departure()
            return True
        lost = [each for each in before if each not in answering]
        decision = self._calls.handle_failure(cause_of(str(error)), lost, str(error))
        if decision is None:
            return False
        self._raised = None
        _say(self._calls.describe_failure())
        gc.collect()
        if isinstance(decision, NextCall):
            decision = self._wait(decision, answering)
        if isinstance(decision, GiveUp):
            self._given_up = decision.reason
        return not self._given_up

    def _wait(self, decision: NextCall, answering: tuple[int, ...]) -> NextCall | GiveUp:
        """Wait for the slices that the next call needs; give up if too few return."""
        if len(answering) >= decision.wanted:
            if len(answering) < self._rules.most:
                _say(f"continuing on {count_slices(len(answering))} until lost slices return.")
            return decision
        away = [each for each in range(self._rules.most) if each not in answering]
        limit_s = self._rules.slice_timeout_s
        limit = f"for at most {limit_s:g} s (slice_timeout)"
        _say(f"waiting for {name_slices(away)} to return, {limit}.")
        answering_now = self._slices.wait(decision.wanted, limit_s)
        return (
            decision
            if len(answering_now) >= decision.enough
            else self._calls.too_few(answering_now)
        )


def _loss_in(error: BaseException) -> Exception | None:
    """Return JAX's error about a lost slice if this exception or one of its causes is such an
    error, else None. An ambiguous error of JAX counts only if it is the exception itself."""
    from jax.errors import JaxRuntimeError

    at: BaseException | None = error
    visited: set[int] = set()
    while at is not None and id(at) not in visited:
        visited.add(id(at))
        cause = cause_of(str(at)) if isinstance(at, JaxRuntimeError) else Cause.OTHER
        if cause is Cause.LOSS or (cause is Cause.PERHAPS_LOSS and at is error):
            lost: Exception = JaxRuntimeError(str(at))
            return lost
        at = at.__cause__ or at.__context__
    return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        streams.say(f"kinetic: {text}")
