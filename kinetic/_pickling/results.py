"""Pack values and exceptions into bytes on a host, and rebuild them on the caller."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kinetic._core.plan import Versions
from kinetic._pickling import envelope
from kinetic.errors import ResultUnavailable


def pack_value(value: object) -> bytes:
    """Pickle a return value.

    Raises:
        PicklingError: A part of the value cannot be pickled; the error names it.
    """
    with _without_keras_distribution():
        try:
            return _frame("value", value, {})
        except BaseException as error:
            # Pickling runs the objects' own code, which may raise anything.
            from kinetic._pickling import diagnosis

            culprit = diagnosis.diagnose_value(
                value, f"the returned value ({type(value).__name__})", attempt=_attempt
            )
            raise replace(culprit, returned=True).as_error(error) from error


def unpack_value(data: bytes) -> Any:
    """Rebuild a value.

    Raises:
        CorruptRecord: The bytes are damaged.
        ResultUnavailable: This process cannot rebuild the value: a module is missing, for example.
    """
    header = envelope.verify_record(data, "value")
    try:
        return _loads(memoryview(data)[header.body_offset :], header.versions)
    except (Exception, SystemExit) as error:  # Unpickling imports and runs the user's modules.
        why = envelope.explain_failure(error, header.versions, envelope.read_versions())
        raise ResultUnavailable(
            f"The function returned, but its value cannot be unpickled here: {why}"
        ) from error


def pack_exception(error: BaseException, *, source_map: tuple[str, str] | None = None) -> bytes:
    """Pickle an exception with its causes, contexts, notes, group members and frames.

    Args:
        error: The exception.
        source_map: (folder on this host, folder on the caller): frames' files below the first
            folder get names below the second.

    Raises:
        PicklingError: The class of the exception cannot be pickled.
    """
    from kinetic._pickling import exceptions

    with _without_keras_distribution():
        nodes = exceptions.describe(error, dumps=_dumps, loads=_loads, source_map=source_map)
    return _frame("exception", nodes, {})


def unpack_exception(data: bytes) -> BaseException:
    """Rebuild an exception of its own class, with the frames of its traceback.

    Raises:
        CorruptRecord: The bytes are damaged.
        UserCodeFailed: The class cannot be rebuilt here; the message has its name and text.
    """
    from kinetic._pickling import exceptions

    header = envelope.verify_record(data, "exception")
    nodes = pickle.loads(memoryview(data)[header.body_offset :])
    return exceptions.rebuild(nodes, loads=lambda body: _loads(body, header.versions))


@contextmanager
def _without_keras_distribution() -> Iterator[None]:
    """Unset the distribution of Keras. While it is set, Keras creates variables when it pickles a
    model: a collective of all hosts, of which only one may be packing."""
    keras: Any = getattr(sys.modules.get("keras"), "distribution", None)
    distribution = keras.distribution() if hasattr(keras, "distribution") else None
    if distribution is None:
        yield
        return
    keras.set_distribution(None)
    try:
        yield
    finally:
        keras.set_distribution(distribution)


def _frame(kind: str, body: object, env_vars: Mapping[str, str]) -> bytes:
    from kinetic._pickling import code_pickler

    return envelope.frame_record(kind, lambda file: code_pickler.dump(body, file), env_vars)


def _dumps(value: object) -> bytes:
    from kinetic._pickling import code_pickler

    file = io.BytesIO()
    code_pickler.dump(value, file)
    return file.getvalue()


def _attempt(value: object) -> BaseException | None:
    """Return the error that pickling the value raises, or None."""
    try:
        _dumps(value)
    except BaseException as error:  # noqa: BLE001 - pickling runs the objects' own code, which may raise anything.
        return error
    return None


def _loads(data: bytes | memoryview, versions: Versions | None = None) -> Any:
    """Unpickle data from a host, without changing existing classes of this process."""
    from kinetic._pickling.result_unpickler import ResultUnpickler

    python = (
        ""
        if versions is None or versions.python == envelope.read_versions().python
        else versions.python
    )
    return ResultUnpickler(data, python).load()
