"""A program on its way to the compiler: what one process has lowered and another one compiles.

In: figures of a lowered program. Out: `LoweredProgram`: frozen, kept as JSON beside the bytes of
the StableHLO module, in the form that other versions of JAX can read.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from kinetic._core.documents import Record
from kinetic._core.values import dataclass

EFFORTS = frozenset(
    (
        *("exec_time_optimization_effort", "memory_fitting_effort"),
        *("optimization_level", "memory_fitting_level"),
    )
)
"""Options that JAX has settings of the same names for, with `jax_` before them; since
JAX 0.12 only for the levels."""


@dataclass(frozen=True)
class LoweredProgram(Record, called="The description of a program"):
    """A lowered program.

    Attributes:
        name: of its function.
        source: where the function is; "" if it is not known.
        positions: of its devices among those of the slices, in the program's order.
        axes: of its mesh, (name, size); none for one device.
        inputs_open, outputs_open: of each, whether the compiler chooses how it is split.
        tuples: whether its arguments are one tuple.
        shardy: whether its shardings are Shardy's, not GSPMD's.
        options: of the compiler, that the program's author set.
        digest: SHA-256 of the module's text, without the lines that it is from.
        origins: of each of its operations, the line that it is from.
        refused: why it is not for the compiler; "" if it is.
        weight: larger programs first: bytes of arguments and results, as wholes.
    """

    name: str
    positions: tuple[int, ...]
    digest: str
    source: str = ""
    origins: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    inputs_open: tuple[bool, ...] = ()
    outputs_open: tuple[bool, ...] = ()
    tuples: bool = False
    shardy: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    weight: int = 0
    refused: str = ""
