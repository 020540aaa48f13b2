"""The process that compiles one program with the real compiler.

A crash of the compiler, or a lack of memory, ends only this process. The process needs jaxlib and
libtpu, but not JAX, whose import takes a second. It reads `program.json`, `target.json`
and `module.mlir` in a folder, and writes `report.json` there. Its stderr has the output of the
compiler's C++ code.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._compile import costs, hlo, shortage, topologies
from kinetic._compile.program import EFFORTS, LoweredProgram
from kinetic._compile.report import CompileReport, CompileVerdict, MemoryUse
from kinetic._compile.routes import DeviceLayout, name_axes_between
from kinetic._compile.topologies import CompileTarget, TpuCompiler
from kinetic._store import files
from kinetic._system import processes

REPORT, PROGRAM, TARGET, MODULE = "report.json", "program.json", "target.json", "module.mlir"
_DUMP, _OPTIMIZED, _LOWERED = "dump", "*.after_optimizations.txt", "*.before_optimizations.txt"
_BUFFERS = 12


def main() -> None:
    """Compile the program in the folder named on the command line, and write the report there. The
    process ends when its parent does."""
    folder = Path(sys.argv[1])
    processes.die_with_parent(int(sys.argv[2]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Threads of NumPy would waste processor time.
    gc.disable()  # Almost all objects live until the process ends.
    compiler = TpuCompiler(*sys.argv[3:])
    program = LoweredProgram.read((folder / PROGRAM).read_bytes())
    target = CompileTarget.read((folder / TARGET).read_bytes())
    report = compile_program(program, target, folder, compiler)
    files.save(folder / REPORT, [json.dumps(report.to_json()).encode()])


def compile_program(
    program: LoweredProgram, target: CompileTarget, folder: Path, compiler: TpuCompiler
) -> CompileReport:
    """Compile the module in a folder, in this process."""
    begun = time.monotonic()
    about: dict[str, Any] = {
        "name": program.name,
        "source": program.source,
        "accelerator": target.topology.name,
        "family": target.topology.family,
        "slices": target.slices,
        "devices": len(program.positions),
        "versions": str(compiler),
    }
    try:
        devices = topologies.describe(target, compiler.library)
        own = [devices[at] for at in program.positions]
        executable = _compile(program, folder, own)
    except Exception as error:  # noqa: BLE001 - the compiler's message is the result
        took_s = time.monotonic() - begun
        return _report_error(str(error), about | {"took_s": took_s}, folder)
    fits = CompileReport(
        **about,
        verdict=CompileVerdict.FITS,
        memory=_read_memory(executable.get_compiled_memory_stats()),
        took_s=time.monotonic() - begun,
    )
    try:
        read = _read_dump(folder, _OPTIMIZED)
    except (OSError, StopIteration):
        return replace(fits, detail="The compiler did not dump its program: only memory is known.")
    return replace(
        fits,
        buffers=tuple(costs.find_buffers(read, _BUFFERS)),
        collectives=tuple(costs.find_collectives(read, _lay_out(program, own))),
        flops=costs.count_flops(read),
        hbm_bytes=costs.count_bytes(read),
        kernels=costs.count_kernels(read),
    )


def _compile(program: LoweredProgram, folder: Path, devices: list[Any]) -> Any:
    """Compile a module with libtpu, like `jax.stages.Lowered.compile`, and dump the compiled
    program: `as_text` cannot read the output of a libtpu newer than jaxlib."""
    from jaxlib import _jax, xla_client  # type: ignore[attr-defined]
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy  # noqa: F401 - registers the dialect with the context

    with ir.Context() as context:
        module = _jax.mlir.deserialize_portable_artifact((folder / MODULE).read_bytes(), context)
        return devices[0].client.compile(
            module,
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=_make_options(program, folder, devices),
        )


def _make_options(program: LoweredProgram, folder: Path, devices: list[Any]) -> Any:
    import numpy as np
    from jaxlib import xla_client

    own = dict(program.options)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    ids = np.array([[device.id for device in devices]])
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    options.parameter_is_tupled_arguments = program.tuples
    options.profile_version = -1  # Do not search for a profile.
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = program.shardy
    build.allow_spmd_sharding_propagation_to_parameters = list(program.inputs_open)
    build.allow_spmd_sharding_propagation_to_output = list(program.outputs_open)
    for name in EFFORTS & own.keys():
        setattr(build, name, own.pop(name))
    dumps = {"xla_dump_to": str(folder / _DUMP), "xla_dump_hlo_as_text": True}
    options.env_option_overrides = list((own | dumps).items())
    return options


def _read_memory(stats: Any) -> MemoryUse:
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )


def _read_dump(folder: Path, pattern: str) -> hlo.Module:
    return hlo.read(next((folder / _DUMP).glob(pattern)).read_text(errors="replace"))


def _report_error(message: str, about: dict[str, Any], folder: Path) -> CompileReport:
    """Return the report on a failed compile. If the program is too large, the report has the
    lacking memory; otherwise the compiler's message."""
    try:
        lowered = _read_dump(folder, _LOWERED)
    except (OSError, StopIteration):
        lowered = hlo.Module("", {}, {})
    why = shortage.explain_core(message, lowered)
    if why or "RESOURCE_EXHAUSTED" not in message:
        detail = f"{why}.\n{message}" if why else message
        return CompileReport(**about, verdict=CompileVerdict.REFUSED, detail=detail)
    return CompileReport(
        **about,
        verdict=CompileVerdict.TOO_LARGE,
        detail=message,
        memory=shortage.read_shortage(message),
        buffers=shortage.read_allocations(message)[:_BUFFERS],
    )


def _lay_out(program: LoweredProgram, devices: list[Any]) -> DeviceLayout:
    """Return the mesh of the compiled program. libtpu compiles for one slice, so the partitions of
    the program are the devices of the first slice."""
    slices = [topologies.find_slice(device) for device in devices]
    own = [at for at, index in enumerate(slices) if index == slices[0]]
    return DeviceLayout(
        program.axes,
        tuple(own),
        tuple(slices[at] for at in own),
        name_axes_between(program.axes, slices),
        len(set(slices)),
    )
