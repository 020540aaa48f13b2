"""Programs that a run with `compile_check` saves for the compiler, and runs that save none."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compile_for import needs_libtpu

import kinetic
from kinetic._compile import lowering
from kinetic._compile.checked import ProgramCheck, Skipped, read_programs
from kinetic._compile.lowering import Lowered
from kinetic._compile.processes import Compilers
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators.resolve import resolve
from kinetic._host.worker.programs import Recorder
from kinetic.errors import UsageError

LARGE = np.ones((512, 512), dtype=np.float32)


def record(folder: Path, act: Any) -> None:
    with lowering.override_entrance(Recorder(folder, "/tree").lower):
        act()


def test_each_program_is_kept_once_and_single_operations_are_counted(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    def run() -> None:
        for _ in range(2):
            jax.jit(lambda x: jnp.sin(x) @ x)(LARGE)
        jax.jit(lambda x: x @ x @ x @ x)(LARGE)
        jax.jit(lambda x: x + 3)(np.ones(3))
        jnp.sin(np.ones(3))

    record(tmp_path, run)
    programs = read_programs(tmp_path)
    assert [each.program.name for each in programs] == ["<lambda>"] * 3
    assert {each.program.source.partition(":")[0] for each in programs} == {__file__}
    assert all(each.module and each.program.positions == (0,) for each in programs)
    skipped = Skipped.read((tmp_path / "skipped.json").read_bytes())
    assert (skipped.tree, skipped.small) == ("/tree", 1)


def test_operations_of_jax_are_counted_however_much_data_they_have(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    def run() -> None:
        x = jnp.ones((1024, 1024))
        jax.random.normal(jax.random.key(0), x.shape) + jnp.where(x > 0, x @ x, jax.nn.relu(x))
        jax.lax.while_loop(lambda x: x[0, 0] < 2, lambda x: x + 1, x)

    record(tmp_path, run)
    assert [each.program.name for each in read_programs(tmp_path)] == ["<lambda>"]
    assert Skipped.read((tmp_path / "skipped.json").read_bytes()).small >= 4


def test_functions_of_pmap_and_shard_map_are_programs_of_their_own(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def chain(x: Any) -> Any:
        for _ in range(8):
            x = jnp.sin(x) * 2
        return x

    whole = PartitionSpec()
    mesh = jax.make_mesh((1,), ("a",))
    mapped = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=whole, out_specs=whole))
    little = np.ones((1, 8), np.float32)
    record(tmp_path, lambda: (jax.pmap(chain)(little), mapped(little)))
    programs = [each.program for each in read_programs(tmp_path)]
    assert [each.name for each in programs] == ["chain"] * 2
    assert {each.source.partition(":")[0] for each in programs} == {__file__}


def test_a_function_of_filter_jit_has_its_line(tmp_path: Path) -> None:
    import equinox
    import jax

    linear = equinox.nn.Linear(512, 512, key=jax.random.key(0))

    @equinox.filter_jit
    def call(model: Any, x: Any) -> Any:
        return jax.vmap(model)(x) + 1

    record(tmp_path, lambda: call(linear, LARGE))
    programs = {each.program.name: each.program for each in read_programs(tmp_path)}
    assert programs["call"].source.startswith(f"{__file__}:")


def test_the_function_runs_as_it_would_without(tmp_path: Path) -> None:
    import jax

    calls = []
    record(tmp_path, lambda: calls.append(jax.jit(lambda x: x @ x)(LARGE)[0, 0]))
    assert calls == [512.0]


def test_callbacks_to_the_host_are_refused_with_the_reason(tmp_path: Path) -> None:
    import jax

    def shout(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    record(tmp_path, lambda: jax.jit(shout)(LARGE))
    target = CompileTarget(resolve("tpu-v6e-1"))
    check = ProgramCheck(tmp_path, target, Compilers(target))
    assert [report.name for report in check.compile()] == ["shout"]
    report = check.report
    assert not report.ok
    assert "1 program compiled for tpu-v6e-1: 1 not compiled" in str(report)
    assert "calls back into Python on the host" in str(report)


def test_a_kernel_that_only_the_real_chip_can_run_is_kept(tmp_path: Path) -> None:
    import jax
    from jax.experimental import pallas as pl

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    @jax.jit
    def kernel(x: Any) -> Any:
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(ValueError, match="interpret mode") as failed:
        record(tmp_path, lambda: kernel(np.ones((8, 128), dtype=np.float32)))
    ours = Path(kinetic.__file__).parent
    assert not [entry for entry in failed.traceback if Path(entry.path).is_relative_to(ours)]
    (lowered,) = read_programs(tmp_path)
    assert (lowered.program.name, lowered.program.refused) == ("kernel", "")
    assert b"tpu_custom_call" in lowered.module


def test_a_small_kernel_that_is_written_for_the_cores_of_a_chip_is_kept(tmp_path: Path) -> None:
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((128,), np.float32),
        mesh=pltpu.create_tensorcore_mesh("core", num_cores=1),
        scratch_types={"scratch": pltpu.VMEM((128,), np.float32)},
    )
    def fill(out: Any, scratch: Any) -> None:
        scratch[...] = jax.numpy.full_like(scratch, 42.0)
        pltpu.sync_copy(scratch, out)

    with pytest.raises(ValueError, match="interpret mode"):
        record(tmp_path, fill)
    (lowered,) = read_programs(tmp_path)
    assert (lowered.program.name, lowered.program.refused) == ("fill", "")
    assert lowered.program.source.startswith(f"{__file__}:")
    assert b"tpu_custom_call" in lowered.module


@needs_libtpu
def test_kernels_are_lowered_for_the_chip_of_the_slice_not_for_this_processor() -> None:
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    cores = []

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def kernel(x: Any) -> Any:
        cores.append(pltpu.get_tpu_info().num_cores)
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    numbers = jax.ShapeDtypeStruct((8, 128), np.int32)
    for name in ("tpu-v5p-8", "tpu-v6e-4"):
        lowering.lower(CompileTarget(resolve(name)), kernel, (numbers,), {})
    assert (cores[0], cores[-1]) == (2, 1)
    with pytest.raises(ValueError, match="Unsupported TPU device kind"):
        pltpu.get_tpu_info()


class Doubling:
    def __call__(self, x: Any) -> Any:
        return x * 2


def lower_on_one_chip(function: Any, *shapes: Any) -> Lowered:
    return lowering.lower(CompileTarget(resolve("tpu-v6e-1")), function, shapes, {})


@needs_libtpu
def test_functions_of_any_kind_have_their_name_and_line() -> None:
    import jax

    numbers = jax.ShapeDtypeStruct((8, 128), np.float32)
    for function, name in (
        (Doubling(), "Doubling"),
        (functools.partial(lambda a, x: x * a, 2), "<lambda>"),
        (eval("lambda x: x * 2"), "<lambda>"),
    ):
        program = lower_on_one_chip(function, numbers).program
        assert program.name == name
    assert lower_on_one_chip(Doubling(), numbers).program.source.startswith(f"{__file__}:")
    with pytest.raises(jax.errors.TracerBoolConversionError, match=f"<lambda> at {__file__}"):
        lower_on_one_chip(lambda x: x if x[0, 0] > 0 else -x, numbers)


class LoweringBeside:
    """A function whose `lower` waits, before it returns, for `other` to run in another thread."""

    def __init__(self, function: Any, other: Any) -> None:
        self._function, self._beside = function, other

    def lower(self, *args: Any) -> Any:
        import jax

        lowered = jax.jit(self._function).lower(*args)
        thread = threading.Thread(target=self._beside)
        thread.start()
        thread.join()
        return lowered

    def __call__(self) -> None:
        raise AssertionError


@needs_libtpu
def test_programs_of_other_threads_are_left_alone() -> None:
    """Another thread lowers and runs programs while this thread lowers one: the report is about
    this thread's program."""
    import jax

    numbers, results = jax.ShapeDtypeStruct((8, 128), np.float32), []

    def double(x: Any) -> Any:
        return x * 2

    def other() -> None:
        inner = LoweringBeside(double, lambda: results.append(jax.jit(lambda x: x + 1)(1)))
        results.append(lower_on_one_chip(inner, numbers).program.name)

    program = lower_on_one_chip(LoweringBeside(double, other), numbers)
    assert program.program.name == "double"
    assert results == [2, "double"]
    assert jax.jit(double)(3) == 6, "programs after it run here"


def test_what_has_no_place_on_the_chip_is_refused_with_what_to_do() -> None:
    import jax
    from jax import export

    def shout(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x

    numbers = jax.ShapeDtypeStruct((8,), np.float32)
    (length,) = export.symbolic_shape("length")
    open_ = jax.ShapeDtypeStruct((length,), np.float32)
    for function, shape, message in (
        (shout, numbers, rf"^shout \({__file__}:\d+\) .* calls back into Python on the host"),
        (jax.pmap(shout), numbers, r"jax\.shard_map"),
        (shout, open_, r"shout has the shape \(length,\), .* Give numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            lower_on_one_chip(function, shape)


def test_a_folder_without_programs_is_an_empty_report(tmp_path: Path) -> None:
    target = CompileTarget(resolve("tpu-v6e-1"))
    check = ProgramCheck(tmp_path / "none", target, Compilers(target))
    assert (check.count, list(check.compile())) == (0, [])
    assert check.report.ok
    assert str(check.report) == "0 programs compiled for tpu-v6e-1: nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator": "gpu-l4"}, "gpu-l4 is not a TPU"),
        ({"accelerator": "cpu"}, "cpu is not a TPU"),
        ({"accelerator": "tpu-v6e-8", "slices": (1, 2)}, "does not work for elastic jobs"),
        ({"accelerator": "tpu-v6e-8", "joins_jax": "program"}, "Run a script or a module"),
    ],
)
def test_where_it_cannot_work_a_sentence_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kinetic.run(**options, compile_check=True)(lambda: None)
