"""Lowering of functions to StableHLO for the compiler, through JAX, without running anything.

The compiler's process gets the module as a portable artifact, the format inside of a `jax.export`,
which other versions of jaxlib can read. `jax.export` itself is not used: it needs the package
flatbuffers and registered classes for all pytrees in the arguments, loses which arguments are
donated and which layouts the compiler may choose, and accepts only `jax.jit`. So this module,
`topologies` and `compiler` use private parts of JAX.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._compile import hlo, origins, topologies
from kinetic._compile.program import EFFORTS, LoweredProgram
from kinetic._compile.topologies import CompileTarget
from kinetic.errors import UsageError

TPU = ("tpu",)
CALLBACKS = (
    "it calls back into Python on the host (jax.debug.print, io_callback, pure_callback), and that "
    "part cannot be compiled without a host"
)
_MAP = (
    "Compile jax.jit(jax.shard_map(...)) over kinetic.make_mesh(), or check a run of it on a "
    "simulated slice (compile_check)."
)
_ENTRANCE = "_pjit_lower"
"""JAX's private function that lowers every program of a process, however the program is wrapped."""
_OURS = "_is_of_kinetic"
_Replacement = Callable[..., Any]
_install_lock = threading.Lock()
_replacement_in_context: ContextVar[_Replacement | None] = ContextVar(
    "kinetic_lowering", default=None
)
_replacement_for_process: _Replacement | None = None
_PALLAS_CHIPS = {
    "v3": ("v3", 1),
    "v4": ("v4", 2),
    "v5litepod": ("v5e", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
    "tpu7x": ("7x", 1),
}
"""For each family: Pallas's name of the chips, and the number of cores in one device."""
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Lowered(NamedTuple):
    """A program and the bytes of its module."""

    program: LoweredProgram
    module: bytes


def lower(target: CompileTarget, function: Any, args: Any, kwargs: Any) -> Lowered:
    """Lower a function for the chips of a target. Only the shapes of array arguments are used.

    Raises:
        UsageError: The function cannot be lowered for a TPU.
    """
    own = f"{origins.name_function(function)} ({origins.name_source(function)})"
    if "pmap" in getattr(getattr(function, "lower", None), "__qualname__", ""):
        raise UsageError(f"{own} uses jax.pmap, which always takes this machine's devices. {_MAP}")
    with emulate_chip(target.topology.family):
        try:
            return _lower(target, function, args, kwargs)
        except ValueError as error:
            if calls_back(error):
                raise UsageError(
                    f"{own} cannot be compiled here: {CALLBACKS}. Compile it without these calls."
                ) from error
            raise


def calls_back(error: Exception) -> bool:
    """True if lowering failed because of a callback to the host."""
    return "specified backend cpu" in str(error)


def _lower(target: CompileTarget, function: Any, args: Any, kwargs: Any) -> Lowered:
    import jax

    source, name = origins.name_source(function), origins.name_function(function)
    _refuse_keras(name, jax.tree.leaves((args, kwargs)))
    args, kwargs = jax.tree.map(_describe_shape, (args, kwargs))
    _check_sizes(name, jax.tree.leaves((args, kwargs)))
    names = list[tuple[str, Any]]()
    maker = type(function).__module__.partition(".")[0]
    if not hasattr(function, "lower") or maker == "equinox":
        names = _name_arrays(function, args, kwargs)
        function, args, kwargs = _wrap_arrays(function, args, kwargs)
    elif maker == "flax":  # Flax numbers the leaves of its modules.
        names = _name_arrays(function, args, kwargs)
    with _lower_for_tpus(names) as computations:
        function.lower(*args, **kwargs)
    if not computations:
        raise UsageError(
            f"The method lower() of {function!r} does not lower a program with JAX. Pass the "
            "function that it wraps."
        )
    return describe(computations[-1], target, source)


def _check_sizes(name: str, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not all(isinstance(length, int) for length in getattr(leaf, "shape", ())):
            raise UsageError(
                f"An argument of {name} has the shape {leaf.shape}, but a TPU program has fixed "
                "sizes. Give numbers, and compile once for each size that matters."
            )


def _wrap_arrays(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a jitted function that takes only the arrays, their shapes, and {} as keywords. All
    other arguments become constants, whereas Equinox's own `lower` would make them shapes. The
    function donates the arguments that a jitted function inside it donates."""
    import jax

    leaves, tree = jax.tree.flatten((args, kwargs))
    numbers = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def call(*arrays: Any) -> list[Any]:
        filled = dict(enumerate(leaves)) | dict(zip(numbers, arrays, strict=True))
        own, named = jax.tree.unflatten(tree, [filled[at] for at in range(len(leaves))])
        outputs = jax.tree.leaves(function(*own, **named))
        return [output for output in outputs if isinstance(output, jax.Array)]

    call.__name__ = origins.name_function(function)
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    # JAX's errors name this function's source line.
    call.__wrapped__ = origins.unwrap(function)  # type: ignore[attr-defined]
    shapes = [leaves[at] for at in numbers]
    return jax.jit(call, donate_argnums=_find_donated(call, shapes)), shapes, {}


def _refuse_keras(name: str, leaves: Sequence[Any]) -> None:
    """Refuse Keras models, layers and optimizers: their variables would not be arguments."""
    for leaf in leaves:
        if _is_from_keras(leaf) and hasattr(leaf, "variables"):
            raise UsageError(
                f"{name} takes the Keras object {type(leaf).__name__} as an argument, but not the "
                "variables of this object. Write the step with stateless_call and stateless_apply, "
                "and give it lists of variables; or check a run of `fit` on a simulated slice "
                "(compile_check)."
            )


def _is_from_keras(leaf: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in type(leaf).__mro__)


def _name_arrays(function: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a call with the names that `jax.jit` gives them: `params['w']`."""
    import jax

    own: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # No signature.
        parameters = inspect.signature(function).parameters.values()
        own = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, _EITHER)
        ]
    own += [f"args[{index}]" for index in range(len(own), len(args))]
    named = {**dict(zip(own, args, strict=False)), **dict(sorted(kwargs.items()))}
    return [
        (f"{name}{jax.tree_util.keystr(path)}", leaf)
        for name, tree in named.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]


def _find_donated(call: Any, shapes: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of arguments that an inner jitted function donates."""
    import jax

    jaxpr = jax.make_jaxpr(call)(*shapes).jaxpr
    donated = {
        variable
        for equation in jaxpr.eqns
        for variable, is_donated in zip(
            equation.invars, equation.params.get("donated_invars", ()), strict=False
        )
        if is_donated
        if not hasattr(variable, "val")  # Skip literals.
    }
    return tuple(at for at, variable in enumerate(jaxpr.invars) if variable in donated)


def _describe_shape(leaf: Any) -> Any:
    """Return the shape of an array, with its sharding if committed; anything else unchanged."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    if _is_from_keras(leaf) and hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        value = getattr(leaf, "_value", None)  # None if the variable is not initialized.
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if value is None
            else _describe_shape(value)
        )
    return leaf


@contextlib.contextmanager
def _lower_for_tpus(names: Sequence[tuple[str, Any]]) -> Iterator[list[Any]]:
    """Lower everything in the block for TPUs, and yield the list of lowered computations.

    Args:
        names: Names and shapes of the arguments; may be empty.
    """
    computations: list[Any] = []

    def lower_for_tpus(original: Callable[..., Any], jaxpr: Any, *args: Any, **options: Any) -> Any:
        computations.append(
            original(
                _rename_arguments(jaxpr, names), *args, **(options | {"lowering_platforms": TPU})
            )
        )
        return computations[-1]

    with override_entrance(lower_for_tpus):
        yield computations


def _rename_arguments(closed: Any, names: Sequence[tuple[str, Any]]) -> Any:
    """Rename the arguments of a program, if its arguments have the shapes in `names`."""
    shapes = [aval.shape for _, aval in names]
    if not names or shapes != [getattr(aval, "shape", None) for aval in closed.in_avals]:
        return closed
    debug_info = closed.jaxpr.debug_info._replace(arg_names=tuple(name for name, _ in names))
    return closed.replace(jaxpr=closed.jaxpr.replace(debug_info=debug_info))


@contextlib.contextmanager
def emulate_chip(family: str) -> Iterator[None]:
    """Make Pallas treat this machine as one with a chip of this family, within the block."""
    if not any(name.startswith("jax._src.pallas") for name in sys.modules):
        yield
        return
    from jax._src.pallas.mosaic import tpu_info

    version, cores = _PALLAS_CHIPS[family]
    chip = tpu_info.ChipVersion(version)
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(chip, cores)
    try:
        yield
    finally:
        tpu_info.registry.pop("cpu", None)
        tpu_info.get_tpu_info.cache_clear()


@contextlib.contextmanager
def override_entrance(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the block, JAX calls `replacement` for each program that this thread lowers. The first
    argument of `replacement` is JAX's own function."""
    _install_entrance()
    token = _replacement_in_context.set(replacement)
    try:
        yield
    finally:
        _replacement_in_context.reset(token)


def replace_entrance(replacement: Callable[..., Any]) -> None:
    """From now on, JAX calls `replacement` for each program that this process lowers. Its first
    argument is JAX's own function, or a function that calls the earlier replacement."""
    global _replacement_for_process
    if (earlier := _replacement_for_process) is not None:
        newest = replacement

        def replacement(original: Any, *args: Any, **options: Any) -> Any:
            return newest(functools.partial(earlier, original), *args, **options)

    _replacement_for_process = replacement
    _install_entrance()


def _install_entrance() -> None:
    """Replace JAX's function by one that calls the current replacement, if any. JAX's own function
    is never put back, since that could undo a later change by another thread."""
    from jax._src import pjit

    with _install_lock:
        original = getattr(pjit, _ENTRANCE)
        if hasattr(original, _OURS):
            return
        _hide_frames()

        def enter(*args: Any, **options: Any) -> Any:
            replacement = _replacement_in_context.get() or _replacement_for_process
            return (
                original(*args, **options)
                if replacement is None
                else replacement(original, *args, **options)
            )

        setattr(enter, _OURS, True)
        setattr(pjit, _ENTRANCE, enter)


@functools.cache
def _hide_frames() -> None:
    """Leave kinetic's frames out of the tracebacks of users' errors and out of the source lines of
    operations, as JAX does with its own frames."""
    from jax._src import source_info_util, traceback_util

    own = f"{Path(__file__).parents[1]}/"
    traceback_util.register_exclusion(own)
    source_info_util.register_exclusion(own)


def describe(
    computation: Any, target: CompileTarget | None, source: str = "", name: str = ""
) -> Lowered:
    """Return the program that JAX has lowered, with its serialized module. `source` is the
    "file:line" of the program's function; `name` is the function's name, "" for that of the
    module."""
    from jax._src import config
    from jax._src.interpreters import pxla

    about = computation.compile_args
    lowered = computation.stablehlo()
    inputs_open, outputs_open = pxla.get_prop_to_input_output(
        about["in_shardings"], about["out_shardings"], len(about["ordered_effects"])
    )
    devices = computation._device_list
    mesh = find_mesh(about)
    lines = origins.read_origins(lowered.operation.get_asm(enable_debug_info=True))
    if hlo.is_library(source):  # Equinox and `jax.pmap` jit a function of theirs.
        name, source = origins.find_own(name, lines) or (name, source)
    program = LoweredProgram(
        name=name or strip_jit(computation._name),
        positions=topologies.find_positions(target, tuple(devices)),
        digest=_digest(lowered),
        origins=lines,
        source=source,
        axes=() if mesh is None else tuple(mesh.shape.items()),
        inputs_open=tuple(inputs_open),
        outputs_open=tuple(outputs_open),
        tuples=bool(about["tuple_args"]),
        shardy=bool(config.use_shardy_partitioner.value),
        options=_read_efforts() | dict(computation._compiler_options_kvs),
        weight=sum(map(measure_size, (*about["global_in_avals"], *about["global_out_avals"]))),
    )
    return Lowered(program, _serialize(lowered))


def _serialize(module: Any) -> bytes:
    """Serialize a module for compilers up to a month older than this JAX, and all newer ones."""
    from jax._src.lib import _jax
    from jax._src.lib.mlir.dialects import hlo

    month = hlo.StablehloCompatibilityRequirement.WEEK_4
    version = hlo.get_version_from_compatibility_requirement(month)
    make: Callable[..., bytes] = _jax.mlir.serialize_portable_artifact
    return make(module, version, True)


_LEVELS = {"UNKNOWN": 0, "O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""XLA's numbers for the values of an effort level; https://openxla.org/xla/effort_levels."""


def _read_efforts() -> dict[str, Any]:
    """Return JAX's settings of the compiler's effort that differ from the defaults."""
    from jax._src import config

    names = (name for name in sorted(EFFORTS) if hasattr(config, name))
    values = {name: getattr(config, name).value for name in names}
    numbers = {name: _LEVELS.get(value, value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number}


def _digest(module: Any) -> str:
    """Return the SHA-256 of a module without its source lines, so that an edit which only moves
    lines causes no new compile."""
    return hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode()).hexdigest()


def strip_jit(name: str) -> str:
    """Return the function's name from a module's name: "step" from "jit(step)" or "jit_step"."""
    inner = name.removeprefix("jit")
    return inner[1:-1] if inner.startswith("(") else inner.removeprefix("_") or name


def find_mesh(about: dict[str, Any]) -> Any:
    """Return the mesh over which a program's arrays are split; None without one."""
    shardings = (*about["in_shardings"], *about["out_shardings"], *about["intermediate_shardings"])
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    context_mesh = about["context_mesh"]
    mesh_of_program = next(
        (mesh for mesh in meshes if mesh is not None and not mesh.empty), context_mesh
    )
    return None if mesh_of_program is None or mesh_of_program.empty else mesh_of_program


def measure_size(aval: Any) -> int:
    """Return the size in bytes of an abstract array (shape and type), over all its shards."""
    item_bytes = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * int(item_bytes)


def find_origin(closed: Any) -> tuple[str, str]:
    """Return the name of a program's function, and its "file:line" or "". For a function of JAX, as
    with `jax.pmap` or a kernel outside of `jax.jit`, return those of the first inner function that
    is in no library."""
    own = (_read_origin(inner) for inner in _walk_programs(closed.jaxpr))
    origin = next((inner for inner in own if not hlo.is_library(inner[1])), None)
    return origin or _read_origin(closed.jaxpr)


def count_equations(closed: Any) -> int:
    """Return the number of equations of a program and of the programs inside it."""
    return sum(len(inner.eqns) for inner in _walk_programs(closed.jaxpr))


def _walk_programs(jaxpr: Any) -> Iterator[Any]:
    from jax._src import core

    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in core.jaxprs_in_params(equation.params):
            yield from _walk_programs(inner)


def _read_origin(jaxpr: Any) -> tuple[str, str]:
    debug_info = getattr(jaxpr, "debug_info", None)
    name = str(getattr(debug_info, "func_name", "") or "a program")
    return name, str(getattr(debug_info, "func_src_info", "")).partition(" at ")[2]
