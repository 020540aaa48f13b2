"""Devices of real slices, as libtpu describes them to JAX without the chips; and the slices that
the current context compiles for.

Programs can be compiled for these devices, but the devices hold no arrays.
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

_LIBTPU_NAMES = {"v5litepod": "v5e"}
"""libtpu's names of families, where they differ from kinetic's."""
_CHIP_CONFIGS = {"v4": "megacore"}
"""Names of chip configurations, where libtpu's default differs from real machines. The two cores of
a v4 are one device there. (v5p is right by default; v3 and tpu7x have two devices.)"""
_HOST_LAYOUTS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Layout of the chips of a host, by the number of its chips."""
_QUIET_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""Variables for loading libtpu without a chip. By default, only one process of a machine can load
libtpu, and it queries the cloud's metadata server. The other variables matter only with a chip."""
CONTAINER = "docker run --platform linux/amd64 -it -v .:/work -w /work python:3.12 bash"
WITHOUT_LIBTPU = (
    "The TPU compiler is not installed here: pip install 'jax>=0.10' libtpu. There is one "
    f"for Linux on x86-64 only; elsewhere, do it in a container: {CONTAINER}"
)
OLDEST_JAXLIB = (0, 10)
"""Oldest jaxlib that can compile. The programs may come from older versions of JAX."""
_PLUGIN = "tpu"


class TpuCompiler(NamedTuple):
    """The compiler in an environment.

    Attributes:
        jaxlib, libtpu: Their versions.
        library: Path of libtpu.
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
        topology: Topology of one slice.
        slices: Number of slices.
    """

    topology: Topology
    slices: int = 1

    @property
    def name(self) -> str:
        """libtpu's name of one slice: "v6e:4x4"."""
        family = self.topology.family
        return f"{_LIBTPU_NAMES.get(family, family)}:{self.topology.shape_text}"

    @property
    def devices_per_slice(self) -> int:
        """Number of JAX devices in one slice."""
        return self.topology.chips * CHIPS[self.topology.family].devices


current: ContextVar[CompileTarget | None] = ContextVar("kinetic_compile_target", default=None)
"""The slices that the current context compiles for, or None."""


def make_target(topology: Topology, slices: int = 1) -> CompileTarget:
    """Return the slices to compile for.

    Raises:
        UsageError: No compiler for them runs without the chip.
    """
    if topology.kind != "tpu":
        raise UsageError(
            f"{topology.name} is not a TPU, and only the TPU compiler runs on a machine without "
            "the chip. For a GPU, compile in a job on the smallest machine that has one."
        )
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise UsageError(f"slices= must be a number of slices, at least 1; got {slices!r}.")
    return CompileTarget(topology, slices)


def is_installed() -> bool:
    """True if the compiler can be imported here."""
    specs = (importlib.util.find_spec(name) for name in ("jaxlib", "libtpu"))
    return all(spec is not None for spec in specs)


@functools.cache
def find_compiler() -> TpuCompiler:
    """Return the compiler of this environment.

    Raises:
        PreflightError: The compiler is missing or too old; the message says how to install it.
    """
    if not is_installed():
        raise PreflightError(WITHOUT_LIBTPU)
    from importlib import metadata  # Takes 70 ms, and compiler processes do not need it.

    spec = importlib.util.find_spec("libtpu")
    jaxlib, libtpu = map(metadata.version, ("jaxlib", "libtpu"))
    if tuple(map(int, jaxlib.split(".")[:2])) < OLDEST_JAXLIB:
        raise PreflightError(
            f"libtpu {libtpu} needs jaxlib 0.10 or newer to compile, but {jaxlib} is installed. "
            "Upgrade both, or use another environment: python -m venv tpu; tpu/bin/pip install jax "
            "libtpu."
        )
    library = Path((spec and spec.origin) or "").parent / "libtpu.so"
    return TpuCompiler(jaxlib, libtpu, str(library))


def describe(target: CompileTarget, library: str = "") -> tuple[Any, ...]:
    """Return the devices of the slices, slice by slice.

    Args:
        target: The slices.
        library: Path of libtpu; "" for that of this environment.

    Raises:
        UsageError: libtpu does not support such a slice.
    """
    topology = target.topology
    chip_config = _CHIP_CONFIGS.get(topology.family)
    library = library or find_compiler().library
    return _describe(target.name, topology.chips_per_host, target.slices, chip_config, library)


@functools.cache  # Devices from different calls cannot be mixed.
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
                chips_per_host_bounds=_HOST_LAYOUTS[chips_per_host],
                num_slices=slices,
                **configured,
            )
            devices = topology._make_compile_only_devices()
        except Exception as error:
            raise UsageError(
                f"libtpu does not support {slices} x {name}. `kinetic accelerators` lists the "
                f"available slices. The error: {error}"
            ) from error
    return tuple(sorted(devices, key=lambda device: (find_slice(device), device.id)))


def _load(library: str) -> None:
    """Load libtpu into this process as JAX does, unless it is loaded: only one can be loaded."""
    from jaxlib import (  # type: ignore[attr-defined]
        _profiler,
        xla_client,
    )

    if not xla_client.pjrt_plugin_loaded(_PLUGIN):
        api = xla_client.load_pjrt_plugin_dynamically(_PLUGIN, library)
        _profiler.register_plugin_profiler(api)
    if not xla_client.pjrt_plugin_initialized(_PLUGIN):
        xla_client.initialize_pjrt_plugin(_PLUGIN)


def find_slice(device: Any) -> int:
    """Return the index of a device's slice; 0 for devices of a single slice, which lack it."""
    return int(getattr(device, "slice_index", 0))


@contextlib.contextmanager
def hide_machine() -> Iterator[None]:
    """Keep libtpu from warning of missing chips, while it is loaded or JAX looks for chips."""
    before = {name: os.environ.pop(name, None) for name in _QUIET_VARIABLES}
    os.environ.update(_QUIET_VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def find_positions(target: CompileTarget | None, devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the position of each device among those of the slices, from 0. The devices may be
    simulated: they have the same order as real ones."""
    real = () if target is None else describe(target)
    if devices[0] not in real:
        real = tuple(sorted(devices[0].client.devices(), key=lambda d: (d.process_index, d.id)))
    positions = {device: position for position, device in enumerate(real)}
    return tuple(positions[device] for device in devices)
