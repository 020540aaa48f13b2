"""Which statements made a class or a function. Of one name there may be many: in cells that were
edited and run again, in a file that was edited and executed again, at a prompt.

In: live objects, and the statements that have their name. Out: those that made them, oldest first.

A function that stands in the body of a class says itself which source it was compiled from, and its
code shows which text that source had then. A class without functions is known by its values.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import operator
import os
from collections.abc import Container, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from kinetic._pickling import defaults, statements
from kinetic._pickling.annotations import CODE, list_annotated
from kinetic._pickling.origin import MAIN, ScriptSource, walk_code
from kinetic._pickling.unpickler import Definition

Found = tuple[ScriptSource, statements.Made]
_NOTHING = object()
_FLAGS = __future__.annotations.compiler_flag


def choose(made: FunctionType | type, found: Sequence[Found], set_later: set[str]) -> list[Found]:
    """Return those of the statements that may have made the object.

    Args:
        made: the object.
        found: statements that define its name, oldest first.
        set_later: attributes that were set on a class after it was made.
    """
    codes = _list_codes(made, set_later)
    if codes:
        return _choose_by_codes(codes, found)
    assert isinstance(made, type)
    fitting = [each for each in found if _has_fields_of(made, each[1])]
    for is_likely in (_starts_at, _has_values_of):
        if len(fitting) > 1:
            fitting = [each for each in fitting if is_likely(made, each[1])] or fitting
    return fitting


def _choose_by_codes(codes: Sequence[CodeType], found: Sequence[Found]) -> list[Found]:
    """Return the statements at whose lines these functions stand, in the source that they come
    from. Where that is not known, or has changed, the functions must be the same."""
    fitting = [each for each in found if _are_on_lines(codes, each[1])]
    here = [each for each in fitting if all(_is_in(code, each[0].file) for code in codes)]
    if here and len({_dump(node) for _, node in here}) == 1:
        return here[-1:]
    looks = {look_of(code) for code in codes}
    flags = functools.reduce(operator.or_, (code.co_flags for code in codes)) & _FLAGS
    return [each for each in here or fitting if looks <= _looks_of(*each, flags)]


def list_added(made: type, node: statements.Made, files: Container[str]) -> set[str]:
    """Return the attributes of a class whose functions its statement has not made: they were put
    into it later, by whatever means.

    Args:
        made: the class.
        node: its statement.
        files: where the script's functions come from.
    """
    computed = {*statements.find_assignments(node), *statements.find_decorated(node)}

    def is_from_elsewhere(value: Any) -> bool:
        code = getattr(value, "__code__", None)
        return (
            code is not None
            and value.__globals__.get("__name__") in MAIN
            and code.co_filename in files
            and not is_from_here(value)
        )

    def is_from_here(function: FunctionType) -> bool:
        code = function.__code__
        is_inside = _first_line_of(node) <= code.co_firstlineno <= (node.end_lineno or 0)
        return is_inside and code.co_qualname.startswith(f"{made.__qualname__}.")

    return {
        name
        for name, value in vars(made).items()
        if any(map(is_from_elsewhere, _list_own(value, made)))
        and not (name in computed and any(map(is_from_here, _walk_functions(value, made))))
    }


def _list_own(value: Any, of: type) -> list[Any]:
    """Return an attribute that is a function, or the functions in it."""
    if isinstance(value, FunctionType):
        return [value]
    return [] if isinstance(value, type) else _list_functions(value, of)


def _walk_functions(value: Any, of: type) -> Iterator[FunctionType]:
    """Yield the functions in an attribute, and those that they hold: decorators wrap them."""
    waiting = _list_own(value, of)
    seen: set[int] = set()
    for each in waiting:
        if isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += _list_functions(each, of)
            with contextlib.suppress(ValueError):  # A variable that has no value yet.
                waiting += [cell.cell_contents for cell in each.__closure__ or ()]


def _list_codes(made: FunctionType | type, set_later: set[str]) -> list[CodeType]:
    """Return the code of a function, or of the functions in the body of a class, from under
    decorators. What other functions have made, or were in the class from elsewhere, is left out."""
    if isinstance(made, FunctionType):
        return [defaults.unwrap(made).__code__]
    waiting = [value for name, value in vars(made).items() if name not in set_later]
    seen: set[int] = set()
    found = []
    for each in waiting:
        if id(each) not in seen:
            seen.add(id(each))
            waiting += _list_functions(each, made)
            if isinstance(each, FunctionType) and each.__globals__.get("__name__") in MAIN:
                found.append(each.__code__)
    prefix = f"{made.__qualname__}."
    return [code for code in found if code.co_qualname.startswith(prefix) and code.co_name != CODE]


def _list_functions(value: Any, of: type) -> list[Any]:
    """Return the functions in an attribute of a class, without running its code."""
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, type):
        is_inner = value.__qualname__.startswith(f"{of.__qualname__}.")
        return list(vars(value).values()) if is_inner else []
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - it may be a property
        return []
    values = held.values() if type(held) is dict else ()
    return [each for each in values if isinstance(each, FunctionType)]


def _is_in(code: CodeType, file: str) -> bool:
    """Whether code was compiled from a source; its name there may lack the folder."""
    return os.path.basename(code.co_filename) == os.path.basename(file)  # noqa: PTH119


def _are_on_lines(codes: Sequence[CodeType], node: statements.Made) -> bool:
    lines = dict(_name_lines(node))
    return all(
        code.co_name == "<lambda>" or lines.get(code.co_firstlineno) == code.co_name
        for code in codes
    )


def _name_lines(node: statements.Made) -> Iterator[tuple[int, str]]:
    """Yield the lines on which functions may begin, with their names."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.lineno, each.name
            yield _first_line_of(each), each.name


def _first_line_of(node: statements.Made) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


@functools.lru_cache(maxsize=1024)
def _dump(node: statements.Made) -> str:
    return ast.dump(node)


@functools.lru_cache(maxsize=1024)
def _looks_of(source: ScriptSource, node: statements.Made, flags: int) -> frozenset[object]:
    """Return how the functions look that a statement makes."""
    text, first = statements.text_of(source, node)
    try:
        code = Definition(text, source.file, first, flags).code()
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(map(look_of, walk_code(code)))


def look_of(code: CodeType) -> object:
    """Return what two pieces of code have in common if they were compiled from the same text."""
    values = tuple(
        look_of(each) if isinstance(each, CodeType) else _spell(each) for each in code.co_consts
    )
    return code.co_qualname, code.co_code, code.co_names, code.co_varnames, values


def _spell(constant: object) -> object:
    try:
        return repr(constant)
    except ValueError:  # Python writes no integer of thousands of digits.
        return constant


def _starts_at(made: type, node: statements.Made) -> bool:
    """Whether a class may start on the line of a statement; it knows from Python 3.13 on."""
    return bool(vars(made).get("__firstlineno__", _first_line_of(node)) == _first_line_of(node))


def _has_fields_of(made: type, node: statements.Made) -> bool:
    """Whether a class has the annotations that its statement names, and the defaults of fields that
    a library keeps (pydantic, attrs)."""
    known = list_annotated(made)
    if known is not None and not statements.find_annotated(node) <= known:
        return False
    kept = vars(made).get("__pydantic_fields__") or {
        each.name: each for each in vars(made).get("__attrs_attrs__", ())
    }
    defaults_kept = {name: getattr(field, "default", None) for name, field in kept.items()}
    return _has_constants_of(defaults_kept, node)


def _has_values_of(made: type, node: statements.Made) -> bool:
    """Whether a class has the plain values and the annotations that its statement names."""
    annotated = statements.find_annotated(node)
    return list_annotated(made) in (None, annotated) and _has_constants_of(dict(vars(made)), node)


def _has_constants_of(values: dict[str, Any], node: statements.Made) -> bool:
    """Whether values by name are those that a statement assigns, as far as it says them."""
    for name, expression in statements.find_assignments(node).items():
        value = values.get(name, _NOTHING)
        try:
            if value is not _NOTHING and value != ast.literal_eval(expression):
                return False
        except Exception:  # noqa: BLE001 - not a literal, or user-defined comparison
            continue
    return True
