"""Exceptions as plain dicts, and back.

Plain pickling loses causes, contexts and frames. It fails for classes whose constructor needs more
than `args`, and changes a message that the constructor edits. So each exception, with those linked
to it, becomes a node. An exception that changes when pickled and unpickled is sent as its class,
arguments and attributes. A node is a plain dict:

    type, text          what a traceback shows
    body                pickle of the exception itself, or of its parts;
                        None if the class cannot be pickled
    whole               True if `body` is the exception itself
    frames              from `describe_frame`, outermost first
    cause, context      index of the node, or None
    suppress            __suppress_context__
    members             indices of a group's members, or None
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from types import FunctionType, MemberDescriptorType, TracebackType
from typing import Any

from kinetic._pickling.origin import map_path
from kinetic.errors import PicklingError, UserCodeFailed, a_type, text_of

Node = dict[str, Any]
Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], Any]

_MOST_NODES = 200
_FIRST_FRAMES, _LAST_FRAMES = 50, 150
Frame = tuple[Any, ...]
"""A frame of a traceback: file, function, line, first line of the function; last line, first column
and last column of the expression."""


def describe(
    error: BaseException, *, dumps: Dumps, loads: Loads, source_map: tuple[str, str] | None
) -> list[Node]:
    """Describe an exception and all exceptions linked to it. The root is the first node.

    Raises:
        PicklingError: The class of the root cannot be pickled.
    """
    tree = _list_linked(error)
    index = {id(linked): number for number, linked in enumerate(tree)}
    nodes = [_make_node(linked, index, dumps, loads, source_map) for linked in tree]
    if nodes[0]["body"] is None:
        name = nodes[0]["type"]
        raise PicklingError(
            f"The function raised {name}, which cannot be pickled. Its message: {nodes[0]['text']}",
            component=f"the exception ({name})",
        )
    return nodes


def rebuild(nodes: list[Node], *, loads: Loads) -> BaseException:
    """Rebuild an exception from its nodes.

    Raises:
        UserCodeFailed: The class of the root cannot be rebuilt here.
    """
    errors: dict[int, BaseException] = {}

    def make(number: int) -> BaseException:
        if number not in errors:
            node = nodes[number]
            members = (
                None if node["members"] is None else [make(member) for member in node["members"]]
            )
            errors[number] = _make_exception(node, members, loads, must=number == 0)
        return errors[number]

    for number, node in enumerate(nodes):
        error = make(number).with_traceback(make_traceback(node["frames"]))
        for link in ("cause", "context"):
            _fill(error, f"__{link}__", None if node[link] is None else make(node[link]))
        _fill(error, "__suppress_context__", node["suppress"])
    return errors[0]


def _list_linked(root: BaseException) -> list[BaseException]:
    errors, ids = [root], {id(root)}
    for error in errors:  # The loop appends linked exceptions.
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for other in (*members, error.__cause__, error.__context__):
            if (
                other is not None
                and id(other) not in ids
                and (len(errors) < _MOST_NODES or any(other is member for member in members))
            ):
                ids.add(id(other))
                errors.append(other)
    return errors


def _make_node(
    error: BaseException,
    index: dict[int, int],
    dumps: Dumps,
    loads: Loads,
    source_map: tuple[str, str] | None,
) -> Node:
    body, whole = _pickle_exception(
        _drop_connection(_map_syntax_error(error, source_map)), dumps, loads
    )
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": text_of(error),
        "body": body,
        "whole": whole,
        "frames": _describe_frames(error.__traceback__, source_map),
        "cause": index.get(id(error.__cause__)),
        "context": index.get(id(error.__context__)),
        "suppress": error.__suppress_context__,
        "members": [index[id(each)] for each in error.exceptions]
        if isinstance(error, BaseExceptionGroup)
        else None,
    }


def _map_syntax_error(error: BaseException, source_map: tuple[str, str] | None) -> BaseException:
    """Map the file name in a syntax error's arguments: it has no frame of that file."""
    if type(error) not in (SyntaxError, IndentationError, TabError):
        return error
    match error.args:
        case (message, (str(file), *place)) if (moved := map_path(file, source_map)) != file:
            copy = type(error)(message, (moved, *place))
            copy.__dict__.update(vars(error))
            return copy
    return error


def _drop_connection(error: Any) -> Any:
    """Replace the connection in urllib's HTTPError by an empty file, since connections cannot be
    pickled; return other exceptions unchanged."""
    if type(error) is getattr(sys.modules.get("urllib.error"), "HTTPError", None):
        with suppress(Exception):
            copy = type(error)(error.url, error.code, error.msg, error.hdrs, io.BytesIO())
            vars(copy)["__notes__"] = getattr(error, "__notes__", [])
            return copy
    return error


def _pickle_exception(
    error: BaseException, dumps: Dumps, loads: Loads
) -> tuple[bytes | None, bool]:
    """Return the pickle of an exception, or None if it cannot be pickled; and True if the pickle
    has the exception itself, False if it has its parts."""
    whole = None
    if not isinstance(error, BaseExceptionGroup):
        with suppress(BaseException):
            data = dumps(error)
            rebuilt = loads(data)
            if type(rebuilt) is type(error) and str(rebuilt) == str(error):
                whole = data
                if _is_alike(rebuilt, error, dumps):
                    return data, True
    with suppress(BaseException):
        data = dumps(_split_exception(error, dumps))
        _join_parts(
            *loads(data),
            members=list(error.exceptions) if isinstance(error, BaseExceptionGroup) else None,
        )
        return data, False
    # Some classes of C extensions are rebuilt only by their constructor, which changes `args`:
    # send the whole exception, if it can be pickled.
    return whole, whole is not None


def _is_alike(one: BaseException, other: BaseException, dumps: Dumps) -> bool:
    """True if two exceptions of a class have the same names of attributes, and the same arguments
    and slots as far as these can be pickled."""

    def differ(a: object, b: object) -> bool:
        with suppress(Exception):
            return dumps(a) != dumps(b)
        return False

    names = [vars(each).keys() | _read_slots(each).keys() for each in (one, other)]
    if names[0] != names[1] or len(one.args) != len(other.args):
        return False
    slots, others = _read_slots(one), _read_slots(other)
    pairs = [*zip(one.args, other.args, strict=True), *((slots[n], others[n]) for n in slots)]
    return not any(differ(a, b) for a, b in pairs)


def _list_slots(cls: type[BaseException]) -> dict[str, Any]:
    """List the slots of a class and its bases, fields of built-in classes such as `errno` included.

    Left out are fields that nodes have, and those that would let Python suggest names of this
    process."""
    return {
        name: member
        for base in reversed(cls.__mro__)
        if base not in (BaseException, BaseExceptionGroup, AttributeError, NameError)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }


def _read_slots(error: BaseException) -> dict[str, Any]:
    slots = {}
    for name, member in _list_slots(type(error)).items():
        with suppress(AttributeError):  # Not set.
            slots[name] = member.__get__(error)
    return slots


def _fill_slot(error: BaseException, member: Any, value: object) -> None:
    with suppress(AttributeError, TypeError):  # Read-only.
        if value is None and member.__objclass__ is OSError:
            member.__delete__(error)  # The text of an OSError has the fields that are set.
        else:
            member.__set__(error, value)


def _split_exception(
    error: BaseException, dumps: Dumps
) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    def travels(value: object) -> bool:
        with suppress(BaseException):
            dumps(value)
            return True
        return False

    args = (error.message,) if isinstance(error, BaseExceptionGroup) else error.args
    attributes = _read_slots(error) | vars(error)
    state = {name: value for name, value in attributes.items() if travels(value)}
    if lost := sorted(attributes.keys() - state.keys()):
        state["__notes__"] = [
            *state.get("__notes__", ()),
            f"Attributes that could not be pickled: {', '.join(lost)}.",
        ]
    return type(error), tuple(arg if travels(arg) else _safe_repr(arg) for arg in args), state


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except BaseException as problem:  # noqa: BLE001 - the user's __repr__ may raise anything
        return f"<{type(value).__qualname__}: its repr raised {type(problem).__name__}>"


def _fill(error: BaseException, slot: str, value: object) -> None:
    """Set an attribute of `BaseException`, even if the class is a frozen dataclass."""
    getattr(BaseException, slot).__set__(error, value)


def _join_parts(
    cls: type[BaseException],
    args: tuple[Any, ...],
    state: dict[str, Any],
    *,
    members: list[BaseException] | None,
) -> BaseException:
    """Make an exception without calling its class's constructor, whose arguments are unknown."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    init_args = (*args, members) if members is not None else args
    error: BaseException = builtin.__new__(cls, *init_args)
    if members is None:
        # The built-in constructor sets fields such as `errno`, or the position of a codec's error.
        with suppress(BaseException):
            builtin.__init__(error, *args)
        _fill(error, "args", args)
    slots = _list_slots(cls)
    for name, value in state.items():
        if name in slots:
            _fill_slot(error, slots[name], value)
        else:
            error.__dict__[name] = value
    return error


def _make_exception(
    node: Node, members: list[BaseException] | None, loads: Loads, *, must: bool
) -> BaseException:
    summary = f"{node['type']}: {node['text']}"
    if node["body"] is None:
        return UserCodeFailed(summary)
    try:
        error = loads(node["body"])
        if not node["whole"]:
            error = _join_parts(*error, members=members)
        if isinstance(error, BaseException):
            return error
        problem: BaseException = TypeError(f"it came back as {a_type(error)}")
    except (Exception, SystemExit) as caught:  # noqa: BLE001 (unpickling imports and runs the user's modules)
        problem = caught
    failed = UserCodeFailed(
        f"{summary}\n(Its class cannot be unpickled here: {type(problem).__name__}: {problem}.)"
    )
    if must:
        raise failed from problem
    return failed


def _describe_frames(
    traceback: TracebackType | None, source_map: tuple[str, str] | None
) -> list[Frame]:
    links: list[TracebackType] = []
    while traceback is not None:
        links.append(traceback)
        traceback = traceback.tb_next
    if len(links) > _FIRST_FRAMES + _LAST_FRAMES:  # Probably an endless recursion.
        links = links[:_FIRST_FRAMES] + links[-_LAST_FRAMES:]
    return [
        describe_frame(link, map_path(link.tb_frame.f_code.co_filename, source_map))
        for link in links
    ]


def describe_frame(traceback: TracebackType, file: str) -> Frame:
    """Describe the outermost frame of a traceback, with `file` as its file name."""
    code = traceback.tb_frame.f_code
    line = max(traceback.tb_lineno or 1, 1)
    position = next(islice(code.co_positions(), max(traceback.tb_lasti, 0) // 2, None), (None,) * 4)
    positions = position[1:] if position[0] == line else (None, None, None)
    return (file, code.co_name, line, code.co_firstlineno, *positions)


def make_traceback(frames: Sequence[Frame]) -> TracebackType | None:
    """Make a traceback from frames, outermost first.

    Each frame comes from code that only raises, compiled with the original file, function and
    line: terminals, notebooks and debuggers show these, with carets below the expression.
    """
    traceback: TracebackType | None = None
    for frame in reversed(frames):
        below, traceback = traceback, _raise_in(frame)
        if traceback is not None:
            traceback.tb_next = below
    return traceback


def _raise_in(frame: Frame) -> TracebackType | None:
    file, function, line, first, end_line, first_column, last_column = frame
    columns = (first_column, last_column)
    if end_line is None or None in columns:
        end_line, columns = line, (-1, -1)  # No carets.
    span = {"lineno": line, "end_lineno": end_line}
    span |= dict(zip(("col_offset", "end_col_offset"), columns, strict=True))
    raising = ast.Raise(ast.Name("error", ast.Load(), **span), **span)
    module = ast.parse("def function(): pass")
    (definition,) = module.body
    assert isinstance(definition, ast.FunctionDef)
    definition.name, definition.body = function, [raising]
    definition.lineno = definition.end_lineno = first
    (code, *_) = compile(module, file, "exec").co_consts
    try:
        FunctionType(code, {"__file__": file, "__name__": "?", "error": _Marker()})()
    except _Marker as error:
        return error.__traceback__.tb_next if error.__traceback__ is not None else None
    return None


class _Marker(Exception):
    """Raised in each frame of a rebuilt traceback, and caught by `_raise_in`."""
