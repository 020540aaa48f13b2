"""The statements of a script, as syntax: which there are, what their classes assign and name.

In: source. Out: nodes, names, text.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import typing
from collections.abc import Iterator, Sequence

from kinetic._pickling.origin import ScriptSource

_LINE_END = re.compile(r"\r\n|\r|\n")
"""Ends of lines for Python; `splitlines` also splits at form feeds and the like."""
_Block = ast.If | ast.Try | ast.With
Made = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.lru_cache(maxsize=1024)
def parse(source: ScriptSource) -> tuple[ast.stmt, ...]:
    """Return the statements of a source that are executed at its top level."""
    try:
        return tuple(_walk_statements(ast.parse(source.text).body))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _walk_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, _Block):
            handlers = [each.body for each in getattr(node, "handlers", ())]
            for inner in (
                node.body,
                *handlers,
                getattr(node, "orelse", []),
                getattr(node, "finalbody", []),
            ):
                yield from _walk_statements(inner)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_cell(node):
            yield from _walk_statements(node.body)


def _is_cell(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a cell of marimo, which executes its body at the top level."""
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(isinstance(each, ast.Attribute) and each.attr == "cell" for each in called)


def text_of(source: ScriptSource, node: ast.stmt) -> tuple[str, int]:
    """Return a statement on lines of its own, and its first line number."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    lines = _LINE_END.split(source.text)[first - 1 : node.end_lineno]
    before = lines[node.lineno - first].encode()[: node.col_offset].strip()
    after = lines[-1].encode()[node.end_col_offset :].strip()
    if before or (after and not after.startswith(b"#")):  # It shares a line with others.
        return f"{ast.unparse(node)}\n", first
    if node.col_offset:  # It stands in a block.
        first, lines = first - 1, ["if True:", *lines]
    return "\n".join(lines) + "\n", first


@functools.lru_cache(maxsize=64)
def list_attributes_set(source: ScriptSource) -> frozenset[tuple[str, str]]:
    """Return (object, attribute) for every attribute that a source sets; "" for a method's
    class."""
    found = set()
    for statement in parse(source):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name):
                    found.add(("" if node.value.id == "cls" else node.value.id, node.attr))
                elif ast.unparse(node.value) in ("type(self)", "self.__class__", "__class__"):
                    found.add(("", node.attr))
            elif isinstance(node, ast.Call) and last_name(node.func) == "setattr":
                on, name = [*node.args, node, node][:2]
                if isinstance(on, ast.Name) and isinstance(name, ast.Constant):
                    found.add(("" if on.id == "cls" else on.id, str(name.value)))
    return frozenset(found)


def find_assignments(node: Made) -> dict[str, ast.expr]:
    """Return the assignments in the body of a class; of `x, y = …` the names alone."""
    found: dict[str, ast.expr] = {}
    for each in node.body:
        if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
            continue
        for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    found[name.id] = each.value if name is target else name
    return found


def find_decorated(node: Made) -> set[str]:
    """Return the functions in the body of a class that have decorators."""
    return {
        each.name
        for each in ast.walk(node)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.decorator_list
    }


def find_annotation_names(node: ast.AST) -> set[str]:
    """Return the names in the annotations of a class's attributes, also of those that are text."""
    return _names_in(
        [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
    )


def find_names(annotations: object) -> set[str]:
    """Return the names in the annotations of a function or a class that are text, or have text in
    them."""
    values = list(annotations.values()) if isinstance(annotations, dict) else []
    found: set[str] = set()
    for each in values:
        if isinstance(each, str):
            found |= _names_in_text(each)
        elif isinstance(each, typing.ForwardRef):
            found |= _names_in_text(each.__forward_arg__)
        else:
            values += typing.get_args(each)
    return found


@functools.lru_cache(maxsize=1024)
def _names_in_text(text: str) -> frozenset[str]:
    return frozenset(_names_in([ast.Constant(text)]))


def _names_in(waiting: list[ast.AST]) -> set[str]:
    found: set[str] = set()
    for each in (inner for annotation in waiting for inner in ast.walk(annotation)):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            with contextlib.suppress(SyntaxError, ValueError):
                waiting.append(ast.parse(each.value, mode="eval"))
    return found


def find_annotated(node: Made) -> set[str]:
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def callee_of(node: ast.expr) -> ast.expr:
    """Return what a decorator calls: the `f` of `@f`, `@f(…)` and `@partial(f, …)`."""
    if not isinstance(node, ast.Call):
        return node
    return node.args[0] if last_name(node.func) == "partial" and node.args else node.func


def last_name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
