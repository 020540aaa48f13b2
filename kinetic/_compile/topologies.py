"""The real slices, as libtpu describes them to JAX; and the slice that programs are compiled for at
the moment.

In: a `Topology`, how many slices. Out: `CompileTarget`, the devices of JAX that stand for its
chips: they can be compiled for, and hold nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._core.accelerators.chips import CHIPS
from kinetic._core.accelerators.topology import Topology
from kinetic._core.documents import Record
from kinetic._core.values import dataclass
from kinetic.errors import PreflightError, UsageError

_CALLED = {"v5litepod": "v5e"}
"""What libtpu calls a family, where it is not our name."""
_CONFIGURED = {"v4": "megacore"}
"""How libtpu is told to see the chips of a family: as on the machines that have them, where the two
cores of a v4 are one device. Those of v5p are so anyway, and those of v3 and tpu7x are two."""
_HOSTS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""How the chips of a machine are laid out."""
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""Else only one process of a machine may load libtpu, and it asks the cloud what machine this is,
and waits for the answer. What is said here it only needs where it uses a chip."""
CONTAINER = "docker run --platform linux/amd64 -it -v .:/work -w /work python:3.12 bash"
WITHOUT_LIBTPU = (
    "The TPU compiler is not installed here: pip install 'jax>=0.10' libtpu. There is one "
    f"for Linux on x86-64 only; elsewhere, do it in a container: {CONTAINER}"
)
OLDEST_JAXLIB = (0, 10)
"""The programs may be those of older ones."""
_PLUGIN = "tpu"


class TpuCompiler(NamedTuple):
    """The compiler in an environment.

    Attributes:
        jaxlib, libtpu: their versions.
        library: the file of libtpu.
    """

    jaxlib: str
    libtpu: str
    library: str

    def __str__(self) -> str:
        return f"jaxlib {self.jaxlib}, libtpu {self.libtpu}"


@dataclass(frozen=True)
class CompileTarget(Record, called="The slices to compile for"):
    """The slices that a program is compiled for.

    Attributes:
        topology: of one of them.
        slices: how many.
    """

    topology: Topology
    slices: int = 1

    @property
    def name(self) -> str:
        """As libtpu calls one of them: "v6e:4x4"."""
        family = self.topology.family
        return f"{_CALLED.get(family, family)}:{self.topology.shape_text}"

    @property
    def devices_per_slice(self) -> int:
        """As JAX sees them."""
        return self.topology.chips * CHIPS[self.topology.family].devices


current: ContextVar[CompileTarget | None] = ContextVar("kinetic_compile_target", default=None)
"""The slices that the code that runs now is compiled for; None where nothing is."""


def make_target(topology: Topology, slices: int = 1) -> CompileTarget:
    """Return the slices to compile for.

    Raises:
        UsageError: there is no compiler for them.
    """
    if topology.kind != "tpu":
        raise UsageError(
            f"{topology.name} is no TPU: only the compiler of TPUs runs on a machine without the "
            "chip. For a GPU, compile on one: kinetic.run on the smallest machine that has it."
        )
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise UsageError(f"slices= is a number of slices from 1, not {slices!r}.")
    return CompileTarget(topology, slices)


def is_installed() -> bool:
    """Whether the compiler can be imported here."""
    specs = (importlib.util.find_spec(name) for name in ("jaxlib", "libtpu"))
    return all(spec is not None for spec in specs)


@functools.cache
def find_compiler() -> TpuCompiler:
    """Return the compiler of this environment.

    Raises:
        PreflightError: there is none; it says how to install it.
    """
    if not is_installed():
        raise PreflightError(WITHOUT_LIBTPU)
    from importlib import metadata  # takes 70 ms, which compilers' processes need not spend

    spec = importlib.util.find_spec("libtpu")
    jaxlib, libtpu = map(metadata.version, ("jaxlib", "libtpu"))
    if tuple(map(int, jaxlib.split(".")[:2])) < OLDEST_JAXLIB:
        raise PreflightError(
            f"libtpu {libtpu} has jaxlib {jaxlib} beside it, and the compiler of TPUs needs 0.10. "
            "Run this in an environment that has it: python -m venv tpu; "
            "tpu/bin/pip install jax libtpu."
        )
    library = Path((spec and spec.origin) or "").parent / "libtpu.so"
    return TpuCompiler(jaxlib, libtpu, str(library))


def describe(target: CompileTarget, library: str = "") -> tuple[Any, ...]:
    """Return the devices of the slices, slice by slice, by libtpu in this file; "": in that of this
    environment.

    Raises:
        UsageError: libtpu knows no such slice.
    """
    topology = target.topology
    chip_config = _CONFIGURED.get(topology.family)
    library = library or find_compiler().library
    return _describe(target.name, topology.chips_per_host, target.slices, chip_config, library)


@functools.cache  # libtpu makes new devices each time, and those of two calls do not mix
def _describe(
    name: str, chips_per_host: int, slices: int, chip_config: str | None, library: str
) -> tuple[Any, ...]:
    from jaxlib import xla_client

    configured = {} if chip_config is None else {"chip_config_name": chip_config}
    with hide_machine():
        _load(library)
        try:
            topology: Any = xla_client.make_tfrt_tpu_c_api_device_topology(
                name,
                chips_per_host_bounds=_HOSTS[chips_per_host],
                num_slices=slices,
                **configured,
            )
            devices = topology._make_compile_only_devices()
        except Exception as error:
            raise UsageError(
                f"libtpu does not know {slices} x {name}: {error}. `kinetic accelerators` lists "
                "what there is."
            ) from error
    return tuple(sorted(devices, key=lambda device: (slice_of(device), device.id)))


def _load(library: str) -> None:
    """Load libtpu into this process as JAX does, unless it is there: one process has one."""
    from jaxlib import (  # type: ignore[attr-defined]
        _profiler,
        xla_client,
    )

    if not xla_client.pjrt_plugin_loaded(_PLUGIN):
        api = xla_client.load_pjrt_plugin_dynamically(_PLUGIN, library)
        _profiler.register_plugin_profiler(api)
    if not xla_client.pjrt_plugin_initialized(_PLUGIN):
        xla_client.initialize_pjrt_plugin(_PLUGIN)


def slice_of(device: Any) -> int:
    """Return the index of a device's slice; those of a single one do not tell it."""
    return int(getattr(device, "slice_index", 0))


@contextlib.contextmanager
def hide_machine() -> Iterator[None]:
    """Have libtpu say nothing of the chips that it does not find, while it is loaded or JAX looks
    for them."""
    before = {name: os.environ.pop(name, None) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def find_positions(target: CompileTarget | None, devices: Sequence[Any]) -> tuple[int, ...]:
    """Return where these devices are among those of the slices: the real ones that stand for them,
    or simulated ones, which have the same order."""
    real = () if target is None else describe(target)
    if devices[0] not in real:
        real = tuple(sorted(devices[0].client.devices(), key=lambda d: (d.process_index, d.id)))
    places = {device: at for at, device in enumerate(real)}
    return tuple(places[device] for device in devices)
