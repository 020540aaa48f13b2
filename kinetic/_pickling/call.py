"""Calls as bytes, to be sent to a host.

In: a function and its arguments. Out: bytes that a host turns back into them. cloudpickle is
imported only when something is packed or unpacked.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

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
        data: header line and pickle.
        digest: SHA-256 of `data`, 64 hex digits.
        size_bytes: length of `data`.
        versions: of what made it.
        warnings: for the caller, one sentence each.
        parts: pickles the call's parts again and returns their sizes, largest first.
        external: objects that are not in `data`, which holds their positions here.
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
    """Pickle a call: by reference what the host can import, by value the script itself and other
    modules.

    Args:
        func: the function.
        args: positional arguments.
        kwargs: keyword arguments.
        env_vars: variables to set before the call.
        shipped: what the host can import; None if it can import everything that is imported here.
        external: objects of this class are left out of the pickle; None for none.

    Raises:
        PicklingError: a part of the call cannot be pickled; it is named.
    """
    call = (func, tuple(args), dict(kwargs))
    process = _CallerState(func, shipped, external)
    return process.make_record(
        lambda: _pack_record("call", lambda file: process.dump(file, call), env_vars), call
    )


def instances(
    kind: type,
    func: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> tuple[object, ...]:
    """Return the objects of a class that calls of a function hold, wherever they are:
    in arguments, in what these hold, in what the function uses.

    Pickles everything and keeps nothing. For a call that cannot be pickled the list is empty;
    `pack` says why.
    """
    process = _CallerState(func, None, kind)
    found: dict[int, object] = {}
    with process.by_value(), suppress(Exception):
        function = process.dump(_NullFile(), func, registrations=False)
        found |= {id(each): each for each in function.external}
        for args, kwargs in calls:
            with suppress(Exception):
                pickler = function.dump_more((tuple(args), dict(kwargs)), _NullFile())
                found |= {id(each): each for each in pickler.external}
    return tuple(found.values())


class _NullFile(io.BytesIO):
    """A file that discards what is written."""

    def write(self, data: Any) -> int:
        return len(data)


class _CallerState:
    """What this process has loaded, and how a host gets each part of it.

    Attributes:
        script: the definitions of `__main__`.
    """

    def __init__(self, func: object, shipped: Shipped | None, external: type | None = None) -> None:
        from kinetic._pickling import module_values, modules, origin
        from kinetic._pickling.script import Script

        found = modules.LoadedModules() if shipped is None else modules.classify(shipped)
        self.script = Script(*origin.find_script(func))
        self._external = external
        # The script, in a process that multiprocessing has spawned.
        spawned = sys.modules.get("__mp_main__")
        self._modules = found.by_value
        # Ids of what turned out to need itself, in any attempt.
        self._rebuilt: frozenset[int] = frozenset()
        if spawned is not None and spawned.__name__ == "__mp_main__":
            self._modules += (spawned,)
        self._edited = found.edited
        # A test runner loads many modules of a project; a script only those that it uses.
        self._registering = found.registering if self.script.uses(found.imported) else ()
        self._changed = module_values.list_changes(func, found.imported)

    def make_record(
        self,
        make: Callable[[], Packed],
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    ) -> Packed:
        """Make a record. An edited module that cannot be pickled by value is imported by the host
        from its file as it is now.

        Raises:
            PicklingError: it cannot be pickled; the part of the call that cannot is named.
        """
        try:
            with self.by_value():
                made = make()
                warnings = (*self._warnings(), *made.warnings)
                return replace(made, warnings=warnings, parts=lambda: self._parts(call))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - pickling runs the objects' own code, which may raise anything
            if self._edited:
                by_value = self._modules
                self._modules = tuple(
                    module for module in by_value if module.__name__ not in self._edited
                )
                with suppress(Exception, SystemExit), self.by_value():
                    return replace(make(), warnings=self._warnings())
                self._modules = by_value
            self._blame(call, error)

    def _parts(
        self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    ) -> list[tuple[str, int]]:
        from kinetic._pickling import diagnosis

        def size(value: object) -> int:
            file = io.BytesIO()
            # Alone, a part may not be picklable.
            with suppress(Exception, SystemExit):
                self.dump(file, value, registrations=False)
            return file.tell()

        with self.by_value():
            return diagnosis.sizes_of_call(*call, size)

    def _warnings(self) -> tuple[str, ...]:
        lost = ", ".join(self.script.lost)
        found = (
            f"It is not known what source {lost} comes from: exec has executed it, or it was typed "
            "at a prompt, or its file was edited. Hosts get a copy, and what its decorators do "
            "(register it with a library other than JAX, for example) is not done there. Define it "
            "in a plain cell or a file, and run that again."
        )
        return ((found,) if lost else ()) + self._warnings_of_modules() + self._changed

    def _warnings_of_modules(self) -> tuple[str, ...]:
        if not self._edited:
            return ()
        as_imported = all(
            name in {module.__name__ for module in self._modules} for name in self._edited
        )
        what = "the function gets what was imported, but " if as_imported else ""
        return (
            f"{', '.join(self._edited)} {'has' if len(self._edited) == 1 else 'have'} changed "
            f"since being imported here: {what}hosts import the file as it is now. Reload it "
            "(importlib.reload, %autoreload) or restart this program to have one version.",
        )

    def by_value(self) -> AbstractContextManager[None]:
        """Pickle the modules by value within the context."""
        import cloudpickle

        from kinetic._pickling import modules

        return modules.by_value(self._modules, cloudpickle)

    def dump(self, file: io.BytesIO, call: object, *, registrations: bool = True) -> CallPickler:
        """Pickle what the script has registered, which what the call holds may need as soon as it
        is unpickled, then the call; return the pickler, which knows what it has written."""
        from kinetic._pickling import library_settings
        from kinetic._pickling.code_pickler import Circular
        from kinetic._pickling.pickler import make_pickler

        start, carries_functions = file.tell(), True
        while True:
            pickler = make_pickler(file, self.script, self._rebuilt, self._external)
            pickler.carries_functions = carries_functions
            try:
                if registrations:
                    registered = self.script.list_registered()
                    pickler.dump_registrations(
                        self._registering,
                        [
                            library_settings.read(),
                            *(each for each in registered if not self.attempt(each)),
                        ],
                    )
                pickler.dump(call)
            except Circular as circular:
                self._rebuilt |= {id(circular.made)}
            except Exception:
                if not pickler.has_carried or not carries_functions:
                    raise
                carries_functions = False  # One of them may be what cannot be sent.
            else:
                return pickler
            file.seek(start)
            file.truncate()

    def attempt(self, value: object) -> BaseException | None:
        """Return why the value cannot be pickled, or None."""
        try:
            self.dump(io.BytesIO(), value, registrations=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            return error
        return None

    def _blame(
        self, call: tuple[Any, tuple[Any, ...], dict[str, Any]], error: BaseException
    ) -> NoReturn:
        """Raise with the name of the part that cannot be pickled."""
        from kinetic._pickling import diagnosis

        with self.by_value():
            found = diagnosis.of_call(*call, attempt=self.attempt)
        raise found.as_error(error) from error.with_traceback(_users(error.__traceback__))


def _users(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the leading frames, up to the code of the object that could not be pickled, if it has
    any."""
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
    return Packed(
        data,
        digest,
        len(data),
        envelope.versions_here(),
        warnings=used[0].changes,
        external=used[0].external,
    )


class BatchPickler:
    """Calls of one function, which is pickled once; a call's record holds its arguments and the
    digest of the function's record.

    Attributes:
        function: the function's record.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        env_vars: Mapping[str, str],
        shipped: Shipped | None = None,
        external: type | None = None,
    ) -> None:
        """Pickle the function; see `pack`.

        Raises:
            PicklingError: it cannot be pickled; the part that cannot is named.
        """
        self._func, self._env_vars, self._shipped = func, env_vars, shipped
        self._external = external
        self._process = _CallerState(func, shipped, external)
        self.function = self._process.make_record(
            lambda: _pack_record("function", self._dump_function, {}), (func, (), {})
        )

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        """Pickle one call.

        Raises:
            PicklingError: an argument cannot be pickled; it is named.
        """
        arguments = (tuple(args), dict(kwargs))
        try:
            with self._process.by_value():
                dump = functools.partial(self._pickler.dump_more, arguments)
                return _pack_record("call", dump, self._env_vars, function=self.function.digest)
        except (Exception, SystemExit):  # noqa: BLE001 - pickling runs the objects' own code; `pack` finds out which part fails
            return pack(
                self._func,
                args,
                kwargs,
                env_vars=self._env_vars,
                shipped=self._shipped,
                external=self._external,
            )

    def _dump_function(self, file: io.BytesIO) -> CallPickler:
        self._pickler = self._process.dump(file, self._func)
        return self._pickler


def unpack(
    data: bytes,
    function: bytes = b"",
    *,
    main: dict[str, Any] | None = None,
    source_map: tuple[str, str] | None = None,
    external: Sequence[object] = (),
    when_imported: Callable[[str, Callable[[], object]], object] = lambda _, act: act(),
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Rebuild a call.

    Args:
        data: the record of the call.
        function: the record of the function, for a call of a batch.
        main: globals of `__main__` for functions of a script; None for a namespace of
            their own.
        source_map: (folder there, folder here): code from a file below the first names the one
            below the second.
        external: what stands here for each object that was left out of the pickle.
        when_imported: acts once a module is imported: it sets what the caller has set there.

    Raises:
        CorruptRecord: the bytes are not what was written.
        SetupFailed: this process cannot rebuild it: another Python, a missing module.
    """
    header = envelope.verify_record(data, "call")
    here = envelope.versions_here()
    if header.versions.python != here.python:
        # Byte code of another minor version would crash the process.
        raise SetupFailed(
            f"The call was made with Python {header.versions.python}, and this host runs "
            f"{here.python}. Use Python {here.python} on the calling side, or an image with "
            f"Python {header.versions.python}."
        )
    body = memoryview(data)[header.body_offset :]
    function_body = _function_body(header, function)
    try:
        from kinetic._pickling import unpickler
        from kinetic._pickling.unpickler import CallUnpickler

        if function_body is None:
            reader = CallUnpickler(io.BytesIO(body), main, source_map, external)
            _, states, *_ = reader.load()  # what the script has registered
            func, args, kwargs = reader.load()
        else:
            whole = io.BytesIO(b"".join((function_body, body)))
            reader = CallUnpickler(whole, main, source_map, external)
            _, states, *_ = reader.load()
            func = reader.load()
            args, kwargs = reader.load()
        unpickler.settle(when_imported)
        for each in states:
            when_imported(each.library, each.apply)  # Imports may have added handlers.
    except (Exception, SystemExit) as error:  # Unpickling imports and runs the user's modules.
        why = envelope.why_not_rebuilt(error, header.versions, here)
        raise SetupFailed(f"The function could not be rebuilt on this host: {why}") from error
    return func, args, kwargs


def _function_body(header: Header, function: bytes) -> memoryview | None:
    if not header.function_digest:
        return None
    if hashlib.sha256(function).hexdigest() != header.function_digest:
        raise CorruptRecord(
            "The stored function is damaged: its bytes are not those that were written. Submit the "
            "job again."
        )
    return memoryview(function)[envelope.read_header(function).body_offset :]
