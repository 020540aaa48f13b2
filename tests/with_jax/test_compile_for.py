"""The real TPU compiler on this machine: its reports agree with figures from JAX's public API."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic._compile import lowering, topologies
from kinetic._compile.report import CompileReport, CompileVerdict, summarize
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators.chips import CHIPS
from kinetic._core.accelerators.families import TPUS
from kinetic._core.accelerators.resolve import resolve
from kinetic.errors import PreflightError, UnknownAccelerator, UsageError, UsageTypeError

needs_libtpu = pytest.mark.skipif(
    not topologies.is_installed(), reason="libtpu is not installed: pip install libtpu"
)
PATIENCE_S = 240.0
LAYERS, WIDTH, BATCH = 4, 512, 256


def slice_to_compile_for(name: str = "tpu-v6e-4", slices: int = 1) -> kinetic.CompileSlice:
    return kinetic.compile_for(name, slices=slices)


def build_step() -> tuple[Any, Any, Any]:
    """Return a training step of a model with several layers, its weights and its batch; weights and
    batch are shapes with shardings."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = kinetic.make_mesh()

    def shape(dims: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        split = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=split)

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = batch
            for layer in range(LAYERS):
                hidden = jax.nn.relu(hidden @ weights[layer])
            return jnp.mean(hidden.astype(jnp.float32) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = shape((LAYERS, WIDTH, WIDTH), None, "fsdp")
    return jax.jit(step, donate_argnums=0), weights, shape((BATCH, WIDTH), ("data", "fsdp"))


# -- tests that need no compiler -------------------------------------------------------------------


def test_every_family_of_tpus_has_its_chip() -> None:
    assert {family.name for family in TPUS} == CHIPS.keys()


@pytest.mark.parametrize("name", ["gpu-l4", "cpu"])
def test_other_accelerators_are_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(UsageError, match="is not a TPU, and only the TPU compiler"):
        kinetic.compile_for(name)


def test_a_wrong_name_or_number_of_slices_is_refused() -> None:
    with pytest.raises(UnknownAccelerator, match="tpu-v6e-16"):
        kinetic.compile_for("tpu-v6e-17")
    with pytest.raises(UsageError, match="slices="):
        kinetic.compile_for("tpu-v6e-16", slices=0)


@pytest.mark.skipif(topologies.is_installed(), reason="libtpu is installed")
def test_without_the_compiler_it_says_what_to_install() -> None:
    with pytest.raises(PreflightError, match=r"pip install 'jax>=0.10' libtpu"):
        slice_to_compile_for().__enter__()


def test_nothing_is_compiled_for_outside_of_the_context() -> None:
    assert topologies.current.get() is None
    assert kinetic.num_slices() == 1


# -- reports ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_slices() -> tuple[CompileReport, Any]:
    """The report on a training step for two slices, and JAX's own results for the same step."""
    with slice_to_compile_for(slices=2) as target:
        step, weights, batch = build_step()
        bare = step.lower(weights, batch).compile()
        return target.compile(step, weights, batch), bare


@needs_libtpu
def test_the_mesh_is_that_of_the_real_slices() -> None:
    with slice_to_compile_for("tpu-v6e-16", slices=2) as target:
        mesh = kinetic.make_mesh(ici={"fsdp": 4, "tensor": 4})
        assert kinetic.num_slices() == 2
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 4}
    assert {device.device_kind for device in mesh.devices.flat} == {"TPU v6 lite"}
    assert [topologies.find_slice(d) for d in mesh.devices.reshape(2, 16)[:, 0]] == [0, 1]
    assert len(target.devices) == 32
    assert topologies.current.get() is None


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("tpu-v3-4", 8, "TPU v3"),
        ("tpu-v4-8", 8, "TPU v4"),
        ("tpu-v5e-8", 8, "TPU v5 lite"),
        ("tpu-v5p-8", 8, "TPU v5"),
        ("tpu7x-4", 8, "TPU7x"),
    ],
)
def test_a_chip_is_as_many_devices_as_on_its_machines(name: str, devices: int, kind: str) -> None:
    slice_devices = slice_to_compile_for(name).devices
    assert (len(slice_devices), {device.device_kind for device in slice_devices}) == (
        devices,
        {kind},
    )


@needs_libtpu
def test_axes_need_not_be_those_of_the_torus() -> None:
    with slice_to_compile_for("tpu-v6e-256"):  # 16 x 16 chips
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": 4})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 64, "tensor": 4}
    assert len({device.id for device in mesh.devices.flat}) == 256


@needs_libtpu
def test_the_memory_is_what_jax_says(two_slices: tuple[CompileReport, Any]) -> None:
    report, bare = two_slices
    stats, memory = bare.memory_analysis(), report.memory
    assert report.fits
    assert memory.arguments == stats.argument_size_in_bytes
    assert memory.outputs == stats.output_size_in_bytes
    assert memory.aliased == stats.alias_size_in_bytes
    assert memory.temporaries == stats.temp_size_in_bytes
    assert memory.code == stats.generated_code_size_in_bytes


@needs_libtpu
def test_the_figures_are_those_by_hand(two_slices: tuple[CompileReport, Any]) -> None:
    report, bare = two_slices
    weights, batch = LAYERS * WIDTH * WIDTH * 2, BATCH * WIDTH * 2
    assert report.memory.arguments == weights // 4 + batch // 8
    assert report.memory.aliased == weights // 4
    products = 3 * LAYERS - 1  # No gradient for the batch.
    assert report.flops == products * 2 * (BATCH // 8) * WIDTH * WIDTH
    assert report.flops == pytest.approx(bare.cost_analysis()["flops"], rel=0.05)
    between = [each for each in report.collectives if each.between_slices]
    assert {each.axes for each in between} == {"data"}
    assert sum(each.bytes for each in between) == weights // 4
    gathers = [each for each in report.collectives if each.kind == "all-gather"]
    assert {(each.axes, each.between_slices) for each in gathers} == {("fsdp", False)}
    assert f"step ({__file__}:" in str(report)


@needs_libtpu
def test_what_is_too_large_is_said_with_how_much_it_is(home: Path) -> None:
    import jax
    import jax.numpy as jnp

    report = slice_to_compile_for().compile(
        lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((400_000, 400_000), jnp.bfloat16)
    )
    assert report.verdict is CompileVerdict.TOO_LARGE
    assert "Ran out of memory" in report.detail
    assert report.memory.total > 290 << 30
    assert 31 << 30 < report.hbm_bytes_there < 32 << 30
    assert "TOO LARGE on tpu-v6e-4" in str(report)


@needs_libtpu
def test_the_smallest_slice_that_holds_it_is_found() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def build() -> tuple[Any, ...]:
        split = NamedSharding(kinetic.make_mesh(), PartitionSpec("fsdp"))
        half = jax.ShapeDtypeStruct((1 << 15, 1 << 20), jnp.bfloat16, sharding=split)  # 64 GiB
        return jax.jit(lambda x: x + 1, donate_argnums=0), half

    reports = slice_to_compile_for("tpu-v6e-4").find_fit(build)
    assert [(each.accelerator, each.verdict) for each in reports] == [
        ("tpu-v6e-1", CompileVerdict.TOO_LARGE),
        ("tpu-v6e-4", CompileVerdict.FITS),
    ]


@needs_libtpu
@pytest.mark.parametrize(
    ("bounds", "tried", "message"),
    [
        ({"within": 0}, [], "after 0 sizes without one that fits, and left out the 8 from "
         "tpu-v6e-1 to tpu-v6e-256."),
        ({"most_sizes": 1}, ["tpu-v6e-1"], "after 1 size without one that fits, and left out "
         "the 7 from tpu-v6e-4 to tpu-v6e-256."),
    ],
)  # fmt: skip
def test_a_search_that_ends_before_says_which_sizes_it_left_out(
    bounds: dict[str, Any], tried: list[str], message: str
) -> None:
    import jax

    def build() -> tuple[Any, ...]:
        return jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((1 << 15, 1 << 20), "bfloat16")

    *reports, rest = slice_to_compile_for("tpu-v6e-4").find_fit(build, **bounds)
    assert [each.accelerator for each in reports] == tried
    assert rest.verdict is CompileVerdict.NOT_COMPILED
    assert message in rest.detail


@needs_libtpu
def test_sizes_that_the_mesh_does_not_suit_are_left_out_with_the_reason() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def build() -> tuple[Any, ...]:
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": 4})
        split = NamedSharding(mesh, PartitionSpec("tensor"))
        return lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=split)

    one, four = slice_to_compile_for("tpu-v6e-16").find_fit(build)
    assert (one.accelerator, one.verdict) == ("tpu-v6e-1", CompileVerdict.NOT_COMPILED)
    assert "tensor" in one.detail
    assert (four.accelerator, four.fits) == ("tpu-v6e-4", True)


@needs_libtpu
def test_a_function_that_suits_no_size_is_told_by_its_own_error() -> None:
    def build() -> tuple[Any, ...]:
        raise ValueError("no such file")

    target = slice_to_compile_for("tpu-v5p-8")
    with pytest.raises(ValueError, match="no such file"):
        target.find_fit(build)


@needs_libtpu
def test_modules_of_flax_and_equinox_are_taken_as_they_are() -> None:
    import equinox
    import jax
    import jax.numpy as jnp
    from flax import nnx

    batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    model = nnx.eval_shape(lambda: nnx.Linear(128, 256, rngs=nnx.Rngs(0)))
    target = slice_to_compile_for()
    of_flax = target.compile(nnx.jit(lambda model, x: model(x).sum()), model, batch)
    linear = equinox.filter_eval_shape(equinox.nn.Linear, 128, 256, key=jax.random.key(0))
    of_equinox = target.compile(
        equinox.filter_jit(lambda model, x: (jax.vmap(model)(x).sum(), x + 1, model), donate="all"),
        linear,
        batch,
    )
    assert of_equinox.memory.aliased == 4 * (8 * 128 + 256 * 128 + 256)
    assert (of_flax.detail, of_equinox.detail) == ("", "")
    assert of_flax.flops == of_equinox.flops == 2 * 8 * 128 * 256


@needs_libtpu
def test_the_arrays_of_a_plain_function_have_its_names() -> None:
    import jax
    import jax.numpy as jnp

    def act(params: Any, scale: float, *rest: Any, last: Any, bias: Any) -> Any:
        return params["w"] @ rest[0] * scale + bias - last

    square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    lowered = lowering.lower(
        slice_to_compile_for().target,
        act,
        ({"w": square}, 2.0, square),
        {"last": row, "bias": square},
    )
    for name in ("params['w']", "args[2]", "bias", "last"):
        assert name.encode() in lowered.module


@needs_libtpu
def test_the_arrays_of_flax_modules_have_the_names_of_their_attributes() -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def make() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs))

    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    act, target = nnx.jit(lambda model, x: model(x)), CompileTarget(resolve("tpu-v6e-4"))
    lowered = lowering.lower(target, act, (nnx.eval_shape(make), shape), {})
    for number in (0, 1):
        for name in ("bias", "kernel"):
            assert f"model.layers[{number}].{name}.value".encode() in lowered.module


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras, kinetic
from kinetic import errors
from kinetic._compile import lowering

target = kinetic.compile_for("tpu-v6e-4").target
x = jax.ShapeDtypeStruct((4, 8), "float32")
model = keras.Sequential([keras.layers.Dense(16)])
model.build((None, 8))
model.compile(optimizer="sgd", loss="mse")
model.optimizer.build(model.trainable_variables)
state = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables,
         model.metrics_variables)
batch = (x, jax.ShapeDtypeStruct((4, 16), "float32"))
lowered = lowering.lower(target, model.train_step, (state, batch), {})
assert b"state[0][0]" in lowered.module and b"data[1]" in lowered.module
try:
    lowering.lower(target, lambda model, x: model(x), (model, x), {})
except errors.UsageError as error:
    assert "<lambda> takes the Keras object Sequential" in str(error), error
else:
    raise AssertionError("it is not refused")
"""


@needs_libtpu
def test_variables_of_keras_are_shapes_and_models_are_refused() -> None:
    """Keras has one backend per process, so this runs in another interpreter."""
    ended = subprocess.run(
        [sys.executable, "-c", KERAS], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


QUIET = """
import jax, kinetic

x = jax.ShapeDtypeStruct((8, 8), "float32")
assert kinetic.compile_for("tpu-v6e-1").compile(lambda x: x @ x, x).fits
"""


@needs_libtpu
def test_nothing_is_said_of_chips_that_are_not_here() -> None:
    """Compiling does not look for TPU chips: libtpu would print five lines about their absence."""
    ended = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("what", [3, None])
def test_what_is_no_function_is_refused_in_a_sentence(what: Any) -> None:
    target = slice_to_compile_for()
    with pytest.raises(UsageTypeError, match="must be a function"):
        target.compile(what)
    with pytest.raises(UsageTypeError, match="must be a function"):
        target.find_fit(what)


@needs_libtpu
@pytest.mark.parametrize(
    ("built", "what"),
    [(print, "builtin_function_or_method"), ((), "an empty tuple"), ([print, 3], "list")],
)
def test_a_build_that_returns_something_else_is_refused_in_a_sentence(
    built: Any, what: str
) -> None:
    def build() -> Any:
        return built

    pattern = rf"^build\(\) must return the function to compile and .*; it returned {what}\.$"
    with pytest.raises(UsageTypeError, match=pattern):
        slice_to_compile_for().find_fit(build)


@needs_libtpu
def test_arrays_that_are_kept_on_the_host_are_told_apart() -> None:
    import jax

    with slice_to_compile_for("tpu-v6e-1") as target:
        chip = jax.sharding.SingleDeviceSharding(target.devices[0])
        host = chip.with_memory_kind("pinned_host")
        on_host = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=host)
        on_chip = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=chip)
        act = jax.jit(lambda x, y: jax.device_put(x, chip) @ y, donate_argnums=1)
        report = target.compile(act, on_host, on_chip)
    assert (report.memory.host, report.memory.arguments) == (4 << 20, 4 << 20)
    assert "In the host's memory: 4.00 MiB" in str(report)


@needs_libtpu
def test_a_kernel_that_takes_too_much_vector_memory_is_no_program_that_is_too_large() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    block = pl.BlockSpec((1024, 4096), lambda row: (row, 0))

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def kernel(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, grid=8, out_shape=shape, in_specs=[block], out_specs=block)(x)

    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    report = slice_to_compile_for("tpu-v6e-1").compile(kernel, x)
    assert report.verdict is CompileVerdict.REFUSED, report.detail
    line = kernel.__code__.co_firstlineno + 2
    assert f"at {__file__}:{line} (" in summarize(report)
    assert "takes more vector memory (VMEM) than a core has, " in summarize(report)


@needs_libtpu
def test_a_pallas_kernel_compiles_for_the_chip() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def kernel(x: Any) -> Any:
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    report = slice_to_compile_for().compile(kernel, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    assert report.fits, report.detail
    assert (report.kernels, "The multiplications of 1 Pallas kernel" in str(report)) == (1, True)


@needs_libtpu
def test_a_small_transformer_has_the_memory_and_the_operations_that_a_hand_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    transformers = importlib.import_module("transformers")
    layers, width, hidden, heads, vocabulary, length = 3, 256, 512, 4, 1024, 256
    tiny = transformers.Size(layers, width, hidden, heads, heads, vocabulary, head=64)
    monkeypatch.setitem(transformers.SIZES, "tiny", tiny)
    monkeypatch.setattr(transformers, "LENGTH", length)
    with slice_to_compile_for("tpu-v6e-8") as target:
        mesh = kinetic.make_mesh(ici={"fsdp": 2, "tensor": 4})
        with jax.set_mesh(mesh):
            step, *arguments = transformers.build("tiny", mesh)
            report = target.compile(step, *arguments)
    assert report.fits, report.detail
    matrices = layers * (4 * width * width + 3 * width * hidden) + vocabulary * width
    norms = layers * 2 * width  # not split: on every device
    state = 3 * 2 * (matrices // 8 + norms)  # bfloat16: weights, and two moments of the same size
    tokens = (length + 1) * 4  # one sequence per device along "fsdp"
    assert state <= report.memory.arguments - tokens <= state + (64 << 10)  # padding to tiles
    assert 3 * 2 * matrices // 8 <= report.memory.aliased <= state + (64 << 10)
    forward = 2 * length * (matrices + layers * 2 * length * heads * 64)
    recomputed = 2 * length * (matrices - vocabulary * width + layers * 2 * length * heads * 64)
    assert report.flops == pytest.approx((3 * forward + recomputed) / 4, rel=0.1)


@needs_libtpu
def test_a_step_of_70_billion_parameters_is_lowered_from_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    transformers = importlib.import_module("transformers")
    with slice_to_compile_for("tpu-v6e-256", slices=2) as target:
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": 4})
        with jax.set_mesh(mesh):
            step, *arguments = transformers.build("70B", mesh)
            program = lowering.lower(target.target, step, tuple(arguments), {}).program
    attention = 8192 * 128 * (64 + 8 + 8 + 64)
    layer = attention + 3 * 8192 * 28_672 + 2 * 8192
    parameters = 80 * layer + 128_256 * 8192
    assert transformers.count_parameters(arguments[0]) == parameters
    state, tokens = 3 * 2 * parameters + 4, 128 * 2049 * 4  # With two moments and a counter.
    assert 2 * state <= program.weight - tokens <= 2 * state + (1 << 20)
    assert program.axes == (("data", 2), ("fsdp", 64), ("tensor", 4))
