"""Unpickling a call on a host: the script's functions get the host's `__main__`, and code objects
name files of the host's tree.

In: bytes of a pickle that `pickler` made. Out: the value.

Code objects carry the name of the file that they were compiled from on the caller's machine, which
does not exist on a host: a debugger would find no breakpoint there, and a traceback no line to
show.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import pickle
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO, NewType, NoReturn

from kinetic._core.tracebacks import own_frames_hidden
from kinetic._core.values import dataclass
from kinetic._pickling import defaults
from kinetic._pickling.origin import MAIN, map_path
from kinetic.errors import SetupFailed, UsageError


def _without_hooks(
    make: Callable[..., type], metaclass: Any, name: str, bases: tuple[type, ...], *rest: Any
) -> type:
    """Make an empty class without running the script's hooks: that has happened,
    and their effects were sent."""
    if getattr(metaclass, "__module__", None) in MAIN:
        foreign = next(each for each in metaclass.__mro__ if each.__module__ not in MAIN)
        kind, metaclass = (
            metaclass,
            lambda name, bases, fields: foreign.__new__(kind, name, bases, fields),
        )
    base: Any = bases[0] if bases and bases[0].__module__ in MAIN else None
    if base is None:
        return make(metaclass, name, bases, *rest)
    hook = vars(base).get("__init_subclass__")
    base.__init_subclass__ = classmethod(lambda cls: None)
    try:
        return make(metaclass, name, bases, *rest)
    finally:
        if hook is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = hook


@dataclass(frozen=True)
class Definition:
    """A statement of a script that can be executed again.

    Attributes:
        source: the statement, on lines of its own.
        file: where it comes from.
        line: its first line there, from 1.
        flags: of the compiler.
        needed: globals that the statement itself needs.
        used: globals that what it defines needs later.
        annotating: names in its annotations, also of those that are text.
        binds: whether the script has what it defines under its name; else that name is another's.
        given: globals that have defaults of its fields, which it does not compute again.
    """

    source: str
    file: str
    line: int
    flags: int
    needed: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    annotating: tuple[str, ...] = ()
    binds: bool = True
    given: tuple[str, ...] = ()

    def code(self) -> CodeType:
        """Compile the statement; its lines have the numbers that they have in the file."""
        made_of: Any = "\n" * (self.line - 1) + self.source
        if self.given:
            from kinetic._pickling import given  # few statements are changed

            made_of = given.put_defaults(made_of, self.given)
        code: CodeType = compile(made_of, self.file, "exec", self.flags, dont_inherit=True)
        return code


def define(
    namespace: dict[str, Any],
    name: str,
    found: Definition,
    needed: Mapping[str, Any],
    submodules: object,
) -> Any:
    """Execute a statement of a script; return what it has defined.

    Args:
        namespace: the globals of `__main__`.
        name: what is defined; "" for a statement that defines nothing.
        found: the statement.
        needed: the globals that it needs.
        submodules: modules that it uses as attributes of others; unpickling them has imported them.
    """
    namespace.update(needed)
    before = namespace.get(name, namespace)
    try:
        exec(found.code(), namespace)
    except ValueError as error:
        is_call = not name and not found.source.startswith("for ")
        if not is_call or "uplicate" not in str(error):
            raise  # What a statement registers may be registered already.
    for each in found.given:
        del namespace[each]
    made = namespace.get(name)
    if not found.binds and namespace.pop(name, None) is not None and before is not namespace:
        namespace[name] = before
    return made


_State = tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Any], defaults.Defaults]


def use(made: Any, state: _State) -> None:
    """Give a definition the globals that it needs when it runs, and a class the attributes that
    it had.

    Both may need the definition itself.
    """
    namespace, names, attributes, known_defaults = state
    namespace.update(names)
    for name, value in attributes.items():
        type.__setattr__(made, name, value)
    if known_defaults:
        defaults.restore(made, known_defaults)


def complete_class(
    made: Any, state: tuple[Callable[[Any, Any], Any], Any, dict[str, Any], Mapping[str, Any]]
) -> None:
    """Give a class its state, and the script what its annotations name."""
    set_state, own, namespace, names = state
    namespace.update(names)
    set_state(made, own)


def script_namespace(package: str | None, file: str | None) -> dict[str, Any]:
    """Return a namespace for the functions of a script; a host's unpickler gives its `__main__`
    instead."""
    file_entry = {} if file is None else {"__file__": file}
    return {
        "__name__": "__main__",
        "__package__": package,
        "__builtins__": __builtins__,
    } | file_entry


def module_namespace(name: str) -> dict[str, Any]:
    """Return the globals of a module."""
    return vars(import_module(name))


def take(made: Any) -> Any:
    """Return what was made before."""
    return made


def fill_module(module: ModuleType, content: Mapping[str, Any]) -> None:
    """Give a module what is in it; functions of it, which may be there already, see that."""
    vars(module).update(content)


def import_module(name: str) -> ModuleType:
    """Import a module by its full name, as pickle does."""
    __import__(name)
    return sys.modules[name]


def import_if_possible(modules: Sequence[str]) -> None:
    """Import modules that the function may not need; those that cannot be imported here are
    skipped."""
    for name in modules:
        with contextlib.suppress(Exception):
            import_module(name)


def find_if_possible(module: str, qualname: str) -> Any:
    """Return a module, or what it has under a name; None where this host does not have it."""
    with contextlib.suppress(Exception):
        found = import_module(module)
        return follow_path(found, qualname) if qualname else found
    return None


def follow_path(found: Any, path: str) -> Any:
    """Return the attribute that a path with dots leads to."""
    for name in path.split("."):
        found = getattr(found, name)
    return found


def cached_property(
    function: Callable[[Any], Any], name: str | None
) -> functools.cached_property[Any]:
    """Return a `functools.cached_property` that knows its name."""
    made: functools.cached_property[Any] = functools.cached_property(function)
    made.attrname = name
    return made


def lru_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def new_type(name: str, of: Any, module: str) -> Any:
    """Return a `typing.NewType` of a script."""
    make: Any = NewType
    made = make(name, of)
    made.__module__ = module
    return made


def type_alias(name: str, module: str, held: list[Any]) -> Any:
    """Return what `type name = …` makes; its value is what the list will hold."""
    namespace: dict[str, Any] = {"__name__": module, "held": held}
    exec(f"type {name} = held[0]", namespace)
    return namespace[name]


def fill_alias(made: object, state: tuple[list[Any], Any]) -> None:
    """Give a type alias its value."""
    held, value = state
    held.append(value)


def generic_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Return what `type name[…] = …` makes."""
    make: Any = getattr(typing, "TypeAliasType", None)  # from Python 3.12 on
    return make(name, value, type_params=parameters)


def register_pytree(made: type, how: str, *given: Any) -> None:
    """Have JAX take a class apart as it did where it came from, unless it does already.

    Args:
        made: the class.
        how: the name of the function of JAX that registers it.
        given: its other arguments; text is the name of a function of the class.
    """
    register = find_if_possible("jax.tree_util", how)
    if register is not None:
        with contextlib.suppress(ValueError):
            register(made, *(_own_function(made, x) if isinstance(x, str) else x for x in given))


def _own_function(of: type, name: str) -> Callable[..., Any]:
    """Return a function that calls one of a class, which it may not have yet."""

    def call(*args: Any) -> Any:
        return getattr(of, name)(*args)

    return call


def make_bare(kind: type) -> Any:
    """Return an object without attributes; they are set next."""
    return object.__new__(kind)


def bind(made: Any, state: tuple[dict[str, Any], str, Mapping[str, Any]]) -> None:
    """Give an object its attributes, and have the script's globals name it."""
    namespace, name, attributes = state
    namespace[name] = made
    if attributes:
        vars(made).update(attributes)


def find_undecorated(module: str, qualname: str, depth: int) -> Any:
    """Return a function of a module from under `depth` decorators."""
    found = follow_path(import_module(module), qualname)
    for _ in range(depth):
        found = found.__wrapped__
    return found


_waiting: list[tuple[str, str, Any]] = []
"""What was made in place of a module's own object: module, path, object."""


def find_changed(module: str, path: str, kind: Any) -> Any:
    """Return what a module has at a path, which is filled next. An empty object of this class comes
    in its place if it is another one, or if the module is not imported yet."""
    if kind is object:  # It may be compared with what the module's functions have.
        with contextlib.suppress(Exception, SystemExit):  # A module may parse a command line.
            import_module(module)
    with contextlib.suppress(KeyError, AttributeError):
        found = follow_path(sys.modules[module], path)
        if type(found) is kind:
            return found
    made = kind.__new__(kind)
    _waiting.append((module, path, made))
    return made


def settle(when_imported: Callable[[str, Callable[[], object]], object]) -> None:
    """Have modules see what was made in place of their objects, once they are imported."""
    while _waiting:
        module, path, made = _waiting.pop()
        when_imported(module, functools.partial(_put, module, path, made))


def _put(module: str, path: str, made: Any) -> None:
    if module in sys.modules and "." not in path:
        before = vars(sys.modules[module]).get(path)
        if type(before) is type(made) and type(made) is not object:  # Others may have it, too.
            fill(before, made if isinstance(made, _CONTAINERS) else vars(made))
        setattr(sys.modules[module], path, made)


_CONTAINERS = (dict, list, set, bytearray)


def fill(found: Any, content: Any) -> None:
    """Replace what an object holds."""
    if isinstance(found, list | bytearray):
        found[:] = content
        return
    held = found if isinstance(found, dict | set) else vars(found)
    held.clear()
    held.update(content)


_OF_THE_CALLER = ("run_async", "run_async_map", "with_options", "plan", "aio")


def strip_decorated(pick: Callable[[Any], Any], args: tuple[Any, ...]) -> Any:
    """Return the plain function of a decorated one; what else its caller has says why it is not
    here."""
    func = pick(*args)
    name = getattr(func, "__name__", "it")
    here = {each: functools.partial(_refuse, each, name) for each in _OF_THE_CALLER}
    for each, value in (here | {"local": func}).items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(func, each, value)
    return func


def _refuse(what: str, name: str, *args: object, **kwargs: object) -> NoReturn:
    with own_frames_hidden:
        raise UsageError(
            f"{name}.{what} is of the script that submits jobs: a job cannot submit other jobs. In "
            f"a job, {name}(...) runs the function right there, on this host."
        )


class CallUnpickler(pickle.Unpickler):
    """An unpickler of calls.

    Args:
        file: the pickle.
        main: globals of `__main__` for the functions of a script; None for a namespace of their
            own.
        source_map: (folder there, folder here): code from a file below the first names the one
            below the second.
        external: what stands here for each object that was left out of the pickle.
    """

    def __init__(
        self,
        file: BinaryIO,
        main: dict[str, Any] | None = None,
        source_map: tuple[str, str] | None = None,
        external: Sequence[object] = (),
    ) -> None:
        super().__init__(file)
        self._external = external
        self._main = main
        self._source_map = source_map

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global of the pickle."""
        found = super().find_class(module, name)
        if module == __name__ and name == "script_namespace" and self._main is not None:
            return self._namespace
        if self._source_map and module == __name__ and name == "define":
            return lambda namespace, what, statement, *rest: found(
                namespace,
                what,
                dataclasses.replace(statement, file=map_path(statement.file, self._source_map)),
                *rest,
            )
        if not module.startswith("cloudpickle"):
            return found
        if name == "_make_skeleton_class":
            return lambda *parts: self._bind_class(_without_hooks(found, *parts))
        if name == "_make_skeleton_enum":
            return lambda *parts: self._bind_class(found(*parts))
        if name == "_make_function":
            return lambda code, *parts: self._bind_function(found(code, *parts), code)
        if self._source_map and name == "_builtin_type":
            return lambda kind: self._code if kind == "CodeType" else found(kind)
        return found

    def _bind_class(self, made: type) -> type:
        """Let the host's `__main__` have a class of the script under its name, so that what the
        function pickles can name it."""
        if made.__module__ in MAIN:
            self._bind_name(made.__qualname__, made)
        return made

    def _bind_function(self, made: FunctionType, code: CodeType) -> FunctionType:
        if made.__globals__ is self._main and made.__name__ == code.co_name:
            self._bind_name(code.co_qualname, made)
        return made

    def _bind_name(self, name: str, made: object) -> None:
        if self._main is not None and name.isidentifier() and not hasattr(builtins, name):
            self._main.setdefault(name, made)

    def persistent_load(self, pid: Any) -> object:
        """Return what stands for an object that was left out of the pickle, or one that was found
        in a module."""
        if not isinstance(pid, int):
            return pid
        if not 0 <= pid < len(self._external):
            raise SetupFailed(
                f"The call needs its data {pid}, which is not on this host. Submit the job again."
            )
        return self._external[pid]

    def _namespace(self, package: str | None, file: str | None) -> dict[str, Any]:
        assert self._main is not None
        self._main["__package__"] = package
        if file is not None:
            self._main["__file__"] = map_path(file, self._source_map)
        return self._main

    def _code(self, *parts: Any) -> CodeType:
        code = CodeType(*parts)
        return code.replace(co_filename=map_path(code.co_filename, self._source_map))
