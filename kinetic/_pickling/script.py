"""What a script, or the cells of a notebook, define: the statements to execute again on a host.

In: the globals of `__main__`, and its source. Out: `Definition`s.

A class is executed again if its definition does more than make a class: a decorator, a metaclass or
a base's `__init_subclass__` that comes from a module may register it there, and a copy of its parts
would not be registered on the host. The same holds for a decorator of the script itself that calls
what registers in a module, for functions with a decorator that registers, and for statements such
as `register_pytree_node(Point, …)` that name a class of the script. A registry that belongs to the
script itself is pickled by value with all its state. Nothing else of a script runs again: what it
computes at its top level stays what it was here. (Importing the whole script, as `multiprocessing`
does, would run it again where no `if __name__ == "__main__"` guards it, and notebooks cannot be
imported.)
"""

from __future__ import annotations
import __future__

import abc
import ast
import atexit
import builtins
import dataclasses
import dis
import enum
import functools
import typing
from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kinetic._pickling import (
    defaults,
    given,
    imported_names,
    matching,
    statements,
)
from kinetic._pickling.annotations import CODE
from kinetic._pickling.code_pickler import holds_weakly
from kinetic._pickling.origin import MAIN, ScriptSource
from kinetic._pickling.unpickler import Definition

_PLAIN_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta, type(typing.Protocol))
_PLAIN_BASES = (object, typing.Generic, typing.Protocol)
_PLAIN_DECORATORS = (
    dataclasses.dataclass,
    functools.total_ordering,
    typing.final,
    typing.runtime_checkable,
    enum.unique,
    enum.verify,
)
_NEVER_AGAIN = (atexit.register,)
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<generic parameters of ")
"""Functions that the compiler makes and the statement calls; the last ones have a class's bases."""
_OPTIMIZED = 1
"""The compiler's flag for functions; class bodies do not have it."""


class Script:
    """The definitions of `__main__`.

    Args:
        namespace: its globals.
        sources: its source, newest last: of two definitions of a name the later one counts.

    Attributes:
        lost: by name, the classes so far that no source is known to have made, and that a library
            may have registered.
        sendable: see `CodePickler.sendable`; for all picklers of a call.
    """

    def __init__(self, namespace: dict[str, Any], sources: Sequence[ScriptSource] = ()) -> None:
        self.namespace = namespace
        self._sources = sources
        self.lost: dict[str, type] = {}
        self.sendable: dict[int, tuple[object, float]] = {}
        self._known: dict[int, tuple[object, Definition | None]] = {}
        self._made_by: dict[int, tuple[object, matching.Found | None]] = {}

    @functools.cached_property
    def imported(self) -> dict[int, imported_names.ImportedValue]:
        """By id, the values that hosts take from their modules."""
        return imported_names.find_imported(self.namespace, self._sources)

    @functools.cached_property
    def imports_containers(self) -> bool:
        """Whether there are lists, dicts and sets among them."""
        kinds = {type(each.value) for each in self.imported.values()}
        return not kinds.isdisjoint(imported_names.CONTAINERS)

    @functools.cached_property
    def singletons(self) -> dict[int, object]:
        """By id, objects that may say of themselves that `__main__` has them under a name."""
        return {
            id(value): value
            for value in list(self.namespace.values())
            if isinstance(getattr(type(value), "__reduce__", None), FunctionType)
            and getattr(value, "__module__", None) in MAIN
            and not getattr(type(value), "is_plain_in_jobs", False)
        }

    def uses(self, modules: Sequence[str]) -> bool:
        """Whether the script itself has imported one of these modules, or something from them."""
        values = [
            each
            for each in self.namespace.values()
            if isinstance(each, ModuleType | FunctionType | type)
        ]
        tops = {name.partition(".")[0] for name in modules}
        names = (
            each.__name__ if isinstance(each, ModuleType) else each.__module__ for each in values
        )
        return any(name is not None and name.partition(".")[0] in tops for name in names)

    def definition(self, made: FunctionType | type) -> Definition | None:
        """Return how to define a class or function of the script again, if its definition does more
        than make it."""
        if id(made) not in self._known:
            self._known[id(made)] = made, self._definition(made)
        return self._known[id(made)][1]

    def _definition(self, made: FunctionType | type) -> Definition | None:
        found = self._statement(made)
        if found is None:
            self._note_lost(made)
            return None
        source, node = found
        if isinstance(made, type):
            does_more = self._has_more(made, node) or any(map(holds_weakly, vars(made).values()))
        else:
            does_more = self._registers(node) or holds_weakly(made)
        again = self._make_definition(source, node) if does_more else None
        if again is None:
            return None
        binds = self.namespace[made.__qualname__] is made
        return dataclasses.replace(again, binds=binds, given=tuple(self.find_kept_defaults(made)))

    def _note_lost(self, made: FunctionType | type) -> None:
        """Remember a class whose decorators cannot be executed again, if they are a library's: its
        name's other statements have such."""
        if isinstance(made, type) and self.namespace.get(made.__qualname__) is made:
            for _, node in self._statements.get(made.__qualname__, ()):
                decorators = map(self._value, map(statements.callee_of, node.decorator_list))
                if any(_is_foreign(each) and each not in _PLAIN_DECORATORS for each in decorators):
                    self.lost[made.__qualname__] = made

    def find_changes(self, made: FunctionType | type) -> dict[str, Any]:
        """Return the attributes of a class that may differ from what its statement gives it
        when it is executed again."""
        found = self._statement(made) if isinstance(made, type) else None
        if found is None or not isinstance(made, type):
            return {}
        in_body = statements.find_assignments(found[1])
        later = self._find_set_later(made)
        files = {source.file for source in self._sources} - {"<string>"}  # Libraries use it, too.
        added = self._find_set_on(made) | matching.list_added(made, found[1], files)
        return {
            name: value
            for name, value in vars(made).items()
            if name in added
            or (
                not name.startswith("__")
                and (name in later or (name in in_body and given.may_differ(value, in_body[name])))
            )
        }

    def find_defaults(self, made: FunctionType | type) -> defaults.Defaults:
        """Return the default arguments of a class's functions that may differ likewise."""
        found = self._statement(made) if isinstance(made, type) else None
        if found is None or not isinstance(made, type):
            return {}
        in_body = statements.find_assignments(found[1])
        return defaults.find(
            made,
            lambda name, value: (
                given.may_differ(value, in_body[name]) if name in in_body else given.is_plain(value)
            ),
        )

    def find_bases(self, made: FunctionType | type) -> dict[str, type]:
        """Return the bases that its statement is given, by their names."""
        found = self._statement(made) if isinstance(made, type) else None
        if found is None or not isinstance(made, type):
            return {}
        return given.find_bases(made, found[1], self.namespace)

    def find_kept_defaults(self, made: FunctionType | type) -> dict[str, Any]:
        """Return the defaults of fields that its statement is given, by names of globals."""
        found = self._statement(made)
        return given.find_defaults(made, found[1]) if found and isinstance(made, type) else {}

    def _statement(self, made: FunctionType | type) -> matching.Found | None:
        if id(made) not in self._made_by:
            self._made_by[id(made)] = made, self._find_statement(made)
        return self._made_by[id(made)][1]

    def _find_statement(self, made: FunctionType | type) -> matching.Found | None:
        """Return the statement that made a class or function which the script still has under its
        name, or a class that was defined anew since: there may be objects of it."""
        now = self.namespace.get(made.__qualname__)
        is_old = (
            isinstance(made, type)
            and isinstance(now, type)
            and now.__module__ in MAIN
            and made not in now.__mro__
        )
        if made.__module__ not in MAIN or not (now is made or is_old):
            return None
        named = self._statements.get(made.__qualname__, ())
        found = matching.choose(made, named, self._find_set_later(made)) if named else []
        if is_old and len({ast.dump(node) for _, node in found}) != 1:
            return None  # It cannot be known which of them made it.
        return found[-1] if found else None

    def list_registered(self) -> list[Any]:
        """Return the classes and functions that the script has registered, whether a call uses them
        or not."""
        return [
            self.namespace[name]
            for name, found in (self._statements.items() if self._registering else ())
            if isinstance(self.namespace.get(name), type | FunctionType)
            and any(self._registers(node) for _, node in found)
        ]

    def registrations(self) -> list[Definition]:
        """Return separate statements that register a class of the script."""
        return [found for found, _ in self._found_registrations]

    @functools.cached_property
    def registered(self) -> set[int]:
        """The ids of the classes that these statements register."""
        return {id(each) for _, classes in self._found_registrations for each in classes}

    @functools.cached_property
    def _found_registrations(self) -> list[tuple[Definition, list[type]]]:
        """Those statements, and what each registers. Of those that register the same in several
        sources (a cell was edited, or has failed) the newest are in force."""
        newest: dict[str, ScriptSource] = {}
        found: list[tuple[Definition, list[type]]] = []
        for source in reversed(self._registering):
            nodes = [
                node
                for node in statements.parse(source)
                if self._is_registering(node)
                and self._is_in_force(source, node)
                and newest.setdefault(self._name_registration(node), source) is source
            ]
            made = [
                (self._make_definition(source, node), self._list_classes(node)) for node in nodes
            ]
            found[:0] = [(again, classes) for again, classes in made if again is not None]
        return found

    def _is_in_force(self, source: ScriptSource, node: ast.stmt) -> bool:
        """Whether a statement has registered classes as they are, not as they were before they were
        defined again."""
        found = map(self._statement, self._list_classes(node))
        defining = [each[0] for each in found if each is not None]
        return not any(
            source.number < each.number or (source.file == each.file and source != each)
            for each in defining
        )

    def _list_classes(self, node: ast.stmt) -> list[type]:
        """Return the classes that a statement registers: the first of a call's arguments that is
        one, those over which a loop goes."""
        if isinstance(node, ast.For):
            named = [each.id for each in ast.walk(node.iter) if isinstance(each, ast.Name)]
            return [each for name in named for each in self._classes_of(name)]
        last = self._list_arguments(node)[-1]
        return self._classes_of(last.id) if isinstance(last, ast.Name) else []

    def _list_arguments(self, node: ast.stmt) -> list[ast.expr]:
        """Return the arguments of a call up to the class that it registers."""
        call: Any = getattr(node, "value", None)
        given = [*call.args, *(each.value for each in call.keywords)]
        is_class = [isinstance(each, ast.Name) and self._is_class(each.id) for each in given]
        return given[: is_class.index(True) + 1]

    def _name_registration(self, node: ast.stmt) -> str:
        """Return what two statements have in common that register the same in the same way."""
        called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
        heads = (
            [node.iter, *called]
            if isinstance(node, ast.For)
            else [called[0], *self._list_arguments(node)]
        )
        return "".join(map(ast.dump, heads))

    @functools.cached_property
    def _registering(self) -> list[ScriptSource]:
        return [source for source in self._sources if "regist" in source.text.lower()]

    @functools.cached_property
    def _statements(self) -> dict[str, list[matching.Found]]:
        found: dict[str, list[matching.Found]] = {}
        for source in self._sources:
            for node in statements.parse(source):
                if isinstance(node, statements.Made):
                    found.setdefault(node.name, []).append((source, node))
        return found

    def _find_set_later(self, made: FunctionType | type) -> set[str]:
        """Return the attributes that the script sets on a class, as in `Point.origin = …` and
        `cls.made += 1`."""
        in_methods = {name for on, name in self._attributes_set if not on}
        return in_methods | self._find_set_on(made)

    def _find_set_on(self, made: FunctionType | type) -> set[str]:
        """Return the attributes that it sets by the name of the class."""
        return {
            name
            for on, name in self._attributes_set
            if on == made.__qualname__ or (on and self.namespace.get(on) is made)
        }

    @functools.cached_property
    def _attributes_set(self) -> set[tuple[str, str]]:
        return {each for source in self._sources for each in statements.list_attributes_set(source)}

    def _has_more(self, cls: type, node: statements.Made) -> bool:
        bases = (
            base
            for base in cls.__mro__
            if base not in _PLAIN_BASES and "__init_subclass__" in vars(base)
        )
        metaclasses = () if type(cls) in _PLAIN_METACLASSES else (type(cls),)
        decorators = map(self._value, map(statements.callee_of, node.decorator_list))
        return any(
            _is_foreign(each) or self._has_registering(each)
            for each in (*bases, *metaclasses, *decorators)
            if each not in _PLAIN_DECORATORS
        )

    def _has_registering(self, decorator: object) -> bool:
        """Whether a decorator of the script registers what it gets with a library."""
        found = (
            self._statement(decorator)
            if isinstance(decorator, FunctionType) and self._registering
            else None
        )
        return found is not None and any(
            isinstance(each, ast.Call) and self._is_register(each.func)
            for each in ast.walk(found[1])
        )

    def _registers(self, node: statements.Made) -> bool:
        return any(self._is_register(statements.callee_of(each)) for each in node.decorator_list)

    def _is_register(self, called: ast.expr) -> bool:
        value = self._value(called)
        return (
            "register" in statements.last_name(called).lower()
            and _is_foreign(value)
            and value not in _NEVER_AGAIN
        )

    def _is_registering(self, node: ast.stmt) -> bool:
        """Whether a statement registers classes of the script, possibly in a loop."""
        if isinstance(node, ast.For):
            calls = [
                each.value if isinstance(each, ast.Expr) else None
                for each in (*node.body, *node.orelse)
            ]
            named = [each.id for each in ast.walk(node.iter) if isinstance(each, ast.Name)]
            return any(map(self._classes_of, named)) and all(
                isinstance(call, ast.Call) and self._is_register(call.func) for call in calls
            )
        call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        if not isinstance(call, ast.Call) or not self._is_register(call.func):
            return False
        arguments = (*call.args, *(each.value for each in call.keywords))
        return any(isinstance(each, ast.Name) and self._is_class(each.id) for each in arguments)

    def _is_class(self, name: str) -> bool:
        return name in self._statements and isinstance(self.namespace.get(name), type)

    def _classes_of(self, name: str) -> list[type]:
        """Return the class of the script that a name refers to, or those in its list."""
        value = self.namespace.get(name)
        if isinstance(value, list | tuple):
            return [each for each in value if isinstance(each, type) and each.__module__ in MAIN]
        return [self.namespace[name]] if self._is_class(name) else []

    def _value(self, node: ast.expr) -> Any:
        """Return what a dotted name of modules and classes refers to; None if that cannot be known
        without running code."""
        if isinstance(node, ast.Name):
            return self.namespace.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        of = self._value(node.value)
        if isinstance(of, FunctionType):  # `register` of a single-dispatch function.
            return vars(of).get(node.attr) if _is_foreign(of) else None
        return getattr(of, node.attr, None) if isinstance(of, ModuleType | type) else None

    def _make_definition(self, source: ScriptSource, node: ast.stmt) -> Definition | None:
        flags = (
            __future__.annotations.compiler_flag
            if self.namespace.get("annotations") is __future__.annotations
            else 0
        )
        text, first = statements.text_of(source, node)
        found = Definition(text, source.file, first, flags)
        try:
            needed, used = _names(found.code())
            annotating = _names_of_annotations(found.code())
        except (SyntaxError, ValueError, RecursionError):
            return None
        needed |= annotating & self.namespace.keys() - self._find_later(source, node)
        needed.discard(getattr(node, "name", ""))
        if any(name not in self.namespace and not hasattr(builtins, name) for name in needed):
            return None  # The script has since deleted a name.
        existing = {
            name
            for name in (*needed, *used)
            if name in self.namespace and not name.startswith("__")
        }
        return dataclasses.replace(
            found,
            needed=tuple(sorted(needed & existing)),
            used=tuple(sorted(used & existing - needed)),
            annotating=tuple(sorted(statements.find_annotation_names(node) - needed)),
        )

    def _find_later(self, source: ScriptSource, node: ast.stmt) -> set[str]:
        """Return the names of what a source defines only after a statement."""
        return {
            name
            for name, made in self._statements.items()
            if all(of is source and each.lineno > node.lineno for of, each in made)
        }


def _is_foreign(value: object) -> bool:
    """Whether this comes from a module, whose state is not sent; what comes from the script keeps
    its state."""
    return value is not None and getattr(value, "__module__", "__main__") not in MAIN


def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the globals that code loads, also in the functions and the bodies of classes in it,
    and names of builtins."""
    now, later = _names(code)
    return tuple(sorted(now | later))


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the globals that a statement needs when it is executed, and those that functions in it
    need later."""
    now: set[str] = set()
    later: set[str] = set()
    stored: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in _LOADS and step.argval not in stored:
            now.add(step.argval)
        elif step.opname == "STORE_NAME":
            stored.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_now, inner_later = _names(inner)
            runs_at_once = not inner.co_flags & _OPTIMIZED or inner.co_name.startswith(_AT_ONCE)
            (now if runs_at_once else later).update(inner_now)
            later |= inner_later
    return now, later


def _names_of_annotations(code: CodeType) -> set[str]:
    """Return the globals that annotations need where they are evaluated later (see `annotations`):
    a decorator may do that at once."""
    found: set[str] = set()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_name == CODE:
                found.update(*_names(inner))
            elif not inner.co_flags & _OPTIMIZED:
                found |= _names_of_annotations(inner)
    return found
