"""Whether a module was patched in place to a new version of its source, as `%autoreload` does,
instead of being imported again.

In: the module, its source then and now. Out: yes or no.

IPython puts new code into a module's existing functions if nothing else in its file has changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DEEPEST = 32


def is_patched(module: ModuleType, old: bytes, new: bytes) -> bool:
    """Whether the module matches the new source: only functions have changed, and it has the new
    ones."""
    try:
        if _rest(old) != _rest(new):
            return False
        before = dict(_functions(compile(old, "", "exec", dont_inherit=True)))
        after = dict(_functions(compile(new, "", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return all(
        _is_same(code, before.get(name)) or _is_same(code, _code_of(module, name))
        for name, code in after.items()
    )


def _rest(source: bytes) -> str:
    """Return the source without its functions, as a normalized dump."""

    class WithoutFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    return ast.dump(WithoutFunctions().visit(ast.parse(source)))


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield the functions of a module and of its classes, by qualified name."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if not inner.co_flags & 1:  # A class body: only functions have the flag CO_OPTIMIZED.
                yield from _functions(inner)
            elif not inner.co_name.startswith("<"):
                yield inner.co_qualname, inner


def _code_of(module: ModuleType, qualname: str) -> CodeType | None:
    """Return the module's code under this name, without decorators."""
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, ModuleType | type) else None
    for _ in range(_DEEPEST):
        found = getattr(found, "__func__", found)
        if isinstance(found, FunctionType) and not hasattr(found, "__wrapped__"):
            return found.__code__
        found = getattr(found, "__wrapped__", None)
    return None


def _is_same(one: CodeType, other: CodeType | None) -> bool:
    """Whether two functions have the same code, regardless of their lines."""
    if other is None:
        return False
    parts = (
        "co_code",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_argcount",
        "co_kwonlyargcount",
        "co_flags",
    )
    if any(getattr(one, part) != getattr(other, part) for part in parts) or len(
        one.co_consts
    ) != len(other.co_consts):
        return False
    return all(
        _is_same_constant(mine, its)
        for mine, its in zip(one.co_consts, other.co_consts, strict=True)
    )


def _is_same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType):
        return isinstance(other, CodeType) and _is_same(one, other)
    return type(one) is type(other) and one == other
