"""Positions of data iterators: the result of `get_state` as JSON, and back."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from kinetic.errors import CheckpointMismatch, UsageTypeError, a_type

NOT_SHARED = (
    "the hosts' iterators are at different positions, so this checkpoint cannot be restored on "
    "fewer hosts: this elastic job would end when it loses a slice. Let all hosts read the same "
    "data, and take their part of each batch."
)
SAVED_ON_OTHER_HOSTS = (
    "The iterators' positions were saved on {} hosts, and now there are {}: some examples may be "
    "repeated and others skipped. Grain's ElasticIterator is exact on any number of hosts."
)
_BYTES, _TUPLE, _ARRAY = "__bytes__", "__tuple__", "__array__"


def check(data: Any) -> None:
    """Check that an iterator has `get_state` and `set_state`.

    Raises:
        UsageTypeError: A method is missing.
    """
    if not callable(getattr(data, "get_state", None)) or not callable(
        getattr(data, "set_state", None)
    ):
        raise UsageTypeError(
            "data= must be an iterator with get_state() and set_state(), like Grain's; got "
            f"{a_type(data)}."
        )


def is_elastic(data: Any) -> bool:
    """True for Grain's `ElasticIterator`, whose position is valid on any number of hosts."""
    return any(kind.__name__ == "ElasticIterator" for kind in type(data).__mro__)


def take_position(data: Any) -> Any:
    """Return the position of an iterator as a JSON value.

    Raises:
        UsageTypeError: The iterator has no position, or one that JSON cannot hold.
    """
    check(data)
    return _encode_value(data.get_state())


def put_back(data: Any, saved: Sequence[Any], host: int, hosts: int) -> None:
    """Set an iterator to its saved position on this host.

    Args:
        data: The iterator.
        saved: Positions by host.
        host: Index of this host.
        hosts: Number of hosts now.

    Raises:
        CheckpointMismatch: No position was saved, or the positions differ and the number of hosts
            has changed.
    """
    if not saved:
        raise CheckpointMismatch(
            "The checkpoint has no position of an iterator: save() was called without data=. Leave "
            "data= out of restore(), too."
        )
    if len(saved) != hosts and any(position != saved[0] for position in saved):
        raise CheckpointMismatch(
            f"The checkpoint has the positions of {len(saved)} hosts' iterators, which differ, and "
            f"now there are {hosts} hosts. Leave data= out of restore() and set the iterator "
            f"yourself, or use {len(saved)} hosts again."
        )
    data.set_state(_decode_value(saved[host] if len(saved) == hosts else saved[0]))


def _encode_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: base64.b64encode(bytes(value)).decode()}
    if isinstance(value, tuple):
        return {_TUPLE: [_encode_value(each) for each in value]}
    if isinstance(value, list):
        return [_encode_value(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode_value(each) for key, each in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tobytes") and value.dtype != object:
        raw = base64.b64encode(value.tobytes()).decode()
        return {_ARRAY: [value.dtype.name, list(value.shape), raw]}
    keys = " with keys that are not text" if isinstance(value, dict) else ""
    raise UsageTypeError(
        f"The iterator's get_state() contains {a_type(value)}{keys}. A checkpoint can hold "
        "numbers, text, bytes, arrays, and lists, tuples and dicts (with text as keys) of them."
    )


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if value.keys() == {_TUPLE}:
        return tuple(_decode_value(each) for each in value[_TUPLE])
    if value.keys() == {_ARRAY}:
        import numpy as np

        name, shape, raw = value[_ARRAY]
        array = np.frombuffer(base64.b64decode(raw), np.dtype(name)).reshape(shape).copy()
        return array if shape else array[()]
    return {key: _decode_value(each) for key, each in value.items()}
