"""Description of a lowered program, written by the process that lowers it and read by the compiler.

It is JSON, next to a file with the StableHLO module, which other versions of JAX can read.
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
"""Compiler options that JAX has as settings, with the prefix `jax_`. JAX 0.12 and later have only
the options for levels."""


@dataclass(frozen=True)
class LoweredProgram(Record, called="The description of a program"):
    """A lowered program.

    Attributes:
        name: Name of its function.
        source: "file:line" of the function; "" if unknown.
        positions: Positions of its devices among those of the slices, in the program's order.
        axes: Axes of its mesh, (name, size); none for one device.
        inputs_open, outputs_open: For each input or output, True if the compiler may choose its
            sharding.
        tuples: True if all arguments are passed as one tuple.
        shardy: True if the shardings are for Shardy, False for GSPMD.
        options: Compiler options that the program's author has set.
        digest: SHA-256 of the module's text, without source lines.
        origins: Source line of each of its operations.
        refused: Reason why it cannot be compiled; "" if it can.
        weight: Bytes of all arguments and results. Larger programs are compiled first.
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
