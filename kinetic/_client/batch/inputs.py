"""The inputs of a batch: the arguments of each call, and the state of each input. Pure."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import UsageError, UsageTypeError, a_type

MODES = ("auto", "single", "args", "kwargs")


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def list_calls(inputs: Iterable[Any], mode: str = "auto") -> list[CallArguments]:
    """Return the call arguments of each input.

    Mode "single" passes an input as the only argument, "args" a list or tuple as positional
    arguments, "kwargs" a dict as keyword arguments. "auto" chooses by the input's type: a dict
    whose keys are identifiers becomes keyword arguments, a list or tuple positional arguments,
    anything else the only argument.

    Raises:
        UsageError: the mode does not exist, or an input does not fit it.
    """
    if mode not in MODES:
        raise UsageError(f"There is no input_mode {mode!r}. Modes are: {', '.join(MODES)}.")
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        raise UsageTypeError(
            f"inputs must be a list with one entry for each call; got {a_type(inputs)}."
        )
    return [_make_call(index, item, mode) for index, item in enumerate(inputs)]


def _make_call(index: int, item: Any, mode: str) -> CallArguments:
    if mode == "single":
        return CallArguments((item,))
    if mode == "args":
        return CallArguments(
            tuple(_check_kind(index, item, list | tuple, 'a list or tuple for input_mode="args"'))
        )
    if mode == "kwargs":
        return CallArguments(
            kwargs=_check_names(
                index, _check_kind(index, item, Mapping, 'a dict for input_mode="kwargs"')
            )
        )
    if isinstance(item, dict) and all(
        isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in item
    ):
        return CallArguments(kwargs=dict(item))
    return CallArguments(tuple(item) if isinstance(item, list | tuple) else (item,))


def _check_kind(index: int, item: Any, kinds: Any, wanted: str) -> Any:
    if not isinstance(item, kinds):
        raise UsageTypeError(f"inputs[{index}] must be {wanted}; got {a_type(item)}.")
    return item


def _check_names(index: int, item: Mapping[Any, Any]) -> dict[str, Any]:
    invalid = [key for key in item if not isinstance(key, str)]
    if invalid:
        raise UsageTypeError(
            f"inputs[{index}] has the key {invalid[0]!r}, which cannot be the name of an argument."
        )
    return dict(item)


class InputState(StrEnum):
    """The state of an input.

    WAITING -> SUBMITTING -> LIVE -> SUCCEEDED | FAILED | REMOVED
       |           +-> REFUSED
       +-> SKIPPED, when the batch is stopped
    """

    WAITING = "waiting"
    SUBMITTING = "submitting"
    LIVE = "live"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REMOVED = "gone"
    REFUSED = "refused"
    SKIPPED = "skipped"

    @property
    def final(self) -> bool:
        """True if the state cannot change any more."""
        return self not in (InputState.WAITING, InputState.SUBMITTING, InputState.LIVE)


def job_id_of(group_id: str, index: int) -> str:
    """Return the id of an input's job: the digits of the batch's id, then the input's index."""
    return f"job-{group_id.removeprefix('grp-')}{index:04x}"


class BatchEnd(NamedTuple):
    """The end of a batch's submission.

    Attributes:
        stopped: why the batch was stopped; "" if all inputs were submitted.
        skipped: the inputs that were not submitted for this reason.
    """

    stopped: str = ""
    skipped: frozenset[int] = frozenset()


def inputs_of(
    total: int,
    refs: Collection[int],
    refusals: Collection[int],
    end: BatchEnd | None,
    *,
    is_abandoned: bool = False,
) -> list[InputState]:
    """Return the state of each input according to the batch's own records. LIVE means that the
    input has a job, whose own records tell whether it has ended.

    Args:
        total: the number of inputs.
        refs: the inputs that have a job.
        refusals: the inputs that could not be submitted.
        end: the end of the submission; None while inputs may still be submitted.
        is_abandoned: True if the submitting process died without recording the end.
    """

    def state_of(index: int) -> InputState:
        if index in refs:
            return InputState.LIVE
        if index in refusals:
            return InputState.REFUSED
        if end is None:
            return InputState.REFUSED if is_abandoned else InputState.WAITING
        return InputState.SKIPPED if index in end.skipped else InputState.REMOVED

    return [state_of(index) for index in range(total)]
