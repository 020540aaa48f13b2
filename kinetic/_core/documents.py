"""Conversion between frozen dataclasses and JSON, for records in the store and for messages.

A document may come from another version, or be damaged. Unknown keys are ignored, and absent keys
have their defaults; any other mismatch with the class raises an error that names the field.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field
from enum import Enum
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from kinetic._core import record
from kinetic.errors import CorruptRecord

T = TypeVar("T")
_Read = Callable[[Any], Any]
"""A function that converts a part of a document to a value."""
_PLAIN = (str, int, float, bool, types.NoneType)
_BY_NAME = {kind.__name__: kind for kind in _PLAIN}


class _WrongError(Exception):
    """A part of a document has the wrong type for its field; callers prepend the part's path."""

    def __init__(self, words: str) -> None:
        self.words, self.path = words, ""

    def __str__(self) -> str:
        field = f"its field {self.path.removeprefix('.')}" if self.path else "it"
        return f"{field} {self.words}"


class Record:
    """A frozen dataclass that is stored as a JSON document."""

    _called: ClassVar[str]

    def __init_subclass__(cls, *, called: str) -> None:
        """Register a record class; `called` is its name in errors."""
        cls._called = called

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` turns back into an equal value."""
        document: dict[str, Any] = to_document(self)
        return document

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild a record from `to_json`; unknown keys are ignored.

        Raises:
            CorruptRecord: a field is missing or has the wrong type; the error names the field.
        """
        return from_document(cls, data, cls._called)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Rebuild a record from JSON text; raises what `from_json` does."""
        return cls.from_json(_load(data, cls._called))


def to_document(value: Any) -> Any:
    """Return a value as objects that `json` can write."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        return {name: to_document(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {key: to_document(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(each) for each in value]
    return value


def drop_defaults(value: Any) -> dict[str, Any]:
    """Return the document of a dataclass without the fields that have their defaults."""
    fields: Mapping[str, Field[Any]] = type(value).__dataclass_fields__
    return {
        name: to_document(getattr(value, name))
        for name, field in fields.items()
        if getattr(value, name) != default_of(field)
    }


def from_document(kind: type[T], document: Any, what: str) -> T:
    """Return the value that a document describes.

    Args:
        kind: the value's type.
        document: objects from `json`.
        what: the document's name in the error.

    Raises:
        CorruptRecord: the document does not describe a value of this type.
    """
    try:
        parsed: T = _make_reader(cast("Hashable", kind))(document)
    except _WrongError as error:
        raise CorruptRecord(f"{what} is damaged: {error}.") from None
    return parsed


def read(kind: Any, data: bytes, what: str) -> Any:
    """Return the value that JSON text describes; raises like `from_document`."""
    return from_document(kind, _load(data, what), what)


def _load(data: bytes, what: str) -> Any:
    try:
        return record.load(data)
    except CorruptRecord as error:
        raise CorruptRecord(f"{what} is damaged: {error}.") from error


@functools.cache
def _make_reader(kind: Any) -> _Read:
    if kind is Any:
        return lambda part: part
    if kind is None or kind in _PLAIN:
        return functools.partial(_read_plain, kind or types.NoneType)
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return functools.partial(_read_any, tuple(map(_make_reader, inside)))
    if origin is tuple and inside[-1] is not Ellipsis:
        return functools.partial(_read_each, tuple(map(_make_reader, inside)))
    if origin in (tuple, list):
        return functools.partial(_read_items, origin, _make_reader(inside[0]))
    if origin in (dict, Mapping):
        return functools.partial(_read_mapping, inside[0], _make_reader(inside[1]))
    if origin is Literal:
        return functools.partial(_read_literal, inside)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return functools.partial(_read_enum, kind)
    if hasattr(kind, "__dataclass_fields__"):
        return _make_fields_reader(kind)
    raise TypeError(f"{kind!r} is not read from documents")


def _read_plain(kind: type, part: Any) -> Any:
    if type(part) is kind or (kind is float and type(part) is int):
        return part
    raise _WrongError(f"is {_shorten(part)}, not of type {kind.__name__}")


def _read_enum(kind: type[Enum], part: Any) -> Any:
    try:
        return kind(part)
    except ValueError:
        raise _WrongError(f"is {_shorten(part)}, which is not allowed") from None


def _read_literal(choices: tuple[Any, ...], part: Any) -> Any:
    if part in choices:
        return part
    raise _WrongError(f"is {_shorten(part)}, which is not allowed")


def _read_any(readers: tuple[_Read, ...], part: Any) -> Any:
    wrong = []
    for reader in readers:
        try:
            return reader(part)
        except _WrongError as error:
            wrong.append(error)
    raise wrong[0]


def _read_items(kind: Callable[[Any], Any], item: _Read, part: Any) -> Any:
    members, items = _expect_list(part), []
    try:
        for member in members:
            items.append(item(member))
    except _WrongError as error:
        error.path = f"[{len(items)}]{error.path}"
        raise
    return kind(items)


def _read_each(items: tuple[_Read, ...], part: Any) -> Any:
    parts = _expect_list(part)
    if len(parts) != len(items):
        raise _WrongError(f"has {len(parts)} items, not {len(items)}")
    return tuple(_read_at(f"[{n}]", item, parts[n]) for n, item in enumerate(items))


def _read_mapping(key: type, value: _Read, part: Any) -> Any:
    parts = _expect_object(part)
    try:
        return {key(name): _read_at(f".{name}", value, each) for name, each in parts.items()}
    except ValueError:
        raise _WrongError(f"has a key that is not of type {key.__name__}") from None


def _read_at(where: str, read: _Read, part: Any) -> Any:
    try:
        return read(part)
    except _WrongError as error:
        error.path = where + error.path
        raise


def _make_fields_reader(kind: type[Any]) -> _Read:
    fields: Mapping[str, Field[Any]] = kind.__dataclass_fields__
    readers = [
        (name, _make_reader(_evaluate(kind.__module__, cast("Hashable", field.type))))
        for name, field in fields.items()
    ]
    needed = [
        name
        for name, field in fields.items()
        if field.default is MISSING and field.default_factory is MISSING
    ]

    def read(part: Any) -> Any:
        parts = _expect_object(part)
        for name in needed:
            if name not in parts:
                raise _WrongError(f"has no field {name!r}")
        own = {}
        for name, reader in readers:
            if name in parts:
                own[name] = _read_at(f".{name}", reader, parts[name])
        return kind(**own)

    return read


@functools.cache
def _evaluate(module: str, annotation: Any) -> Any:
    """Return the type that an annotation means. `typing.get_type_hints` would compile every
    annotation again, which takes milliseconds for a plan."""
    if not isinstance(annotation, str):
        return annotation
    if (kind := _BY_NAME.get(annotation)) is not None:
        return kind
    # Compile first: `eval` of text in a thread makes Python lose a Ctrl-C and exit with 1.
    return eval(compile(annotation, "<annotation>", "eval"), vars(sys.modules[module]))


def default_of(field: Field[Any]) -> Any:
    """Return a field's default, calling its factory if it has one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _expect_object(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _WrongError(f"is {_shorten(part)}, not an object")
    return part


def _expect_list(part: Any) -> list[Any]:
    if not isinstance(part, list):
        raise _WrongError(f"is {_shorten(part)}, not a list")
    return part


def _shorten(part: Any) -> str:
    text = repr(part)
    return text if len(text) <= 60 else f"{text[:60]}…"
