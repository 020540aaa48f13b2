"""How a call is pickled: cloudpickle, except that what the host can import is not duplicated there,
and that classes of a script are defined there again from their own source.

In: live objects, and the script they come from. Out: a pickle, for `CallUnpickler`.

cloudpickle pickles by reference only what it finds under its own name. Here also:

- the function under a decorator (`module.train` is a `RemoteCallable`, a jitted function, a cache):
  by its path;
- a function made by a function of a module (a closure): it gets the globals of that module, not a
  copy of some of them;
- functions of `__main__` share one namespace on the host: its `__main__`;
- a class of `__main__` whose definition does more than make a class (a decorator, a metaclass,
  `__init_subclass__`): rebuilt from its parts it would lack those effects, for example its
  registration as a pytree. Its class statement is sent and executed (see `script`).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import TextIOWrapper
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

from cloudpickle.cloudpickle import (
    _find_imported_submodules,
    _should_pickle_by_reference,
)

from kinetic._pickling import class_bodies, enums, unpickler
from kinetic._pickling.annotations import read_annotations
from kinetic._pickling.code_pickler import (
    CallOnLoad,
    Circular,
    CodePickler,
    find_named,
    find_renamed,
    is_by_value,
)
from kinetic._pickling.imported_names import CONTAINERS, ImportedValue
from kinetic._pickling.namespaces import (
    CopiedNamespace,
    ModuleNamespace,
    ScriptNamespace,
    find_copied,
    find_module_of,
)
from kinetic._pickling.origin import MAIN
from kinetic._pickling.script import Script, global_names
from kinetic._pickling.statements import find_names
from kinetic._pickling.unpickler import Definition

_DEEPEST = 32
"""The most decorators on one function."""


_ANNOTATION_BYTES = 100_000
"""What is larger only has a name that stands in an annotation, too."""


class CallPickler(CodePickler):
    """Pickles calls.

    Args:
        file: where to write.
        script: the definitions of `__main__`.
        rebuilt: ids of what must be rebuilt from its parts although there is source for it.

    Attributes:
        external: what was left out of the pickle; see `ExternalObjectPickler`.
        changes: what arrives as something else, in sentences.
    """

    external: tuple[object, ...] = ()

    def __init__(
        self, file: BinaryIO, script: Script, rebuilt: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(file)
        self.sendable = script.sendable
        self.carries_functions = True
        self._script = script
        self._rebuilt = rebuilt
        self._begun: set[int] = set()
        self._own = {id(each) for each in script.namespace.values() if _is_of_script(each)}
        self._seen: set[int] = set()
        self._plain_types: set[type] = set()
        values = (each.value for each in script.imported.values())
        self._known_types = {type(each) for each in (*values, *script.singletons.values())}
        self.changes: tuple[str, ...] = ()
        self.globals_ref[id(script.namespace)] = ScriptNamespace(script.namespace)

    def reducer_override(self, obj: Any) -> Any:
        """Decide how an object is pickled; called for all but the simplest objects."""
        kind = type(obj)
        if id(obj) in self._own:
            self._seen.add(id(obj))
        if kind in self._plain_types:
            return NotImplemented
        if issubclass(kind, FunctionType | type):
            if _should_pickle_by_reference(obj):
                return NotImplemented
            location = _locate(obj)
            if location is not None:
                return unpickler.find_undecorated, location
            found = None if id(obj) in self._rebuilt else self._script.definition(obj)
            if found is not None:
                return self._reduce_defined(obj, found)
            if isinstance(obj, FunctionType) and (module := find_module_of(obj)) is not None:
                return self._in_module(obj, module)
            reduced = super().reducer_override(obj)
            return self._complete_class(obj, reduced) if isinstance(obj, type) else reduced
        if issubclass(kind, ModuleType):
            return (
                (unpickler.import_module, (obj.__name__,))
                if _should_pickle_by_reference(obj)
                else self._copy_namespace(obj).reduce_module(obj)
            )
        return self._reduce_object(obj)

    def _reduce_object(self, obj: Any) -> Any:
        """Reduce what is no function, class or module."""
        kind = type(obj)
        if kind in self._known_types and (known := self._reduce_known(obj)) is not None:
            return known
        if issubclass(kind, enum.Enum):
            return enums.reduce_member(obj)
        self._note_kind(obj)
        if _is_global(obj):
            return obj.__qualname__
        if getattr(kind, "is_plain_in_jobs", False):
            return unpickler.strip_decorated, obj.__reduce__()
        if _find_wrapped(obj) is not None and _is_made_of_arguments(kind):
            return unpickler.make_bare, (kind,), vars(obj)
        return NotImplemented

    def _reduce_known(self, obj: Any) -> Any:
        """Reduce what the script has imported by name, and what only `__main__` has by a name."""
        if id(obj) in self._script.imported:
            return self._script.imported[id(obj)].__reduce__()
        name = obj.__reduce_ex__(4) if id(obj) in self._script.singletons else None
        if not isinstance(name, str) or self._script.namespace.get(name) is not obj:
            return name
        state = self._globals, name, dict(getattr(obj, "__dict__", {}))
        return unpickler.make_bare, (type(obj),), state, None, None, unpickler.bind

    def _note_kind(self, obj: object) -> None:
        """Remember a kind that needs no decision again, or what arrives as something else."""
        if type(obj) not in (memoryview, TextIOWrapper):
            is_asked_again = callable(obj) or type(obj) in self._known_types
            self._plain_types |= set() if is_asked_again else {type(obj)}
            return
        if isinstance(obj, memoryview):
            words = "a memoryview is bytes on its hosts: what they write to it stays there"
        elif obj in (sys.stdout, sys.stderr):
            return
        else:
            words = (
                f"the open file {getattr(obj, 'name', '')!r} is its content on its hosts, an "
                "io.StringIO: send its path, or kinetic.Data, if they are to have the file"
            )
        self.changes = tuple(dict.fromkeys((*self.changes, f"Of what the function gets, {words}.")))

    def _reduce_defined(self, obj: Any, found: Definition) -> Any:
        needs_unfinished = any(
            id(self._script.namespace[name]) in self._seen for name in found.needed
        )
        # Reached again before it is finished.
        if id(obj) in self._begun or needs_unfinished:
            raise Circular(obj)
        self._begun.add(id(obj))
        bases = self._script.find_bases(obj)
        return (
            unpickler.define,
            self._define_args(obj.__name__, found, self._script.find_kept_defaults(obj) | bases),
            (
                self._globals,
                self._list_named(found, of_script=True) | self._values((*found.used, *bases)),
                self._select(self._script.find_changes(obj)),
                self._script.find_defaults(obj),
            ),
            None,
            None,
            unpickler.use,
        )

    def _select(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Leave to the statement what holds functions, which it may have made, and cannot be
        sent."""
        return {
            name: value
            for name, value in changes.items()
            if not (hasattr(value, "__code__") or hasattr(value, "__dict__"))
            or self.can_be_sent(value)
        }

    @property
    def _globals(self) -> Any:
        return self.globals_ref[id(self._script.namespace)]

    def _list_named(self, found: Definition, *, of_script: bool) -> dict[str, Any]:
        """Return what annotations name: classes of the script, which are there later, or the
        rest."""
        named = self._list_annotating(found.annotating, self._script.namespace)
        return {
            name: value
            for name, value in named.items()
            if (isinstance(value, type) and value.__module__ in MAIN) is of_script
        }

    def _values(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._script.namespace[name] for name in names}

    def dump_more(self, arguments: object, file: BinaryIO) -> CallPickler:
        """Write what the same unpickler loads after this pickle; this pickler's memo does not
        change. Return the pickler that wrote it.

        What both hold (classes, globals, objects) is shared, as in a single pickle.
        """
        pickler = self._make_another(file)
        pickler.memo = self.memo
        pickler.globals_ref = dict(self.globals_ref)
        pickler.cells = dict(self.cells)
        pickler.carries_functions = self.carries_functions
        pickler.dump(arguments)
        return pickler

    def _make_another(self, file: BinaryIO) -> CallPickler:
        return CallPickler(file, self._script, self._rebuilt)

    def is_registered_there(self, made: type) -> bool:
        """Whether a statement that is executed again registers a class with JAX."""
        return id(made) in self._script.registered

    def dump_registrations(self, modules: Sequence[str], objects: Sequence[object]) -> None:
        """Write what registers something on the host, whether the call uses it or not.

        Args:
            modules: names of modules to import, as the script has imported them.
            objects: what else the host needs first, such as classes and functions of the script.
        """
        statements = [
            CallOnLoad(unpickler.define, self._define_args("", each))
            for each in self._script.registrations()
        ]
        self.dump(
            [CallOnLoad(unpickler.import_if_possible, (tuple(modules),)), *objects, *statements]
        )

    def _define_args(
        self, name: str, found: Definition, given: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        named = self._list_named(found, of_script=False)
        needed = named | self._values(found.needed) | (given or {})
        return (
            self._globals,
            name,
            found,
            needed,
            _find_imported_submodules(found.code(), needed.values()),
        )

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Send globals as well that only the body of a class in the function uses, or annotations
        that are text: cloudpickle finds those that functions use."""
        if (module := find_copied(func)) is not None:
            self._copy_namespace(module)
        make, args, (attributes, slots), *rest = super()._dynamic_function_reduce(func)
        more = {
            name: func.__globals__[name]
            for name in global_names(func.__code__)
            if name in func.__globals__
        }
        found = slots["__globals__"]
        here = self._list_annotating(find_names(read_annotations(func)), func.__globals__)
        return make, args, (attributes, slots | {"__globals__": here | found | more}), *rest

    def _complete_class(self, made: type, reduced: Any) -> Any:
        """Have a class of the script find what its annotations name."""
        reduced = class_bodies.complete(made, reduced)
        text = read_annotations(made) if made.__module__ in MAIN else {}
        names = self._list_annotating(find_names(text), self._script.namespace)
        if not names or not isinstance(reduced, tuple):
            return reduced
        make, parts, state, items, pairs, set_state = reduced
        named = set_state, state, self._globals, names
        return make, parts, named, items, pairs, unpickler.complete_class

    def _list_annotating(
        self, names: Iterable[str], namespace: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what names in annotations stand for, so that hosts can evaluate those that are
        text. Nothing fails because of it: what cannot be sent, or is nowhere there, is left out,
        and so is what only looks like a name, such as the axes of an array."""
        found: dict[str, Any] = {}
        for name in names:
            value = namespace.get(name)
            if not _annotates(value):
                continue
            if (place := _place_of(value)) is not None:
                found[name] = _IfPossible(place)
            elif self.can_be_sent(value, at_most_bytes=_ANNOTATION_BYTES):
                found[name] = value
        return found

    def _copy_namespace(self, module: ModuleType) -> Any:
        return self.globals_ref.setdefault(id(vars(module)), CopiedNamespace(module))

    def _in_module(self, func: FunctionType, module: ModuleType) -> Any:
        # Another function of it, which needs no more than some values, may have been first.
        if not isinstance(self.globals_ref.get(id(func.__globals__)), ModuleNamespace):
            self.globals_ref[id(func.__globals__)] = ModuleNamespace(module.__name__)
        make, args, (attributes, slots), *rest = self._dynamic_function_reduce(func)
        return make, args, (attributes, slots | {"__globals__": {}}), *rest


class ExternalObjectPickler(CallPickler):
    """Leaves the objects of one class out wherever they occur: they are sent beside the pickle,
    which holds their numbers. Of lists and dicts that the script has imported by name it sends
    where they are. A separate class, because `persistent_id` runs for every object.

    Args:
        file, script, rebuilt: as of `CallPickler`.
        kind: the class; () for none.
        before: objects that have numbers already.
    """

    def __init__(
        self,
        file: BinaryIO,
        script: Script,
        rebuilt: frozenset[int],
        kind: type | tuple[()],
        before: Sequence[object] = (),
    ) -> None:
        super().__init__(file, script, rebuilt)
        self._kind = kind
        self._replaced = (kind, CONTAINERS) if script.imports_containers else kind
        self._number = {id(obj): number for number, obj in enumerate(before)}
        self._left_out = list(before)

    @property
    def external(self) -> tuple[object, ...]:  # type: ignore[override]
        """The objects that were left out, each once, by number."""
        return tuple(self._left_out)

    def persistent_id(self, obj: Any) -> int | ImportedValue | None:
        """Return the number of an object that is left out, or what stands for an imported
        container; None for all others."""
        if not issubclass(type(obj), self._replaced):
            return None
        if not issubclass(type(obj), self._kind):
            return self._script.imported.get(id(obj))
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self._left_out)
            self._left_out.append(obj)  # keeps its id from being reused
        return self._number[id(obj)]

    def _make_another(self, file: BinaryIO) -> CallPickler:
        return ExternalObjectPickler(file, self._script, self._rebuilt, self._kind, self._left_out)


def make_pickler(
    file: BinaryIO, script: Script, rebuilt: frozenset[int], external: type | None = None
) -> CallPickler:
    """Return what pickles a call: the plain class, which is faster, if it will do."""
    if external is None and not script.imports_containers:
        return CallPickler(file, script, rebuilt)
    return ExternalObjectPickler(file, script, rebuilt, external or ())


class _IfPossible:
    """A module or a class that a host may lack."""

    def __init__(self, place: tuple[str, str]) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return unpickler.find_if_possible, self._place


def _annotates(value: object) -> bool:
    """Whether this may be part of an annotation; an array or a container only has a name that
    stands there, too."""
    is_plain = value is not None and not hasattr(type(value), "__len__")
    return is_plain or isinstance(value, type)


def _place_of(value: object) -> tuple[str, str] | None:
    """Return where hosts find a module or a class, if they have it."""
    if isinstance(value, ModuleType):
        return (value.__name__, "") if _should_pickle_by_reference(value) else None
    if not isinstance(value, type) or value.__module__ in MAIN:
        return None
    is_there = _should_pickle_by_reference(value)
    return (value.__module__, value.__qualname__) if is_there else find_renamed(value)


def _is_of_script(value: object) -> bool:
    """Whether this is a function of the script, or an object of one of its classes."""
    return (value if isinstance(value, FunctionType) else type(value)).__module__ in MAIN


def _locate(obj: Any) -> tuple[str, str, int] | None:
    """Return module, name and number of decorators under which the host finds a function or class;
    None when it does not."""
    module = obj.__module__ or ""
    if module not in sys.modules or module in MAIN or is_by_value(module):
        return None
    found = find_named(obj.__module__, obj.__qualname__)
    for depth in range(_DEEPEST):
        if found is obj:
            return obj.__module__, obj.__qualname__, depth
        found = _find_wrapped(found)
        if found is None:
            break
    renamed = find_renamed(obj) if isinstance(obj, type) else None
    return None if renamed is None else (*renamed, 0)


def _is_global(obj: Any) -> bool:
    """Whether a decorated function (jitted, cached) is what its module has
    under the function's name."""
    if _find_wrapped(obj) is None:
        return False
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(qualname, str)
        or module in MAIN
        or is_by_value(module)
    ):
        return False
    return find_named(module, qualname) is obj


def _is_made_of_arguments(kind: type) -> bool:
    """Whether pickle would create an object without the arguments that its `__new__` needs, as for
    `jax.custom_vjp`."""
    methods = ("__reduce_ex__", "__reduce__", "__getstate__")
    return isinstance(kind.__new__, FunctionType) and all(
        getattr(kind, name) is getattr(object, name, None) for name in methods
    )


def _find_wrapped(obj: Any) -> Any:
    """Return what a decorator has wrapped, without running the object's code."""
    try:
        fields = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return fields.get("__wrapped__") if type(fields) is dict else None
