"""Search for the objects that a function uses: code, globals, annotations, wrapped functions.

The search never runs code of the objects.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import re
import sys
import typing
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

HAS_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
"""True if annotations are evaluated when they are read (PEP 649). They may use names that only type
checkers import."""
MOST_DECORATORS = 32
SHELL = "the notebook's shell"
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)


def walk_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions and class bodies inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from walk_code(inner)


def list_closed_over(func: FunctionType) -> dict[str, Any]:
    """Return the variables of a closure that have values, by name."""
    variables = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with suppress(ValueError):  # The variable is not set yet.
            variables[name] = cell.cell_contents
    return variables


def list_globals(func: FunctionType) -> dict[str, Any]:
    """Return, by name, the globals that a function, or code inside it, uses."""
    names, _ = _read_global_names(func.__code__)
    return {name: func.__globals__[name] for name in names if name in func.__globals__}


def sets_globals(func: FunctionType) -> bool:
    """True if a function assigns to a global, or deletes one."""
    return _read_global_names(func.__code__)[1]


def list_imports(namespace: Mapping[str, Any]) -> list[str]:
    """Return the modules that a script, or the cells of a notebook, import."""
    file, cells = namespace.get("__file__"), namespace.get("In")
    typed = map(str, cells) if isinstance(cells, list) else ()
    lines = linecache.getlines(file) if isinstance(file, str) else typed
    imports = ",".join(_IMPORTS.findall("\n".join(lines))).split(",")
    return list(dict.fromkeys(words.split()[0] for words in imports if words.strip()))


@functools.lru_cache(maxsize=4096)
def _read_global_names(code: CodeType) -> tuple[tuple[str, ...], bool]:
    """Return the names of globals in code, and True if the code sets or deletes one."""
    steps = [step for inner in walk_code(code) for step in dis.get_instructions(inner)]
    names = {step.argval for step in steps if step.opname in (*_LOADS, *_STORES)}
    return tuple(sorted(names)), any(step.opname in _STORES for step in steps)


def read_annotations(obj: FunctionType | type) -> dict[str, Any]:
    """Return an object's own annotations, by name. If any cannot be evaluated, all are text."""
    if not HAS_LAZY_ANNOTATIONS:
        own = vars(obj) if isinstance(obj, type) else {"__annotations__": obj.__annotations__}
        annotations: dict[str, Any] = own.get("__annotations__", {})
        return annotations
    from annotationlib import Format, get_annotations  # type: ignore[import-not-found,unused-ignore]

    for form in (Format.VALUE, Format.STRING):
        try:
            return dict(get_annotations(obj, format=form))
        except Exception:  # noqa: BLE001 - it is the user's code
            continue
    return {}


def list_annotated(func: FunctionType) -> dict[str, Any]:
    """Return the modules, classes and callables among the globals that annotations in quotes name.
    A dataclass's fields count through its `__init__`, which has their annotations."""
    names: set[str] = set()
    parts = list(read_annotations(func).values())
    for part in parts:  # The loop appends nested annotations.
        if isinstance(part, str):
            new_names, texts = _parse_annotation(part)
            names |= new_names
            parts += texts
        elif isinstance(part, typing.ForwardRef):
            parts.append(part.__forward_arg__)
        else:
            parts += typing.get_args(part)
    values = {name: func.__globals__.get(name) for name in sorted(names)}
    is_sent = ModuleType | type
    return {n: v for n, v in values.items() if isinstance(v, is_sent) or callable(v)}


@functools.lru_cache(maxsize=4096)
def _parse_annotation(text: str) -> tuple[set[str], list[str]]:
    """Return the names in an annotation in quotes, and the strings inside it."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError):
        return set(), []
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts = [value for value in constants if isinstance(value, str)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}, texts


def is_checked_by_jaxtyping(func: FunctionType) -> bool:
    """True if a function is jaxtyping's wrapper: its closure has weak references, which cannot be
    pickled, unlike the wrapped function."""
    if not func.__globals__.get("__name__", "").startswith("jaxtyping."):
        return False
    cells = list_closed_over(func).values()
    values = [value for cell in cells for value in (cell if type(cell) is list else [cell])]
    return any(isinstance(value, weakref.ReferenceType) for value in values)


def find_wrapped(obj: Any) -> Any:
    """Return the object that a decorator has wrapped, or None, without running its code."""
    slot = getattr(type(obj), "__wrapped__", None)
    if isinstance(slot, GetSetDescriptorType):  # A proxy in C, such as wrapt's.
        return slot.__get__(obj)
    try:
        fields = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return fields.get("__wrapped__") if type(fields) is dict else None


def unwrap(obj: Any) -> Any:
    """Return the function under decorators, partials and methods."""
    inner: Any
    for _ in range(MOST_DECORATORS):
        if isinstance(obj, functools.partial):
            inner = obj.func
        elif isinstance(obj, MethodType | staticmethod | classmethod):
            inner = obj.__func__
        else:
            inner = find_wrapped(obj)
        if inner is None:
            break
        obj = inner
    return obj


def list_parts(thing: Any) -> Iterator[tuple[str, object]]:
    """Yield all objects that are pickled with a function, class, module or method, each after a
    description."""
    if isinstance(thing, FunctionType):
        yield from _list_parts_of_function(thing)
    elif isinstance(thing, MethodType) and thing.__name__ == "get_ipython":
        yield SHELL, thing.__self__
    elif isinstance(thing, MethodType):
        owner = f"the object ({type(thing.__self__).__name__})"
        yield f"{owner} whose method {thing.__name__!r} is called", thing.__self__
        yield f"method {thing.__name__!r}", thing.__func__
    elif isinstance(thing, functools.partial):
        for number, value in enumerate(thing.args, 1):
            yield f"argument {number} of the partial", value
        for name, value in thing.keywords.items():
            yield f"keyword {name!r} of the partial", value
        yield "the function of the partial", thing.func
    elif isinstance(thing, type):
        for name, value in vars(thing).items():
            if not isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                is_wrapped = isinstance(value, staticmethod | classmethod)
                part = value.__func__ if is_wrapped else value
                yield f"attribute {name!r} of class {thing.__name__}", part
        for base in thing.__bases__:
            yield f"class {base.__name__}, base of {thing.__name__}", base
    elif isinstance(thing, ModuleType):
        for name, value in list(vars(thing).items()):
            yield f"global {name!r} of module {thing.__name__}", value


def _list_parts_of_function(func: FunctionType) -> Iterator[tuple[str, object]]:
    defaults = func.__defaults__ or ()
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    by_parameter = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name, value in (by_parameter | (func.__kwdefaults__ or {})).items():
        yield f"default of parameter {name!r}", value
    for name, value in list_closed_over(func).items():
        yield f"closure variable {name!r} of {func.__name__}", value
    for name, value in list_globals(func).items():
        yield f"global {name!r} used by {func.__name__}", value
    for name, value in func.__dict__.items():
        yield f"attribute {name!r} of {func.__name__}", value
    yield f"annotations of {func.__name__}", read_annotations(func)
