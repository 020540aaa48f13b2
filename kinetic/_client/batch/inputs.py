"""The arguments of each call, from the inputs that users pass.

In: inputs, an input mode. Out: `CallArguments`s. Pure.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from kinetic._core.values import dataclass
from kinetic.errors import UsageError, UsageTypeError, a_type

MODES = ("auto", "single", "args", "kwargs")


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def calls(inputs: Iterable[Any], mode: str = "auto") -> list[CallArguments]:
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
    if isinstance(item, dict) and all(map(_is_name, item)):
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


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
