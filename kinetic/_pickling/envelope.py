"""The format of pickles in the store: a line that can be read without unpickling anything, then the
pickle.

In: a way to pickle; bytes. Out: bytes; `Header`.

The line is JSON: schema, kind, versions of the software that made it, variables of the environment,
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
"""Python's own limit is 1,000, of which pickle takes six where one function uses another."""
_LIMIT_LOCK = threading.Lock()
_limits_before: list[int] = []


@contextmanager
def _raise_recursion_limit() -> Iterator[None]:
    """Let values be nested more deeply while they are pickled, in any number of threads."""
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
    """What can be known without unpickling.

    Attributes:
        kind: "call", "value" or "exception".
        versions: of what made it.
        env_vars: variables to set before the call.
        body_digest: SHA-256 of the pickle.
        body_offset: where the pickle starts.
        function_digest: SHA-256 of the record with the function that the call's arguments belong
            to; "" when it is in this one.
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

    return Versions(
        f"{sys.version_info.major}.{sys.version_info.minor}", cloudpickle.__version__, __version__
    )


def read_header(data: bytes) -> Header:
    """Read the first line; unpickles nothing.

    Raises:
        CorruptRecord: the bytes were not written by this module.
        UnsupportedVersion: another version of kinetic wrote them.
    """
    end = data.find(b"\n")
    try:
        line = json.loads(data[: max(end, 0)])
        if line["schema"] != SCHEMA:
            raise UnsupportedVersion(
                f"The record was written by another version of kinetic (schema {line['schema']!r}, "
                f"not {SCHEMA}). Read it with that version, or submit the job again."
            )
        versions, function = Versions(**line["fingerprint"]), str(line.get("function", ""))
        header = Header(
            line["kind"], versions, dict(line["env_vars"]), line["sha256"], end + 1, function
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            "The record is damaged: it has no readable first line. Submit the job again."
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
        "fingerprint": asdict(versions_here()),
        "env_vars": dict(env_vars),
    }
    if function:
        fields["function"] = function

    def line(digest: str) -> bytes:
        return json.dumps(fields | {"sha256": digest}).encode() + b"\n"

    # The line has the same length whatever the digest is: pickle behind it, then fill it in. A
    # large body is never copied.
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
        raise CorruptRecord(f"The record holds a {header.kind}, not a {kind}.")
    if hashlib.sha256(memoryview(data)[header.body_offset :]).hexdigest() != header.body_digest:
        raise CorruptRecord(
            f"The stored {kind} is damaged: its bytes are not those that were written. Submit the "
            "job again."
        )
    return header


def why_not_rebuilt(error: BaseException, theirs: Versions, ours: Versions) -> str:
    what = f"{type(error).__name__}: {error}."
    if isinstance(error, ModuleNotFoundError):
        what += (
            f" Module {error.name!r} is missing here: install it, or keep it inside the project's "
            "folder."
        )
    elif isinstance(error, KeyError) and _is_of_environment(error):
        what += (
            f" The variable {error} is not set here: name it in env= or capture_env_vars= of "
            "@kinetic.run."
        )
    elif isinstance(error, TypeError) and "__init_subclass__" in str(error):
        what += (
            " A class of a script is made here from its parts, without the arguments of its "
            "statement: put it into a module of the project."
        )
    elif theirs != ours:
        what += " The versions differ: install the same ones on both sides."
    return what if theirs == ours else f"{what} Made with {_text(theirs)}; here is {_text(ours)}."


def _is_of_environment(error: KeyError) -> bool:
    """Whether a variable of the environment was missing."""
    import traceback

    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].co_qualname == "_Environ.__getitem__"


def _text(versions: Versions) -> str:
    return (
        f"Python {versions.python}, cloudpickle {versions.cloudpickle}, kinetic {versions.kinetic}"
    )
