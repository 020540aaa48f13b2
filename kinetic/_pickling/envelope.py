"""Format of pickles in the store: a header line that can be read without unpickling, then the
pickle.

The line is JSON: schema, kind, versions of the software that made it, environment variables,
SHA-256 of the pickle.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from kinetic._core.plan import Versions
from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord, UnsupportedVersion
from kinetic.version import __version__

SCHEMA = 3
_NO_DIGEST = "0" * 64
_DEEPEST = 4000
"""Recursion limit while pickling, instead of Python's 1,000: if functions call each other in a
chain, pickle needs six levels per function."""
_LIMIT_LOCK = threading.Lock()
_limits_before: list[int] = []


@contextmanager
def _raise_recursion_limit() -> Iterator[None]:
    """Raise the recursion limit within the block; several threads may do so at the same time."""
    with _LIMIT_LOCK:
        _limits_before.append(_limits_before[0] if _limits_before else sys.getrecursionlimit())
        sys.setrecursionlimit(max(_limits_before[0], _DEEPEST))
    try:
        yield
    finally:
        with _LIMIT_LOCK:
            before = _limits_before.pop()
            if not _limits_before:
                sys.setrecursionlimit(before)


@dataclass(frozen=True)
class Header:
    """The header line of a record.

    Attributes:
        kind: "call", "function", "value" or "exception".
        versions: Versions of the software that made the record.
        env_vars: Variables to set before the call.
        body_digest: SHA-256 of the pickle.
        body_offset: Offset of the pickle in the record, in bytes.
        function_digest: For a call of a batch, SHA-256 of the record with its function; "" if this
            record has the function.
    """

    kind: str
    versions: Versions
    env_vars: dict[str, str]
    body_digest: str
    body_offset: int
    function_digest: str = ""


def read_versions() -> Versions:
    """Return the versions of this process that decide whether a pickle can be read."""
    import cloudpickle

    return Versions(
        f"{sys.version_info.major}.{sys.version_info.minor}", cloudpickle.__version__, __version__
    )


def read_header(data: bytes) -> Header:
    """Read the header line without unpickling anything.

    Raises:
        CorruptRecord: The record has no valid header line.
        UnsupportedVersion: An incompatible version of kinetic wrote the record.
    """
    end = data.find(b"\n")
    try:
        line = json.loads(data[: max(end, 0)])
        if line["schema"] != SCHEMA:
            raise UnsupportedVersion(
                "The stored call, value or exception was written by another version of kinetic, in "
                f"format {line['schema']!r}; this version reads format {SCHEMA}. Use that version, "
                "or submit the job again."
            )
        versions, function = Versions(**line["fingerprint"]), str(line.get("function", ""))
        header = Header(
            line["kind"], versions, dict(line["env_vars"]), line["sha256"], end + 1, function
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            "The stored call, value or exception is damaged: its first line cannot be read. Submit "
            "the job again."
        ) from error
    return header


def frame_record(
    kind: str,
    dump: Callable[[io.BytesIO], object],
    env_vars: Mapping[str, str],
    *,
    function: str = "",
) -> bytes:
    fields = {
        "schema": SCHEMA,
        "kind": kind,
        "fingerprint": asdict(read_versions()),
        "env_vars": dict(env_vars),
    }
    if function:
        fields["function"] = function

    def line(digest: str) -> bytes:
        return json.dumps(fields | {"sha256": digest}).encode() + b"\n"

    # Write the header line with a placeholder for the digest, then the pickle, then fill in the
    # digest, which has the same length. A large pickle is never copied.
    file = io.BytesIO()
    offset = file.write(line(_NO_DIGEST))
    with _raise_recursion_limit():
        dump(file)
    with file.getbuffer() as view:
        view[:offset] = line(hashlib.sha256(view[offset:]).hexdigest())
    return file.getvalue()


def verify_record(data: bytes, kind: str) -> Header:
    header = read_header(data)
    if header.kind != kind:
        raise CorruptRecord(
            f"The stored {kind} of the job is damaged: the store has a record of the kind "
            f"{header.kind!r} in its place. Submit the job again."
        )
    if hashlib.sha256(memoryview(data)[header.body_offset :]).hexdigest() != header.body_digest:
        raise CorruptRecord(
            f"The stored {kind} is damaged: its bytes differ from those that were written. Submit "
            "the job again."
        )
    return header


def explain_failure(error: BaseException, theirs: Versions, ours: Versions) -> str:
    reason = f"{type(error).__name__}: {error}".removesuffix(".") + "."
    if isinstance(error, ModuleNotFoundError):
        reason += (
            f" Module {error.name!r} is missing here: install it, or move it into the project's "
            "folder."
        )
    elif isinstance(error, KeyError) and _is_missing_variable(error):
        reason += (
            f" The variable {error} is not set here: name it in env= or capture_env_vars= of "
            "@kinetic.run."
        )
    elif isinstance(error, TypeError) and "__init_subclass__" in str(error):
        reason += (
            " A class of a script is rebuilt here from its parts, without the arguments of its "
            "class statement: move it into a module of the project."
        )
    elif theirs != ours:
        reason += " The versions differ: install the same ones on both sides."
    else:
        reason += " Correct the class or module that raises this."
    if theirs == ours:
        return reason
    return f"{reason} Made with {_format_versions(theirs)}; here: {_format_versions(ours)}."


def _is_missing_variable(error: KeyError) -> bool:
    """True if the error is about a missing environment variable."""
    import traceback

    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].co_qualname == "_Environ.__getitem__"


def _format_versions(versions: Versions) -> str:
    return (
        f"Python {versions.python}, cloudpickle {versions.cloudpickle}, kinetic {versions.kinetic}"
    )
