"""Pack a call into bytes to send to a host, and rebuild the call there.

cloudpickle is imported only when a call is packed or unpacked.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import field, replace
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kinetic._core.plan import Versions
from kinetic._core.values import dataclass
from kinetic._pickling import envelope
from kinetic._pickling.envelope import Header
from kinetic.errors import CorruptRecord, SetupFailed

if TYPE_CHECKING:
    from kinetic._pickling.modules import Shipped
    from kinetic._pickling.pickler import CallPickler


@dataclass(frozen=True)
class Packed:
    """A call as bytes.

    Attributes:
        data: Header line and pickle.
        digest: SHA-256 of `data`, 64 hex digits.
        size_bytes: Length of `data`.
        versions: Versions of the software that made it.
        warnings: Warnings for the caller, one sentence each.
        parts: Function that pickles each part alone; returns names and sizes, largest first.
        external: Objects that are not in `data`; it has their indices in this tuple instead.
    """

    data: bytes
    digest: str
    size_bytes: int
    versions: Versions
    warnings: tuple[str, ...] = ()
    parts: Callable[[], Sequence[tuple[str, int]]] = field(default=tuple, repr=False, compare=False)
    external: tuple[object, ...] = field(default=(), repr=False, compare=False)


def pack(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    env_vars: Mapping[str, str],
    shipped: Shipped | None = None,
    external: type | None = None,
) -> Packed:
    """Pickle a call. Code that the host can import is sent by name, all other code by value.

    Args:
        func: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        env_vars: Variables to set before the call.
        shipped: The modules that the host can import; None if it can import every module of this
            process.
        external: Class of objects to leave out, which go to `Packed.external`; None for none.

    Raises:
        PicklingError: A part of the call cannot be pickled; the error names it.
    """
    call = (func, tuple(args), dict(kwargs))
    process = _CallerState(func, shipped, external)
    return process.make_record(
        lambda: _pack_record("call", lambda file: process.dump(file, call), env_vars), call
    )


def find_instances(
    kind: type,
    func: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> tuple[object, ...]:
    """Return the objects of class `kind` in the arguments of the calls, or in the globals and
    closures of the function, at any depth.

    The calls are pickled to find them, and the bytes discarded. If a call cannot be pickled, the
    result is empty; `pack` reports the error.
    """
    process = _CallerState(func, None, kind)
    objects: dict[int, object] = {}
    with process.by_value(), suppress(Exception):
        function = process.dump(_NullFile(), func, with_setup=False)
        objects |= {id(obj): obj for obj in function.external}
        for args, kwargs in calls:
            with suppress(Exception):
                pickler = function.dump_more((tuple(args), dict(kwargs)), _NullFile())
                objects |= {id(obj): obj for obj in pickler.external}
    return tuple(objects.values())


class _NullFile(io.BytesIO):
    """A file that discards what is written."""

    def write(self, data: Any) -> int:
        return len(data)


class _CallerState:
    """The caller's loaded modules and registrations, sorted into those to pickle and to import."""

    def __init__(self, func: object, shipped: Shipped | None, external: type | None = None) -> None:
        from kinetic._pickling import module_values, modules, origin

        loaded = modules.LoadedModules() if shipped is None else modules.classify(shipped)
        self._namespace = origin.find_namespace(func)
        self._external = external
        # In processes that multiprocessing spawns, the script is this module.
        spawned = sys.modules.get("__mp_main__")
        self._modules = loaded.by_value
        if spawned is not None and spawned.__name__ == "__mp_main__":
            self._modules += (spawned,)
        self._imported = frozenset(loaded.imported)
        self._warnings = (
            *loaded.warn_of_edited(),
            *module_values.list_changes(func, loaded.imported),
        )

    def make_record(
        self,
        make: Callable[[], Packed],
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    ) -> Packed:
        """Call `make` and add warnings about edited modules and changed values to its result.

        Raises:
            PicklingError: A part of the call cannot be pickled; the error names it.
        """
        try:
            with self.by_value():
                packed = make()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - pickling runs the objects' own code, which may raise anything
            self._blame(call, error)
        return replace(packed, warnings=self._warnings, parts=lambda: self.list_parts(call))

    def list_parts(
        self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    ) -> list[tuple[str, int]]:
        """Return the parts of a call and their sizes in bytes, largest first."""
        from kinetic._pickling import diagnosis

        def size(value: object) -> int:
            file = io.BytesIO()
            # A part alone may not be picklable: measure the bytes until the error.
            with suppress(Exception, SystemExit):
                self.dump(file, value, with_setup=False)
            return file.tell()

        with self.by_value():
            return diagnosis.measure_call(*call, size)

    def by_value(self) -> AbstractContextManager[None]:
        """Return a context in which modules that hosts lack are pickled by value."""
        import cloudpickle

        from kinetic._pickling import modules

        return modules.by_value(self._modules, cloudpickle)

    def dump(self, file: io.BytesIO, call: object, *, with_setup: bool = True) -> CallPickler:
        """Pickle the libraries' registrations and settings, then the call, and return the pickler.

        A host applies registrations and settings before it loads the call. Without `with_setup`,
        only the call is pickled.
        """
        from kinetic._pickling import library_settings
        from kinetic._pickling.pickler import make_pickler

        pickler = make_pickler(file, self._namespace, self._external)
        if with_setup:
            modules, registered = self._registered
            pickler.dump_setup(modules, library_settings.read(), registered)
        pickler.dump(call)
        return pickler

    @functools.cached_property
    def _registered(self) -> tuple[list[str], list[Any]]:
        """Modules that the host must import because they register objects with libraries, and the
        registered objects that are sent by value."""
        from kinetic._pickling import registries
        from kinetic._pickling.code_pickler import find_named, is_by_value
        from kinetic._pickling.origin import MAIN

        modules: dict[str, None] = {}
        own: list[Any] = []
        for obj in registries.list_registered():
            module, qualname = (getattr(obj, n, "") for n in ("__module__", "__qualname__"))
            if module in self._imported:
                modules[module] = None
            elif module in MAIN:
                # Skip a class that the script has since defined anew: only JAX still refers to it.
                is_current = self._namespace.get(qualname) is obj
                own += [obj] if is_current or isinstance(obj, FunctionType) else []
            elif is_by_value(module) and find_named(module, qualname) is obj:
                own.append(obj)
        return list(modules), [obj for obj in own if not self.attempt(obj)]

    def attempt(self, value: object) -> BaseException | None:
        """Return the error that pickling the value raises, or None."""
        try:
            self.dump(io.BytesIO(), value, with_setup=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            return error
        return None

    def _blame(
        self, call: tuple[Any, tuple[Any, ...], dict[str, Any]], error: BaseException
    ) -> NoReturn:
        """Raise an error that names the part that cannot be pickled."""
        from kinetic._pickling import diagnosis

        with self.by_value():
            culprit = diagnosis.diagnose_call(*call, attempt=self.attempt)
        raise culprit.as_error(error) from error.with_traceback(
            _skip_own_frames(error.__traceback__)
        )


def _skip_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the leading frames of kinetic and cloudpickle, so that the traceback starts in the
    user's code, if it has any."""
    import cloudpickle

    from kinetic._pickling import pickler

    own = (__file__, envelope.__file__, pickler.__file__)
    leading = (*own, *(f"{folder}/" for folder in cloudpickle.__path__))
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(leading):
        traceback = traceback.tb_next
    return traceback


def _pack_record(
    kind: str,
    dump: Callable[[io.BytesIO], CallPickler],
    env_vars: Mapping[str, str],
    *,
    function: str = "",
) -> Packed:
    used: list[CallPickler] = []
    data = envelope.frame_record(
        kind, lambda file: used.append(dump(file)), env_vars, function=function
    )
    digest = hashlib.sha256(data).hexdigest()
    versions = envelope.read_versions()
    return Packed(data, digest, len(data), versions, external=used[0].external)


class BatchPickler:
    """Pickles calls of one function. The function is pickled once, into a separate record. Each
    call's record has the arguments and the digest of that record.

    Attributes:
        function: The function's record.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        env_vars: Mapping[str, str],
        shipped: Shipped | None = None,
        external: type | None = None,
    ) -> None:
        """Pickle the function; see `pack` for the arguments.

        Raises:
            PicklingError: A part of the function cannot be pickled; the error names it.
        """
        self._func, self._env_vars, self._shipped = func, env_vars, shipped
        self._external = external
        self._process = _CallerState(func, shipped, external)

        def dump(file: io.BytesIO) -> CallPickler:
            self._pickler = self._process.dump(file, func)
            return self._pickler

        self.function = self._process.make_record(
            lambda: _pack_record("function", dump, {}), (func, (), {})
        )

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        """Pickle one call.

        Raises:
            PicklingError: An argument cannot be pickled; the error names it.
        """
        arguments = (tuple(args), dict(kwargs))
        try:
            with self._process.by_value():
                dump = functools.partial(self._pickler.dump_more, arguments)
                packed = _pack_record("call", dump, self._env_vars, function=self.function.digest)
        except (Exception, SystemExit):  # noqa: BLE001 - pickling runs the objects' own code; `pack` finds out which part fails
            return pack(
                self._func,
                args,
                kwargs,
                env_vars=self._env_vars,
                shipped=self._shipped,
                external=self._external,
            )
        return replace(packed, parts=lambda: self._process.list_parts((self._func, *arguments)))


class LoadedFunction(NamedTuple):
    """A function that was rebuilt from its record, and the objects to which the records of its
    calls refer, by their numbers in the pickle."""

    func: Callable[..., Any]
    memo: Sequence[Any]


def unpack(
    data: bytes,
    function: bytes = b"",
    *,
    main: dict[str, Any] | None = None,
    source_map: tuple[str, str] | None = None,
    external: Sequence[object] = (),
    when_imported: Callable[[str, Callable[[], object]], object] = lambda _, act: act(),
    loaded: MutableMapping[str, LoadedFunction] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Rebuild a call.

    Args:
        data: The record of the call.
        function: The record of the function, for a call of a batch.
        main: Globals for the script's functions, those of `__main__`; None for a new dict.
        source_map: (folder on the caller, folder on this host): file names of code are moved
            from the first to the second.
        external: Objects that replace those left out of the pickle.
        when_imported: Takes a module's name and a function, and calls the function once the module
            is imported; used to apply the caller's settings of libraries.
        loaded: Functions that this process has rebuilt before, by the digests of their records. A
            function in it is not rebuilt; a new one is added.

    Raises:
        CorruptRecord: The bytes are damaged.
        SetupFailed: This process cannot rebuild the call: another Python, or a missing module.
    """
    header = envelope.verify_record(data, "call")
    versions = envelope.read_versions()
    if header.versions.python != versions.python:
        # Byte code of another version of Python, such as 3.12, would crash the process.
        theirs, ours = header.versions.python, versions.python
        raise SetupFailed(
            f"The call was made with Python {theirs}, but this host runs {ours}. Submit it with "
            f"Python {ours}, or use an image with Python {theirs}."
        )
    body = memoryview(data)[header.body_offset :]
    function_body = _read_function_body(header, function)
    earlier = (loaded or {}).get(header.function_digest)
    try:
        from kinetic._pickling.unpickler import CallUnpickler, write_memo

        settings: Sequence[Any] = ()
        if earlier is not None:
            whole = io.BytesIO(b"".join((write_memo(len(earlier.memo)), body)))
            reader = CallUnpickler(whole, main, source_map, external, earlier.memo)
            reader.load()
            func = earlier.func
            args, kwargs = reader.load()
        elif function_body is None:
            reader = CallUnpickler(io.BytesIO(body), main, source_map, external)
            _, settings, _ = reader.load()
            func, args, kwargs = reader.load()
        else:
            whole = io.BytesIO(b"".join((function_body, body)))
            reader = CallUnpickler(whole, main, source_map, external)
            _, settings, _ = reader.load()
            func = reader.load()
            if loaded is not None and not external:
                memo = reader.memo.copy()
                loaded[header.function_digest] = LoadedFunction(
                    func, [memo[index] for index in range(len(memo))]
                )
            args, kwargs = reader.load()
        for state in settings:
            when_imported(state.library, state.apply)  # Imports may have set up logging.
    except BaseException as error:  # Unpickling imports and runs the user's modules.
        why = envelope.explain_failure(error, header.versions, versions)
        raise SetupFailed(f"The function cannot be unpickled on this host: {why}") from error
    return func, args, kwargs


def _read_function_body(header: Header, function: bytes) -> memoryview | None:
    if not header.function_digest:
        return None
    if hashlib.sha256(function).hexdigest() != header.function_digest:
        raise CorruptRecord(
            "The stored function is damaged: its bytes differ from those that were written. Submit "
            "the job again."
        )
    return memoryview(function)[envelope.read_header(function).body_offset :]
