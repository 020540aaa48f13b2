"""How a call is pickled: cloudpickle, except that what the host can import is not duplicated there.

In: live objects, and the globals of the script they come from. Out: a pickle, for `CallUnpickler`.

cloudpickle pickles by reference only what it finds under its own name. Here also:

- the function under a decorator (`module.train` is a `RemoteCallable`, a jitted function, a cache):
  by its path;
- a function made by a function of a module (a closure): it gets the globals of that module, not a
  copy of some of them;
- functions of `__main__` share one namespace on the host: its `__main__`;
- `os.environ`, which may hold secrets, and the hidden generators of `random` and NumPy, of which
  copies would draw the same numbers in each call: those of the host.

Classes and functions of `__main__` travel by their parts. Nothing of a script is executed again;
`dump_setup` writes what registers them with libraries.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

from kinetic._pickling import enums, registries, unpickler, upstream
from kinetic._pickling.code_pickler import CodePickler, find_named, find_renamed, is_by_value
from kinetic._pickling.namespaces import (
    CopiedNamespace,
    ModuleNamespace,
    ScriptNamespace,
    find_needed_module,
    find_own,
)
from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import MOST_DECORATORS, find_wrapped, list_globals

_OF_HOSTS = (("os", "environ"), ("random", "_inst"), ("numpy.random.mtrand", "_rand"))
"""Values that are the host's own, by module and name."""


class CallOnLoad:
    """A function call that happens when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


class CallPickler(CodePickler):
    """Pickles calls.

    Args:
        file: where to write.
        namespace: the globals of the script.

    Attributes:
        external: what was left out of the pickle; see `ExternalObjectPickler`.
        changes: what arrives as something else, in sentences.
    """

    external: tuple[object, ...] = ()
    sends_functions = True

    def __init__(self, file: BinaryIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        self._namespace = namespace
        self._plain_types: set[type] = set()
        self._of_hosts = {
            id(value): name
            for module, name in _OF_HOSTS
            if (value := getattr(sys.modules.get(module), name, None)) is not None
        }
        self.changes: tuple[str, ...] = ()
        self.globals_ref[id(namespace)] = ScriptNamespace(namespace)

    def reducer_override(self, obj: Any) -> Any:
        """Decide how an object is pickled; called for all but the simplest objects."""
        kind = type(obj)
        if id(obj) in self._of_hosts:
            return self._of_hosts[id(obj)]
        if kind in self._plain_types:
            return NotImplemented
        if issubclass(kind, FunctionType | type):
            if upstream.should_pickle_by_reference(obj):
                return NotImplemented
            location = _locate(obj)
            if location is not None:
                return unpickler.find_undecorated, location
            if isinstance(obj, FunctionType) and (module := find_needed_module(obj)) is not None:
                return self._reduce_in_module(obj, module)
            return super().reducer_override(obj)
        if issubclass(kind, ModuleType):
            if upstream.should_pickle_by_reference(obj):
                return unpickler.import_module, (obj.__name__,)
            return self._copy_namespace(obj).reduce_module(obj)
        return self._reduce_object(obj)

    def _reduce_object(self, obj: Any) -> Any:
        """Reduce what is no function, class or module."""
        kind = type(obj)
        if issubclass(kind, enum.Enum):
            return enums.reduce_member(obj)
        self._note_kind(obj)
        if _is_global(obj):
            return obj.__qualname__
        if getattr(kind, "is_plain_in_jobs", False):
            return unpickler.strip_decorated, obj.__reduce__()
        if find_wrapped(obj) is not None and _is_made_of_arguments(kind):
            return unpickler.make_bare, (kind,), vars(obj)
        return NotImplemented

    def _note_kind(self, obj: object) -> None:
        """Remember a kind that needs no decision again, or what arrives as something else."""
        if type(obj) not in (memoryview, TextIOWrapper):
            self._plain_types |= set() if callable(obj) else {type(obj)}
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

    def dump_setup(
        self, modules: Sequence[str], settings: object, registered: Iterable[Any]
    ) -> None:
        """Write what a host needs before it reads the call, whether the call uses it or not.

        Args:
            modules: names of modules to import.
            settings: what the program has set in libraries.
            registered: classes and functions that libraries know.
        """
        again = [CallOnLoad(registries.register, x, registries.describe(x)) for x in registered]
        self.dump((CallOnLoad(unpickler.import_if_possible, *modules), settings, again))

    def dump_more(self, arguments: object, file: BinaryIO) -> CallPickler:
        """Write what the same unpickler loads after this pickle; this pickler's memo does not
        change. Return the pickler that wrote it.

        What both hold (classes, globals, objects) is shared, as in a single pickle.
        """
        pickler = self._make_another(file)
        pickler.memo = self.memo
        pickler.globals_ref = dict(self.globals_ref)
        pickler.cells = dict(self.cells)
        pickler.dump(arguments)
        return pickler

    def _make_another(self, file: BinaryIO) -> CallPickler:
        return CallPickler(file, self._namespace)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Send globals as well that only the body of a class in the function uses: cloudpickle
        finds those that functions use."""
        module = find_own(func)
        if module is not None and is_by_value(module.__name__):
            self._copy_namespace(module)
        make, args, (attributes, slots), *rest = super()._dynamic_function_reduce(func)
        slots["__globals__"] = list_globals(func) | slots["__globals__"]
        return make, args, (attributes, slots), *rest

    def _copy_namespace(self, module: ModuleType) -> Any:
        return self.globals_ref.setdefault(id(vars(module)), CopiedNamespace(module))

    def _reduce_in_module(self, func: FunctionType, module: ModuleType) -> Any:
        # Another function of it, which needs no more than some values, may have been first.
        if not isinstance(self.globals_ref.get(id(func.__globals__)), ModuleNamespace):
            self.globals_ref[id(func.__globals__)] = ModuleNamespace(module.__name__)
        make, args, (attributes, slots), *rest = self._dynamic_function_reduce(func)
        return make, args, (attributes, slots | {"__globals__": {}}), *rest


class ExternalObjectPickler(CallPickler):
    """Leaves the objects of one class out wherever they occur: they are sent beside the pickle,
    which holds their numbers. A separate class, because `persistent_id` runs for every object.

    Args:
        file, namespace: as of `CallPickler`.
        kind: the class.
        before: objects that have numbers already.
    """

    def __init__(
        self,
        file: BinaryIO,
        namespace: dict[str, Any],
        kind: type,
        before: Sequence[object] = (),
    ) -> None:
        super().__init__(file, namespace)
        self._kind = kind
        self._number = {id(obj): number for number, obj in enumerate(before)}
        self._left_out = list(before)

    @property
    def external(self) -> tuple[object, ...]:  # type: ignore[override]
        """The objects that were left out, each once, by number."""
        return tuple(self._left_out)

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an object that is left out; None for all others."""
        if not issubclass(type(obj), self._kind):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self._left_out)
            self._left_out.append(obj)  # keeps its id from being reused
        return self._number[id(obj)]

    def _make_another(self, file: BinaryIO) -> CallPickler:
        return ExternalObjectPickler(file, self._namespace, self._kind, self._left_out)


def make_pickler(
    file: BinaryIO, namespace: dict[str, Any], external: type | None = None
) -> CallPickler:
    """Return what pickles a call: the plain class, which is faster, if it will do."""
    if external is None:
        return CallPickler(file, namespace)
    return ExternalObjectPickler(file, namespace, external)


def _locate(obj: Any) -> tuple[str, str, int] | None:
    """Return module, name and number of decorators under which the host finds a function or class;
    None when it does not."""
    module = obj.__module__ or ""
    if module not in sys.modules or module in MAIN or is_by_value(module):
        return None
    named = find_named(module, obj.__qualname__)
    for depth in range(MOST_DECORATORS):
        if named is obj:
            return module, obj.__qualname__, depth
        named = find_wrapped(named)
        if named is None:
            break
    renamed = find_renamed(obj) if isinstance(obj, type) else None
    return None if renamed is None else (*renamed, 0)


def _is_global(obj: Any) -> bool:
    """Whether a decorated function (jitted, cached) is what its module has
    under the function's name."""
    if find_wrapped(obj) is None:
        return False
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return False
    return module not in MAIN and not is_by_value(module) and find_named(module, qualname) is obj


def _is_made_of_arguments(kind: type) -> bool:
    """Whether pickle would create an object without the arguments that its `__new__` needs, as for
    `jax.custom_vjp`."""
    methods = ("__reduce_ex__", "__reduce__", "__getstate__")
    return isinstance(kind.__new__, FunctionType) and all(
        getattr(kind, name) is getattr(object, name, None) for name in methods
    )
