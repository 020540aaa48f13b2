"""`kinetic.compile_for`: the real compiler of a slice that nobody has to rent.

In: the name of an accelerator. Out: `CompileSlice`.
"""

from __future__ import annotations

from kinetic._compile.slice import CompileSlice
from kinetic._compile.topologies import make_target
from kinetic._config import settings
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.duration import Duration, patience_s
from kinetic._core.tracebacks import own_frames_hidden

FOLDER = "compiled"
"""Below the cache folder: reports of what was compiled."""


def compile_for(accelerator: str, *, slices: int = 1, timeout: Duration = "10m") -> CompileSlice:
    """Return slices to compile for, with their own compiler, on a machine without them.

    As a context, `kinetic.make_mesh` makes meshes of their devices:

        with kinetic.compile_for("tpu-v6e-16", slices=2) as slice:
            mesh = kinetic.make_mesh(ici={"fsdp": 16})
            report = slice.compile(step, *shapes_with_shardings)
        print(report)

    Args:
        accelerator: the name of a TPU slice, as for `kinetic.run`.
        slices: how many of them.
        timeout: the longest that one compile may take.

    Raises:
        UsageError: there is no such slice, or no compiler for it that runs without the chip.
    """
    with own_frames_hidden:
        target = make_target(resolve(accelerator), slices)
        limit_s = patience_s(timeout)
    return CompileSlice(target, settings.load().cache_dir / FOLDER, timeout_s=limit_s)
