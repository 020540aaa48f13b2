"""Parser of the compiler's text form of a program: computations, instructions, source lines. Pure.

XLA has no public Python reader for this text, and reading its protocol buffers needs classes that
are rarely installed. Text that the parser does not know is skipped.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_NAMES = re.compile(r"%([\w.\-]+)")
_ROW = re.compile(r"(\w+)=(\d+)")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}


class Array(NamedTuple):
    """The type of an array.

    Attributes:
        dtype: XLA's name of the element type.
        dims: Shape on one device.
        layout: Order of its axes and its tiles; "" if not given.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def text(self) -> str:
        """Type and shape for people: "bf16[8,128]"."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def item_bytes(self) -> float:
        """Bytes of one element."""
        if self.dtype in _BITS:
            return _BITS[self.dtype] / 8
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(bits[1]) / 8 if bits else 0

    @property
    def data_bytes(self) -> int:
        """Bytes without padding."""
        return int(math.prod(self.dims) * self.item_bytes)

    @property
    def padded_bytes(self) -> int:
        """Bytes with the padding to the layout's tiles."""
        order, _, tiles = self.layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", tiles)
        if not tile:
            return self.data_bytes
        minor_first = [int(axis) for axis in order.split(",") if axis]
        physical = [self.dims[axis] for axis in reversed(minor_first)]
        sizes = [int(size) for size in tile[1].split(",")]
        physical = [1] * (len(sizes) - len(physical)) + physical
        for back, size in enumerate(reversed(sizes), 1):
            physical[-back] = -(-physical[-back] // size) * size
        return int(math.prod(physical) * self.item_bytes)

    @property
    def in_hbm(self) -> bool:
        """True if the array is in the chip's main memory, not in a scratchpad or on the host."""
        return "S(" not in self.layout


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: Name within its computation.
        opcode: "fusion", "all-gather", ...
        arrays: Types of its results; several for a tuple.
        operands: Names of instructions.
        rest: Attributes, as text.
        is_root: True if its result is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    is_root: bool = False

    def attribute(self, name: str) -> str:
        """Return the computation or word that is the value of an attribute; "" if it is missing."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        """The path of names that JAX gave the operation."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1].replace("\\'", "'") if match else ""


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """A program.

    Attributes:
        entry: Name of the computation that runs first.
        computations: For each computation, by name, its instructions by name.
        frames: File, line, function and parent of each stack frame.
    """

    entry: str
    computations: Mapping[str, Computation]
    frames: Mapping[int, tuple[str, int, str, int]]

    def find_source(self, instruction: Instruction) -> str:
        """Return an instruction's "file:line (function)" in the user's source; "" if unknown."""
        frame = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        if frame:
            return self._name_frame(int(frame[1]))
        line = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.rest)
        if line:
            return f"{line[1]}:{line[2]}"
        inner = self.computations.get(instruction.attribute("calls"), {})
        root = next(
            (
                inner_instruction
                for inner_instruction in inner.values()
                if inner_instruction.is_root
            ),
            None,
        )
        return self.find_source(root) if root is not None else ""

    def _name_frame(self, frame: int) -> str:
        frames: list[tuple[str, str]] = []
        number = frame
        while number in self.frames and len(frames) < 100:
            file, line, function, parent = self.frames[number]
            frames.append((file, f"{file}:{line} ({function})"))
            if parent == number:
                break
            number = parent
        return choose_frame(frames)


def choose_frame(frames: Iterable[tuple[str, str]]) -> str:
    """Return the text of the innermost frame outside of libraries. If all are in libraries, return
    that of the innermost frame; "" without frames.

    Args:
        frames: File and text of each frame, innermost first.
    """
    frames = list(frames)
    own = (text for file, text in frames if not is_library(file))
    return next(own, frames[0][1] if frames else "")


def is_library(file: str) -> bool:
    """True if a file belongs to Python or an installed package, or is unknown."""
    return not file or any(part in file for part in _LIBRARIES)


def read(text: str) -> Module:
    """Parse the text of a module."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if current is None and (started := _COMPUTATION.match(line)):
            current = computations.setdefault(started[2], {})
            entry = started[2] if started[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            if instruction := _read_instruction(line):
                current[instruction.name] = instruction
        elif re.fullmatch(r"[A-Z]\w+", line):
            table = tables.setdefault(line, {})
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row[1])] = row[2]
    return Module(entry, computations, _read_frames(tables))


def _read_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    kind, rest = _split_type(match[3])
    opcode = _OPCODE.match(rest)
    if not opcode:
        return None
    inside, attributes = _split_parentheses(rest[opcode.end() - 1 :])
    arrays = tuple(_read_array(*array) for array in _ARRAY.findall(kind))
    operands = tuple(_NAMES.findall(inside))
    is_number = opcode[1] in ("parameter", "constant")
    return Instruction(
        match[2], opcode[1], arrays, operands, (inside if is_number else "") + attributes,
        bool(match[1]),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _read_array(dtype: str, dims: str, layout: str) -> Array:
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
    return Array(dtype, sizes, layout)


def _split_type(text: str) -> tuple[str, str]:
    if not text.startswith("("):
        kind, _, rest = text.partition(" ")
        return kind, rest
    kind, rest = _split_parentheses(text)
    return kind, rest.lstrip()


def _split_parentheses(text: str) -> tuple[str, str]:
    """Return the text inside the parentheses at the start, and the text after them."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[1:index], text[index + 1 :]
    return text[1:], ""


def _read_frames(tables: Mapping[str, dict[int, str]]) -> dict[int, tuple[str, int, str, int]]:
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations = {
        number: {name: int(value) for name, value in _ROW.findall(row)}
        for number, row in tables.get("FileLocations", {}).items()
    }
    frames = {}
    for number, row in tables.get("StackFrames", {}).items():
        fields = {name: int(value) for name, value in _ROW.findall(row)}
        location = locations.get(fields.get("file_location_id", 0), {})
        file = files.get(location.get("file_name_id", 0), "").strip('"')
        function = functions.get(location.get("function_name_id", 0), "").strip('"')
        frames[number] = (file, location.get("line", 0), function, fields.get("parent_frame_id", 0))
    return frames
