"""The inputs of a batch: the arguments of each call, and where each input stands.

In: what users pass, an input mode; what the records of a batch say. Out: `CallArguments`s,
`InputState`s. Pure.
"""

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
    """Arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def list_calls(inputs: Iterable[Any], mode: str = "auto") -> list[CallArguments]:
    """Return the arguments for each input.

    "single" passes an input as the only argument, "args" a list or tuple as positional arguments,
    "kwargs" a dict as keyword arguments. "auto" passes dicts whose keys can be names as keyword
    arguments, lists and tuples as positional arguments, and anything else as the only argument.

    Raises:
        UsageError: there is no such mode, or an input does not fit it.
    """
    if mode not in MODES:
        raise UsageError(f"There is no input_mode {mode!r}. Modes are: {', '.join(MODES)}.")
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        raise UsageTypeError(
            f"inputs must be a list with one entry for each call; it is {a_type(inputs)}."
        )
    return [_call(index, item, mode) for index, item in enumerate(inputs)]


def _call(index: int, item: Any, mode: str) -> CallArguments:
    if mode == "single":
        return CallArguments((item,))
    if mode == "args":
        return CallArguments(
            tuple(
                _check_kind(
                    index, item, list | tuple, 'a list or tuple, as input_mode="args" unpacks'
                )
            )
        )
    if mode == "kwargs":
        return CallArguments(
            kwargs=_names(
                index, _check_kind(index, item, Mapping, 'a dict, as input_mode="kwargs" unpacks')
            )
        )
    if isinstance(item, dict) and all(
        isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in item
    ):
        return CallArguments(kwargs=dict(item))
    return CallArguments(tuple(item) if isinstance(item, list | tuple) else (item,))


def _check_kind(index: int, item: Any, kinds: Any, wanted: str) -> Any:
    if not isinstance(item, kinds):
        raise UsageTypeError(f"inputs[{index}] must be {wanted}; it is {a_type(item)}.")
    return item


def _names(index: int, item: Mapping[Any, Any]) -> dict[str, Any]:
    odd = [key for key in item if not isinstance(key, str)]
    if odd:
        raise UsageTypeError(
            f"inputs[{index}] has the key {odd[0]!r}, which cannot be the name of an argument."
        )
    return dict(item)


class InputState(StrEnum):
    """Where one input stands.

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
        """Whether nothing more will happen to the input."""
        return self not in (InputState.WAITING, InputState.SUBMITTING, InputState.LIVE)


def job_id_of(group_id: str, index: int) -> str:
    """Return the id of the job of an input: the digits of the batch, and the input's number."""
    return f"job-{group_id.removeprefix('grp-')}{index:04x}"


class BatchEnd(NamedTuple):
    """Nothing more will be submitted.

    Attributes:
        stopped: why the batch was stopped; "" if all inputs were submitted.
        skipped: inputs that were skipped therefore.
    """

    stopped: str = ""
    skipped: frozenset[int] = frozenset()


def inputs_of(
    total: int,
    refs: Collection[int],
    refusals: Collection[int],
    end: BatchEnd | None,
    *,
    is_left: bool = False,
) -> list[InputState]:
    """Return where each input stands, as far as the batch's own records say: LIVE means that there
    is a job, which says more. Pure.

    Args:
        total: number of inputs.
        refs: inputs that have a job.
        refusals: inputs that could not be submitted.
        end: of the submission.
        is_left: the process that submitted ended without recording the end.
    """

    def state_of(index: int) -> InputState:
        if index in refs:
            return InputState.LIVE
        if index in refusals:
            return InputState.REFUSED
        if end is None:
            return InputState.REFUSED if is_left else InputState.WAITING
        return InputState.SKIPPED if index in end.skipped else InputState.REMOVED

    return [state_of(index) for index in range(total)]
