"""Calls, values and exceptions as bytes: the only door to cloudpickle.

In: live Python objects. Out: bytes that another process turns back into them. Called by planning, the worker and handles.

Layout: one line of JSON (schema, kind, versions of the maker, variables of the environment, SHA-256 of the body), then the
pickle. The line can be read without unpickling anything. It is imported only when something is packed or unpacked.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, NoReturn

from kinetic.errors import CorruptRecord, ResultUnavailable, SetupFailed
from kinetic.job.plan import Versions
from kinetic.version import __version__

SCHEMA = 1
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Packed:
    """A call as bytes.

    Attributes:
        data: header line and pickle.
        digest: SHA-256 of `data`, 64 hex digits.
        size_bytes: length of `data`.
        versions: of what made it.
    """

    data: bytes
    digest: str
    size_bytes: int
    versions: Versions


@dataclass(frozen=True)
class Header:
    """What can be known without unpickling.

    Attributes:
        kind: "call", "value" or "exception".
        versions: of what made it.
        env_vars: variables to set before the call.
        body_digest: SHA-256 of the pickle.
        body_offset: where the pickle starts.
        function_digest: SHA-256 of the record with the function that the call's arguments belong to; "" when it is in this one.
    """

    kind: str
    versions: Versions
    env_vars: dict[str, str]
    body_digest: str
    body_offset: int
    function_digest: str = ""


def versions_here() -> Versions:
    """Return the versions of this process that decide whether a pickle can be read."""
    import cloudpickle

    return Versions(f"{sys.version_info.major}.{sys.version_info.minor}", cloudpickle.__version__, __version__)


def pack(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    env_vars: Mapping[str, str],
    project_root: Path | None,
) -> Packed:
    """Pickle a call; modules of the project travel by value.

    A module that cannot travel whole (it holds a lock, a client) travels by name instead: the project's tree takes its source.

    Raises:
        PicklingError: a part of the call cannot be pickled; it is named.
    """
    import cloudpickle

    from kinetic.packaging import byvalue

    call = (func, tuple(args), dict(kwargs))
    modules = byvalue.project_modules(project_root) if project_root is not None else []
    try:
        with byvalue.by_value(modules, cloudpickle):
            return _packed(_container("call", call, env_vars))
    except Exception as error:  # noqa: BLE001 - pickling runs the objects' own code, which may raise anything
        with byvalue.by_value(modules, cloudpickle):
            fewer = byvalue.portable(modules, _attempt)
        with suppress(Exception), byvalue.by_value(fewer, cloudpickle):
            if len(fewer) < len(modules):
                return _packed(_container("call", call, env_vars))
        _blame(modules, call, error)


def _blame(modules: Sequence[ModuleType], call: tuple[Any, tuple[Any, ...], dict[str, Any]], error: Exception) -> NoReturn:
    """Raise with the name of the part that cannot be pickled."""
    import cloudpickle

    from kinetic.packaging import byvalue, culprit

    with byvalue.by_value(modules, cloudpickle):
        raise culprit.of_call(*call, attempt=_attempt).as_error(error) from error.with_traceback(_users(error.__traceback__))


def _users(traceback: TracebackType | None) -> TracebackType | None:
    """Take off the frames that lead to the code of the object that would not be pickled, if it has any."""
    import cloudpickle

    leading = (__file__, *(f"{folder}/" for folder in cloudpickle.__path__))
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(leading):
        traceback = traceback.tb_next
    return traceback


def _packed(data: bytes) -> Packed:
    return Packed(data, hashlib.sha256(data).hexdigest(), len(data), versions_here())


def read_header(data: bytes) -> Header:
    """Read the first line; unpickles nothing.

    Raises:
        CorruptRecord: the bytes were not written by this module, or by a newer version of it.
    """
    end = data.find(b"\n")
    try:
        line = json.loads(data[: max(end, 0)])
        if line["schema"] != SCHEMA:
            raise CorruptRecord(
                f"The record has schema {line['schema']!r}; this kinetic reads {SCHEMA}. Use the version that wrote it."
            )
        versions, function = Versions(**line["fingerprint"]), str(line.get("function", ""))
        header = Header(line["kind"], versions, dict(line["env_vars"]), line["sha256"], end + 1, function)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord("The record is damaged: it has no readable first line. Submit the job again.") from error
    return header


class CallSeries:
    """Calls of one function, which is pickled once; a call's record holds its arguments and names the function's record.

    Attributes:
        function: the function's record.
    """

    def __init__(self, func: Callable[..., Any], *, env_vars: Mapping[str, str], project_root: Path | None) -> None:
        """Pickle the function.

        Raises:
            PicklingError: it cannot be pickled; the part that cannot is named.
        """
        from kinetic.packaging import byvalue

        self._func, self._env_vars, self._root = func, env_vars, project_root
        self._modules = byvalue.project_modules(project_root) if project_root is not None else []
        try:
            self.function = self._pack_function()
        except Exception as error:  # noqa: BLE001 - as above
            self._leave_out_what_fails()
            try:
                self.function = self._pack_function()
            except Exception:  # noqa: BLE001 - as above; what is told is the first error
                _blame(self._modules, (func, (), {}), error)

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        """Pickle one call.

        Raises:
            PicklingError: an argument cannot be pickled; it is named.
        """
        arguments = (tuple(args), dict(kwargs))
        try:
            with self._by_value():
                data = _framed("call", lambda f: self._pickler.dump(arguments, f), self._env_vars, function=self.function.digest)
        except Exception:  # noqa: BLE001 - pickling runs the objects' own code; the other way finds out why
            return pack(self._func, args, kwargs, env_vars=self._env_vars, project_root=self._root)
        return _packed(data)

    def _pack_function(self) -> Packed:
        import cloudpickle

        from kinetic.packaging.series import FunctionPickler

        def dump(file: io.BytesIO) -> None:
            self._pickler = FunctionPickler(self._func, file, cloudpickle.Pickler)

        with self._by_value():
            return _packed(_framed("function", dump, {}))

    def _leave_out_what_fails(self) -> None:
        from kinetic.packaging import byvalue

        with self._by_value():
            self._modules = byvalue.portable(self._modules, _attempt)

    def _by_value(self) -> AbstractContextManager[None]:
        import cloudpickle

        from kinetic.packaging import byvalue

        return byvalue.by_value(self._modules, cloudpickle)


def unpack(
    data: bytes, function: bytes = b"", *, source_map: tuple[str, str] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Rebuild a call.

    Args:
        data: the record of the call.
        function: the record of the function, for a call of a series.
        source_map: (folder there, folder here): code from a file below the first names the one below the second.

    Raises:
        CorruptRecord: the bytes are not what was written.
        SetupFailed: this process cannot rebuild it: another Python, a missing module.
    """
    header = _verified(data, "call")
    here = versions_here()
    if header.versions.python != here.python:
        # Byte code of another minor version does not fail cleanly, it crashes.
        raise SetupFailed(
            f"The call was made with Python {header.versions.python}, this host runs {here.python}: it cannot run here. "
            f"Use Python {here.python} on the calling side, or an image with Python {header.versions.python}."
        )
    body = memoryview(data)[header.body_offset :]
    function_body = _function_body(header, function)
    try:
        if function_body is None:
            func, args, kwargs = pickle.loads(body) if source_map is None else _reader(source_map)(io.BytesIO(body)).load()
        else:
            from kinetic.packaging import series

            func, (args, kwargs) = series.load(function_body, body, _reader(source_map))
    except (Exception, SystemExit) as error:  # Unpickling imports and runs the user's modules.
        raise SetupFailed(f"The function could not be rebuilt on this host: {_why(error, header.versions, here)}") from error
    return func, args, kwargs


def _reader(source_map: tuple[str, str] | None) -> Callable[[BinaryIO], pickle.Unpickler]:
    if source_map is None:
        return pickle.Unpickler
    from kinetic.packaging.relocation import Relocating

    return lambda file: Relocating(file, *source_map)


def _function_body(header: Header, function: bytes) -> memoryview | None:
    if not header.function_digest:
        return None
    if hashlib.sha256(function).hexdigest() != header.function_digest:
        raise CorruptRecord("The stored function is damaged: its bytes are not those that were written. Submit the job again.")
    return memoryview(function)[read_header(function).body_offset :]


def pack_value(value: object) -> bytes:
    """Pickle a value that was returned.

    Raises:
        PicklingError: it cannot be pickled; the part that cannot is named.
    """
    try:
        return _container("value", value, {})
    except Exception as error:  # Pickling runs the objects' own code, which may raise anything.
        from kinetic.packaging import culprit

        found = culprit.of_value(value, f"the returned value ({type(value).__name__})", attempt=_attempt)
        raise replace(found, returned=True).as_error(error) from error


def unpack_value(data: bytes) -> Any:
    """Rebuild one value.

    Raises:
        CorruptRecord: the bytes are not what was written.
        ResultUnavailable: this process cannot rebuild it, for example because a module is missing.
    """
    header = _verified(data, "value")
    try:
        return _loads(memoryview(data)[header.body_offset :], header.versions)
    except (Exception, SystemExit) as error:  # Unpickling imports and runs the user's modules.
        raise ResultUnavailable(
            f"The value could not be rebuilt here: {_why(error, header.versions, versions_here())}"
        ) from error


def pack_exception(error: BaseException, *, source_map: tuple[str, str] | None = None) -> bytes:
    """Pickle an exception with its causes, contexts, notes, group members and frames.

    Args:
        error: what was raised.
        source_map: (folder here, folder there): file names of frames below the first are written as below the second.

    Raises:
        PicklingError: its class cannot be pickled.
    """
    from kinetic.packaging import raised

    nodes = raised.describe(error, dumps=_dumps, loads=_loads, source_map=source_map)
    return _container("exception", nodes, {})


def unpack_exception(data: bytes) -> BaseException:
    """Rebuild an exception: its own class, and a traceback with the frames it had.

    Raises:
        CorruptRecord: the bytes are not what was written.
        UserCodeFailed: its class cannot be rebuilt here; the message says what it was.
    """
    from kinetic.packaging import raised

    header = _verified(data, "exception")
    nodes = pickle.loads(memoryview(data)[header.body_offset :])
    return raised.rebuild(nodes, loads=lambda body: _loads(body, header.versions))


def _container(kind: str, body: object, env_vars: Mapping[str, str]) -> bytes:
    import cloudpickle

    return _framed(kind, lambda file: cloudpickle.dump(body, file), env_vars)


def _framed(kind: str, dump: Callable[[io.BytesIO], object], env_vars: Mapping[str, str], *, function: str = "") -> bytes:
    fields = {"schema": SCHEMA, "kind": kind, "fingerprint": asdict(versions_here()), "env_vars": dict(env_vars)}
    if function:
        fields["function"] = function

    def line(digest: str) -> bytes:
        return json.dumps(fields | {"sha256": digest}).encode() + b"\n"

    # The line has the same length whatever the digest is: pickle behind it, then fill it in. A large body is never copied.
    file = io.BytesIO()
    offset = file.write(line(_NO_DIGEST))
    dump(file)
    with file.getbuffer() as view:
        view[:offset] = line(hashlib.sha256(view[offset:]).hexdigest())
    return file.getvalue()


def _verified(data: bytes, kind: str) -> Header:
    header = read_header(data)
    if header.kind != kind:
        raise CorruptRecord(f"The record holds a {header.kind}, not a {kind}.")
    if hashlib.sha256(memoryview(data)[header.body_offset :]).hexdigest() != header.body_digest:
        raise CorruptRecord(f"The stored {kind} is damaged: its bytes are not those that were written. Submit the job again.")
    return header


def _dumps(value: object) -> bytes:
    import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def _attempt(value: object) -> Exception | None:
    """Return why the value cannot be pickled, or None."""
    try:
        _dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling runs the objects' own code, which may raise anything.
        return error
    return None


def _loads(data: bytes | memoryview, made: Versions | None = None) -> Any:
    """Unpickle what comes back from a host, without touching the classes that are known here."""
    from cloudpickle import cloudpickle as inside

    from kinetic.packaging.homecoming import Homecoming

    python = "" if made is None or made.python == versions_here().python else made.python
    return Homecoming(data, inside, python).load()


def _why(error: BaseException, made: Versions, here: Versions) -> str:
    what = f"{type(error).__name__}: {error}."
    if isinstance(error, ModuleNotFoundError):
        what += f" Module {error.name!r} is missing here: install it, or keep it inside the project's folder."
    elif made != here:
        what += " The versions differ: install the same ones on both sides."
    return f"{what} Made with {_text(made)}; here is {_text(here)}."


def _text(versions: Versions) -> str:
    return f"Python {versions.python}, cloudpickle {versions.cloudpickle}, kinetic {versions.kinetic}"
