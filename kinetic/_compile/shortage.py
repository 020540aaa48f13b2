"""Parser of the compiler's message about a program that is too large. The message has the lacking
memory, and names the largest arrays, or a kernel that needs more than a core's memory. Pure."""

from __future__ import annotations

import re

from kinetic._compile.hlo import Instruction, Module
from kinetic._compile.report import Buffer, MemoryUse
from kinetic._core.accelerators.chips import GIB

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": GIB << 10}
_SIZE = r"([\d.]+)([KMGT]?)"
_NEEDED = (
    rf"Used {_SIZE} of [\d.]+[KMGT]? hbm",
    rf"memory required for [^()]*\({_SIZE}\)",
    rf"requires {_SIZE}",
)
_AVAILABLE = (
    rf"Used [\d.]+[KMGT]? of {_SIZE} hbm",
    rf"available HBM \({_SIZE}\)",
    rf"{_SIZE} (?:is )?available",
)
_ALLOCATION = re.compile(
    rf"Size: {_SIZE}B?\s+(?:Operator: (?P<operator>.*)\s+)?"
    rf"Shape: (?P<array>[^\s{{]+)\S*\s+(?:Unpadded size: (?P<data>[\d.]+)(?P<unit>[KMGT]?))?"
)
_NAME = re.compile(r'op_name="([^"]*)"')
_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')

_CORE_MEMORY = re.compile(r"Ran out of memory in memory space (?!hbm)(\w+)")
_CORE_SIZES = re.compile(r"(?:Used|with size) (\S+) (?:of|and limit) (\S+) ")
_CULPRIT = re.compile(r"(?:on stack for |XLA label: )%?([\w.\-]+) = .*?([a-z][\w\-]*)\(")


def explain_core(message: str, module: Module) -> str:
    """Return a text with the kernel or fusion that needs more than a core's own memory, and its
    source line; "" if the message is about the chip's main memory, where a larger slice helps.

    Args:
        message: The compiler's message.
        module: The module before optimization.
    """
    memory, sizes, culprit = (p.search(message) for p in (_CORE_MEMORY, _CORE_SIZES, _CULPRIT))
    if memory is None:
        return ""
    name, opcode = culprit.groups() if culprit else ("", "")
    own = Instruction(name, opcode, (), (), message)
    alike = (one for part in module.computations.values() for one in part.values())
    made_by = next((one for one in alike if own.op_name and one.op_name == own.op_name), own)
    source = module.find_source(own) or module.find_source(made_by)
    kind = {"custom-call": "kernel", "": "program"}.get(opcode, opcode)
    culprit_name = " ".join(filter(None, (kind, name, source and f"at {source}")))
    memory_name = {"vmem": "vector memory (VMEM)"}.get(memory[1], memory[1])
    limit = f", {sizes[1]} where {sizes[2]} are allowed" if sizes else ""
    return f"The {culprit_name} takes more {memory_name} than a core has{limit}"


def read_shortage(message: str) -> MemoryUse:
    """Return the memory that the program needs, and the available memory; 0 if not in the
    message."""
    return MemoryUse(needed=_find_size(message, _NEEDED), available=_find_size(message, _AVAILABLE))


def read_allocations(message: str) -> tuple[Buffer, ...]:
    """Return the largest arrays, in the order of the message; () if it lists none."""
    return tuple(map(_read_allocation, _ALLOCATION.finditer(message)))


def _read_allocation(match: re.Match[str]) -> Buffer:
    padded_bytes = _parse_bytes(match[1], match[2])
    data = _parse_bytes(match["data"], match["unit"]) if match["data"] else padded_bytes
    operator = match["operator"] or ""
    name, line = _NAME.search(operator), _LINE.search(operator)
    return Buffer(
        array=match["array"],
        bytes=padded_bytes,
        data_bytes=data,
        what=name[1].rpartition("/")[2] if name else "",
        source=f"{line[1]}:{line[2]}" if line else "",
    )


def _find_size(message: str, patterns: tuple[str, ...]) -> int:
    match = next(filter(None, (re.search(pattern, message) for pattern in patterns)), None)
    return _parse_bytes(match[1], match[2]) if match else 0


def _parse_bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
