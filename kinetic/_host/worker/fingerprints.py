"""Notes the programs that this process runs over several processes, so that the leader can compare
them with those of the other hosts (`_core/gang/programs.py`).

A `ProgramNote` is sent at the first call of each program, when JAX lowers it; then with the inputs
of some further calls, and with their outputs once these are computed. After those calls JAX takes
its fast path, which calls no Python. A program that JAX only lowers, for its cost say, is not
noted. A program without collectives waits for no other host, so only its first inputs are compared.

Promise: noting a program never waits for a device.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from kinetic._compile import hlo, lowering, origins, routes
from kinetic._core.gang.programs import DONATED, ProgramNote, pack_operations
from kinetic._host.channel import Channel, WorkerEvent
from kinetic._host.worker import jaxworld
from kinetic._host.worker.startup.kinetic_awaiting import act_when_imported

_INSTALLED = re.compile(r"/(site|dist)-packages/(?!jax/)")
_CALL = "_pjit_call_impl_python"
"""JAX's function that lowers, compiles and runs a program that is called for the first time."""
_NOTE = "_note_of_kinetic"
_SMALL_BYTES = 1 << 12
"""Size below which a program is compiled before it is noted, because it may have no collectives."""
_MOST_BYTES = 1 << 18
"""Size above which a program is noted without its operations."""
_MOST_ELEMENTS = 16
"""Most elements of a constant that is shown, and of an array on an accelerator that is compared."""
_MOST_NUMBERS = 4
"""Most numbers of an array that are compared."""
_MOST_INPUT_BYTES = 1 << 26
_OUTPUTS = 2
"""Index of a program's results among the further arguments of JAX's `_get_fastpath_data`."""
_MOST_OUTPUTS = 64
"""Most calls that are remembered until their outputs are computed."""
_FINISH_S = 0.1
_DONATIONS = 3
"""Index, among the arguments of JAX's function after the shardings, of those that are donated."""
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) ((?:all|reduce|ragged)-(?:reduce|gather|scatter|to-all)|collective-\w+|send"
    r"|recv)(?:-start)?\((?:.*?((?:groups|pairs)=.*))?"
)

_fingerprints: Fingerprints | None = None
"""The recorder of this process; calls of a session share it."""


def record(channel: Channel, titles: Mapping[str, str], calls: int) -> None:
    """Note the programs of this call, and the inputs of the first `calls` calls of each program.
    `titles` are names for source that has no file, such as notebook cells, by file."""
    global _fingerprints
    if _fingerprints is None:
        recorder = _fingerprints = Fingerprints(channel, titles)
        act_when_imported("jax._src.pjit", lambda: _install(recorder))
    _fingerprints.begin_call(calls)


def finish(*, waits: bool) -> None:
    """Send the outputs of the last programs that are computed by now. If `waits`, wait for them a
    moment: a function that reads no result returns before they are computed."""
    if _fingerprints is not None:
        with contextlib.suppress(Exception):
            _fingerprints.finish(_FINISH_S if waits else 0.0)


def _install(recorder: Fingerprints) -> None:
    """Have JAX call the recorder. If this version of JAX lacks the functions that control its fast
    path, only the first call of each program is noted."""
    from jax._src import pjit

    lowering.replace_entrance(recorder.lower)
    if not (hasattr(pjit, "_get_fastpath_data") and hasattr(pjit, "_need_to_rebuild_with_fdo")):
        return
    get_data, need_to_rebuild = pjit._get_fastpath_data, pjit._need_to_rebuild_with_fdo

    def get_fastpath_data(executable: Any, *args: Any, **options: Any) -> Any:
        with contextlib.suppress(Exception):
            recorder.note_end(executable, *args[_OUTPUTS : _OUTPUTS + 1])
        return get_data(executable, *args, **options)

    pjit._get_fastpath_data = get_fastpath_data
    pjit._need_to_rebuild_with_fdo = lambda *args: need_to_rebuild(*args) or recorder.awaits_call


class Fingerprints:
    """Sends one note for each program that runs over several processes. Call `begin_call` first."""

    def __init__(self, channel: Channel, titles: Mapping[str, str]) -> None:
        self._channel = channel
        self._titles = titles
        self._lock = threading.Lock()
        self._notes: dict[str, ProgramNote] = {}
        """The note of each program, by its fingerprint."""
        self._calls: Counter[str] = Counter()
        self._outputs: deque[tuple[ProgramNote, list[Any]]] = deque(maxlen=_MOST_OUTPUTS)
        """Calls whose outputs are not computed yet."""
        self._number, self._before, self._most_calls = 0, "", 0
        self._thread = threading.local()

    def begin_call(self, calls: int) -> None:
        """Begin the next call of the session: compare `calls` calls of each program from now on.
        The next call may use all programs noted so far."""
        self._number, self._most_calls = 0, calls
        self._calls.clear()
        self._outputs.clear()
        if self._notes:
            programs = "".join(sorted(self._notes))
            self._before = hashlib.sha256(programs.encode()).hexdigest()[:16]

    def note_end(self, executable: Any, outputs: Sequence[Any] = ()) -> None:
        """Remember the outputs of a call that JAX has just dispatched, if it is compared."""
        call: Any = getattr(self._thread, "call", (None, None))
        computation, note = call
        self._thread.call, self._thread.awaits = (None, None), False
        is_last = getattr(computation, "_executable", None) is executable is not None
        arrays = [
            array if is_last and _is_replicated(array) and array.size <= _MOST_ELEMENTS else None
            for array in outputs
        ]
        if any(array is not None for array in arrays):
            self._outputs.append((note, arrays))
        if _is_main_thread():
            has_next = is_last and note.call < self._most_calls and any(note.inputs)
            self._thread.awaits = has_next or bool(self._outputs)

    def finish(self, limit_s: float) -> None:
        """Send the outputs that are computed in time."""
        until = time.monotonic() + limit_s
        while self._send_outputs() and time.monotonic() < until:
            time.sleep(_FINISH_S / 20)

    def _send_outputs(self) -> bool:
        """Send the outputs that are computed; return True if others are not yet."""
        waiting = [*self._outputs]
        self._outputs.clear()
        for note, arrays in waiting:
            computed = [array for array in arrays if array is not None]
            # A program that has got an array as a donation may use its memory.
            if any(array.is_deleted() for array in computed):
                continue
            if all(array.is_ready() for array in computed):
                outputs = tuple(map(_read_numbers, arrays))
                self._send(replace(note, outputs=outputs, results=_select(note.results, outputs)))
            else:
                self._outputs.append((note, arrays))
        return bool(self._outputs)

    @property
    def awaits_call(self) -> bool:
        """True if this thread's last program must not take JAX's fast path yet."""
        return getattr(self._thread, "awaits", False)

    def lower(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Lower a program by JAX's own function, `original`. If it was called to run the program,
        not by `.lower()`, note the program."""
        computation = original(*args, **options)
        if (call := _find_call()) is not None:
            with contextlib.suppress(Exception):
                self._note_call(computation, call.f_locals["args"], *args)
        return computation

    def _note_call(
        self, computation: Any, values: Any, jaxpr: Any, shardings: Sequence[Any], *rest: Any
    ) -> None:
        """Note a program at its first call, and its inputs at each call that is compared."""
        if not hasattr(computation, _NOTE):
            setattr(computation, _NOTE, None)
            note = self._note_program(computation, values, jaxpr, shardings, *rest)
            setattr(computation, _NOTE, note)
        note = getattr(computation, _NOTE)
        if note is None or not (note.is_main and _is_main_thread()):
            return
        self._send_outputs()
        self._calls[note.fingerprint] += 1
        call, inputs = self._calls[note.fingerprint], note.inputs
        if call > self._most_calls:
            return
        if call > 1:
            inputs = tuple(map(partial(_digest_input, True), values, shardings))
        texts = _select(note.arguments, inputs), _select(note.names, inputs)
        further = replace(note, before=self._before, call=call, inputs=inputs, operations="")
        further = replace(further, arguments=texts[0], names=texts[1], shardings=(), flags=())
        if call > 1 and any(inputs):
            self._send(further)
        self._thread.call = computation, further

    def _note_program(
        self, computation: Any, values: Any, jaxpr: Any, shardings: Sequence[Any], *rest: Any
    ) -> ProgramNote | None:
        """Return the note of a program that has collectives or inputs to compare."""
        from jax._src import cache_key, xla_bridge

        devices = tuple(computation._device_list)
        processes = sorted({device.process_index for device in devices})
        if len(processes) < 2 or xla_bridge.process_index() not in processes:
            return None
        # The program without source lines and addresses of callbacks.
        code = bytes(
            cache_key._canonicalize_ir(computation.stablehlo(), cache_key.IgnoreCallbacks.ALL)
        )
        flags = jaxworld.compiler_flags(computation._compiler_options_kvs)
        numbers = [device.id for device in devices]
        digest = hashlib.sha256(f"{numbers} {flags}".encode() + code).hexdigest()[:16]
        if digest in self._notes:
            return self._notes[digest]
        # A program needs no collectives if every device has all of its arrays.
        kinds = ("in_shardings", "out_shardings", "intermediate_shardings")
        about = [sharding for kind in kinds for sharding in computation.compile_args[kind]]
        waits, collectives = not all(map(_is_whole, about)), ""
        if waits and len(code) < _SMALL_BYTES:
            compiled = computation.compile().xla_executable.hlo_modules()[0].to_string()
            waits = bool(_COLLECTIVE.search(compiled))
            collectives = digest_collectives(compiled, numbers)
        inputs: tuple[str, ...] = ()
        if waits or not hlo.is_library(lowering.find_origin(jaxpr)[1]):
            inputs = tuple(map(partial(_digest_first_input, waits), values, shardings))
        if not waits and not any(inputs):
            return None
        debug_info = jaxpr.jaxpr.debug_info
        everybody = len(processes) == xla_bridge.process_count()
        mesh = lowering.find_mesh(computation.compile_args)
        note = ProgramNote(
            number=0,
            fingerprint=digest,
            name=lowering.strip_jit(computation._name),
            line=self._find_line(lowering.find_origin(jaxpr)[1]),
            processes=() if everybody else tuple(processes),
            is_main=waits and _is_main_thread(),
            before=self._before,
            arguments=tuple(map(_describe_type, jaxpr.in_avals, rest[_DONATIONS])),
            shardings=tuple(map(_describe_sharding, shardings)),
            mesh=_describe_mesh(mesh, numbers),
            flags=flags,
            collectives=collectives,
            names=tuple(map(str, debug_info.arg_names or ())),
            inputs=inputs,
            results=tuple(map(str, getattr(debug_info, "result_paths", None) or ())),
            operations=self._read_operations(computation) if len(code) < _MOST_BYTES else "",
        )
        self._send(note)
        self._notes[digest] = note
        return note

    def _send(self, note: ProgramNote) -> None:
        with self._lock:
            self._number += 1
            numbered = asdict(note) | {"number": self._number}
            self._channel.send({"event": WorkerEvent.PROGRAM, "program": numbered})

    def _read_operations(self, computation: Any) -> str:
        text = computation.stablehlo().operation.get_asm(
            enable_debug_info=True, large_elements_limit=_MOST_ELEMENTS
        )
        operations = []
        for operation, origin in origins.read_operations(text):
            if operation.strip(" )}\n"):
                words = operation.rpartition("\n")[2].split()
                operations.append((" ".join(words), self._shorten(origin.partition(" (")[0])))
        return pack_operations(operations)

    def _find_line(self, origin: str) -> str:
        """Return the user's line that calls the program; in a thread of a library, the line of the
        user's function, or the library's."""
        frames = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in _walk_frames()]
        own = [frame for frame in (*frames, origin) if not hlo.is_library(frame)]
        outside = [frame for frame in frames if _INSTALLED.search(frame)]
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


def digest_collectives(compiled: str, devices: Sequence[int]) -> str:
    """Return a digest of the collectives of a compiled program, equal for equal groups of devices
    however they are written; "" if unknown, because some of them are in a loop or a branch."""
    operations = _COLLECTIVE.findall(compiled)
    entry = compiled.rpartition("ENTRY ")[2].partition("\n}")[0]
    if len(_COLLECTIVE.findall(entry)) < len(operations):
        return ""
    layout = routes.DeviceLayout((), tuple(range(len(devices))), ())
    collectives = [
        (type_, kind, layout.read_group(f"replica_{rest}") or rest.partition(" ")[0])
        for type_, kind, rest in operations
    ]
    return hashlib.sha256(f"{[*devices]} {collectives}".encode()).hexdigest()[:16]


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _select(texts: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    """Return the texts, with "" in place of each text whose value is not compared."""
    return tuple(text if value else "" for text, value in zip(texts, values, strict=False))


def _find_call() -> Any:
    """Return the frame of JAX that calls a program; None if JAX only lowers it."""
    frame: Any = sys._getframe(2)
    for _ in range(6):
        if frame is None or frame.f_code.co_name == _CALL:
            return frame
        frame = frame.f_back
    return None


def _digest_first_input(waits: bool, value: Any, sharding: Any) -> str:
    """Return the text that is compared for an input at its program's first call: a few numbers of a
    replicated array, else the result of `_digest_input`."""
    if waits and _is_replicated(value) and value.is_ready():
        is_on_host = next(iter(value.devices())).platform == "cpu"
        return _read_numbers(value) if is_on_host or value.size <= _MOST_ELEMENTS else ""
    return _digest_input(waits, value, sharding)


def _digest_input(waits: bool, value: Any, sharding: Any) -> str:
    """Return the digest of an input that its program assumes to be equal on all hosts; "" for any
    other input. Without collectives (`waits` is False), also "" for plain numbers such as elapsed
    times, which may differ."""
    import jax
    import numpy as np

    if not _is_whole(sharding):
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


def _is_whole(sharding: Any) -> bool:
    """True if each device has the whole array."""
    return bool(getattr(sharding, "is_fully_replicated", True))


def _is_replicated(value: Any) -> bool:
    """True for an array of real numbers of which each of several processes has a full copy."""
    import jax
    import numpy as np

    return (
        isinstance(value, jax.Array)
        and not value.is_fully_addressable
        and value.is_fully_replicated
        and value.size > 0
        and jax.dtypes.issubdtype(value.dtype, np.number)
        and not jax.dtypes.issubdtype(value.dtype, np.complexfloating)
    )


def _read_numbers(array: Any) -> str:
    """Return the type and a few numbers of a replicated array that is computed; "" for None."""
    import numpy as np

    if array is None:
        return ""
    numbers = np.asarray(array.addressable_data(0)).ravel()
    numbers = numbers[:: -(-len(numbers) // _MOST_NUMBERS)]
    return " ".join((_describe_type(array.aval, False), *map(str, numbers.tolist())))


def _describe_type(aval: Any, is_donated: bool) -> str:
    from jax._src import dtypes

    if not hasattr(aval, "dtype"):
        return str(aval)
    text = f"{dtypes.short_dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"
    return f"{text}{DONATED}" if is_donated else text


def _describe_sharding(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else str(spec).replace("PartitionSpec", "P")


def _describe_mesh(mesh: Any, numbers: list[int]) -> str:
    axes = {} if mesh is None else dict(mesh.shape)
    text = ", ".join(f"{name}={size}" for name, size in axes.items()) or f"{len(numbers)} devices"
    return text if numbers == sorted(numbers) else f"{text} with the devices in the order {numbers}"
