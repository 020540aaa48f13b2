"""Whether a module was patched in place to a new version of its source, as `%autoreload` does,
instead of being imported again.

In: the module, its source then and now. Out: yes or no.

IPython puts new code into a module's existing functions if nothing else in its file has changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from kinetic._pickling.code_pickler import find_named
from kinetic._pickling.matching import look_of
from kinetic._pickling.origin import walk_code

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
        _look_of(code) in map(_look_of, (before.get(name), _code_of(module, name)))
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
    found = find_named(module.__name__, qualname)
    for _ in range(_DEEPEST):
        found = getattr(found, "__func__", found)
        if isinstance(found, FunctionType) and not hasattr(found, "__wrapped__"):
            return found.__code__
        found = getattr(found, "__wrapped__", None)
    return None


def _look_of(code: CodeType | None) -> object:
    """Return what two functions have in common that were compiled from the same text, regardless of
    their lines."""
    if code is None:
        return None
    parts = [
        (each.co_freevars, each.co_argcount, each.co_kwonlyargcount, each.co_flags)
        for each in walk_code(code)
    ]
    return look_of(code), parts
