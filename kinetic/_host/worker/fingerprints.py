"""Notes the programs that this process runs over several processes, so that the leader can compare
them with those of the other hosts (`_core/gang/programs.py`).

In: JAX's lowering of each program, at its first call. Out: a message with a `ProgramNote`. Nothing
happens at later calls. Programs that JAX only lowers, for their cost say, are not noted. Programs
without collectives wait for nobody, so only their inputs are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kinetic._compile import hlo, lowering, origins
from kinetic._core.gang.programs import ProgramNote, pack_operations
from kinetic._host.channel import Channel, WorkerEvent
from kinetic._host.worker import jaxworld
from kinetic._host.worker.startup.kinetic_awaiting import act_when_imported

_CALL = "_pjit_call_impl_python"
"""JAX's function that lowers, compiles and runs a program that is called for the first time."""
_IS_NOTED = "_is_noted_by_kinetic"
_SMALL_BYTES = 1 << 12
"""Size below which a program is compiled before it is noted, because it may have no collectives."""
_MOST_BYTES = 1 << 18
"""Size above which a program is noted without its operations."""
_MOST_ELEMENTS = 16
_MOST_INPUT_BYTES = 1 << 26
_DONATED = 3
"""Index, among the arguments of JAX's function after the shardings, of those that are donated."""
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) ((?:all|reduce|ragged)-(?:reduce|gather|scatter|to-all)|collective-\w+|send"
    r"|recv)(?:-start)?\((?:.*?replica_groups=(\S+))?"
)

_fingerprints: Fingerprints | None = None
"""The recorder of this process; calls of a session share it."""


def record(channel: Channel, titles: Mapping[str, str]) -> None:
    """Note the programs of this call; `titles` are titles of source without files, by file."""
    global _fingerprints
    if _fingerprints is not None:
        _fingerprints.begin_call()
        return
    recorder = _fingerprints = Fingerprints(channel, titles)
    act_when_imported("jax._src.pjit", lambda: lowering.replace_entrance(recorder.lower))


class Fingerprints:
    """Sends a note of each program over several processes, once.

    Call `begin_call` before each further call of a session.
    """

    def __init__(self, channel: Channel, titles: Mapping[str, str]) -> None:
        self._channel = channel
        self._titles = titles
        self._lock = threading.Lock()
        self._fingerprints: set[str] = set()
        self._number, self._before = 0, ""

    def begin_call(self) -> None:
        """Count the programs of the next call, which may use all programs so far."""
        programs = "".join(sorted(self._fingerprints))
        self._number, self._before = 0, hashlib.sha256(programs.encode()).hexdigest()[:16]

    def lower(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Lower a program, and note it if it is about to run."""
        computation = original(*args, **options)
        if not hasattr(computation, _IS_NOTED) and (call := _find_call()) is not None:
            setattr(computation, _IS_NOTED, True)
            with contextlib.suppress(Exception):
                self._note(computation, call.f_locals["args"], *args)
        return computation

    def _note(
        self, computation: Any, values: Any, jaxpr: Any, shardings: Sequence[Any], *rest: Any
    ) -> None:
        from jax._src import xla_bridge

        devices = tuple(computation._device_list)
        processes = sorted({device.process_index for device in devices})
        if len(processes) < 2:
            return
        code = _canonicalize(computation.stablehlo())
        flags = (*jaxworld.compiler_flags(), *map(str, computation._compiler_options_kvs))
        numbers = [device.id for device in devices]
        digest = hashlib.sha256(f"{numbers} {flags}".encode() + code).hexdigest()[:16]
        if digest in self._fingerprints:
            return
        waits, collectives = _is_sharded(computation.compile_args), ""
        if waits and len(code) < _SMALL_BYTES:
            compiled = computation.compile().xla_executable.hlo_modules()[0].to_string()
            operations = _COLLECTIVE.findall(compiled)
            waits = bool(operations)
            collectives = hashlib.sha256(str(operations).encode()).hexdigest()[:16]
        inputs: tuple[str, ...] = ()
        if waits or not hlo.is_library(lowering.find_origin(jaxpr)[1]):
            inputs = tuple(map(partial(_digest_input, waits), values, shardings))
        if not waits and not any(inputs):
            return
        everybody = len(processes) == xla_bridge.process_count()
        mesh = lowering.find_mesh(computation.compile_args)
        note = ProgramNote(
            number=0,
            fingerprint=digest,
            name=lowering.strip_jit(computation._name),
            line=self._find_line(),
            process=xla_bridge.process_index(),
            processes=() if everybody else tuple(processes),
            is_main=waits and threading.current_thread() is threading.main_thread(),
            before=self._before,
            arguments=tuple(map(_describe_type, jaxpr.in_avals, rest[_DONATED])),
            shardings=tuple(map(_describe_sharding, shardings)),
            mesh=_describe_mesh(mesh, numbers),
            flags=flags,
            collectives=collectives,
            names=tuple(map(str, jaxpr.jaxpr.debug_info.arg_names or ())),
            inputs=inputs,
            operations=self._read_operations(computation) if len(code) < _MOST_BYTES else "",
        )
        with self._lock:
            self._fingerprints.add(digest)
            self._number += 1
            numbered = asdict(note) | {"number": self._number}
            self._channel.send({"event": WorkerEvent.PROGRAM, "program": numbered})

    def _read_operations(self, computation: Any) -> str:
        text = computation.stablehlo().operation.get_asm(
            enable_debug_info=True, large_elements_limit=_MOST_ELEMENTS
        )
        return pack_operations(
            [
                (
                    " ".join(operation.rpartition("\n")[2].split()),
                    self._shorten(origin.partition(" (")[0]),
                )
                for operation, origin in origins.read_operations(text)
                if operation.strip(" )}\n")
            ]
        )

    def _find_line(self) -> str:
        """Return the user's line that calls the program; of a library's call, the library's."""
        frames = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in _walk_frames()]
        own = [frame for frame in frames if not hlo.is_library(frame)]
        outside = [frame for frame in frames if "/jax/" not in frame and "/lib/python" not in frame]
        return self._shorten(next(iter((*own, *outside)), ""))

    def _shorten(self, position: str) -> str:
        """Return "train.py:41", or the title of a cell with the line."""
        file, _, line = position.rpartition(":")
        return f"{self._titles.get(file) or file.rpartition('/')[2]}:{line}" if file else ""


def _walk_frames() -> Iterator[Any]:
    """Yield the frames of this thread outside of kinetic's hosts and JAX, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/kinetic/_host/" not in file and "/kinetic/_compile/" not in file:
            yield frame
        frame = frame.f_back


def _find_call() -> Any:
    """Return the frame of JAX that calls a program; None if JAX only lowers it."""
    frame: Any = sys._getframe(2)
    for _ in range(6):
        if frame is None or frame.f_code.co_name == _CALL:
            return frame
        frame = frame.f_back
    return None


def _canonicalize(module: Any) -> bytes:
    """Return a program without source lines and addresses of callbacks."""
    from jax._src import cache_key

    return bytes(cache_key._canonicalize_ir(module, cache_key.IgnoreCallbacks.ALL))


def _is_sharded(about: dict[str, Any]) -> bool:
    """False if every device has all arrays of a program, which needs no collectives then."""
    kinds = ("in_shardings", "out_shardings", "intermediate_shardings")
    shardings = (sharding for kind in kinds for sharding in about[kind])
    return not all(getattr(sharding, "is_fully_replicated", True) for sharding in shardings)


def _digest_input(waits: bool, value: Any, sharding: Any) -> str:
    """Return the digest of a value of this host that its program takes for the same on all hosts;
    "" for other values, and for numbers in programs that wait for nobody, such as elapsed times."""
    import jax
    import numpy as np

    if not getattr(sharding, "is_fully_replicated", True):
        return ""
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable or jax.dtypes.issubdtype(
            value.dtype, jax.dtypes.extended
        ):
            return ""
    elif not isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return ""
    array = np.asarray(value)
    if array.nbytes > _MOST_INPUT_BYTES or not (waits or array.ndim):
        return ""
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def _describe_type(aval: Any, is_donated: bool) -> str:
    from jax._src import dtypes

    if not hasattr(aval, "dtype"):
        return str(aval)
    text = f"{dtypes.short_dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"
    return f"{text} (donated)" if is_donated else text


def _describe_sharding(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else str(spec).replace("PartitionSpec", "P")


def _describe_mesh(mesh: Any, numbers: list[int]) -> str:
    axes = {} if mesh is None else dict(mesh.shape)
    text = ", ".join(f"{name}={size}" for name, size in axes.items()) or f"{len(numbers)} devices"
    return text if numbers == sorted(numbers) else f"{text} with the devices in the order {numbers}"
