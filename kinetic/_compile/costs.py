"""What a program costs one device each time it runs: operations, bytes of memory, bytes between
chips, and its largest arrays.

In: the program (`hlo.Module`), where devices lie in the mesh. Out: `Collective`s, `Buffer`s, sums.
Pure.

The compiler's own `cost_analysis` counts the body of a loop once, so that a model whose layers are
a `scan` looks like one layer. Here each instruction counts as often as it runs. What custom kernels
do inside is not counted: their arrays are.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from kinetic._compile.hlo import Array, Computation, Instruction, Module
from kinetic._compile.report import Buffer, Collective
from kinetic._compile.routes import DeviceLayout

_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "replica-id", "while", "conditional", "call", "opt-barrier", "domain"),
        *("send", "send-done", "recv", "recv-done", "async-start", "async-update"),
    )
)
"""They move nothing in memory themselves: where they call a computation, its instructions do."""
_MOVES = _FREE | {"copy"}
"""They make no array that is not there already."""
_KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_TAKE_PARTS = ("dynamic-slice", "slice", "gather")
_PUT_PARTS = ("dynamic-update-slice", "scatter")
_LEAST_BUFFER = 1 << 20
_MOST_POSITIONS = 1 << 22
"""Of a window, in one dimension: more are counted as if none were padding."""
Cost = Callable[[str, Instruction], float]
"""What an instruction of the named computation costs each time that it runs."""


def count_runs(module: Module, cost: Cost) -> dict[str, float]:
    """Return how often each computation runs at least, fusions included. Loops whose length cannot
    be read count once; of branches the one that costs least counts, and the others 0 times."""
    runs_of: dict[str, dict[str, float]] = {}

    def count(name: str) -> dict[str, float]:
        if name not in runs_of:
            runs: dict[str, float] = defaultdict(float, {name: 1.0})
            for instruction in module.computations.get(name, {}).values():
                for called, repeats in _calls_of(module, name, instruction, weigh):
                    for inner, times in count(called).items():
                        runs[inner] += times * repeats
            runs_of[name] = dict(runs)
        return runs_of[name]

    def weigh(name: str) -> float:
        return _sum_up(module, count(name), cost)

    return count(module.entry)


def _sum_up(module: Module, runs: Mapping[str, float], cost: Cost) -> float:
    return sum(
        times * cost(name, instruction)
        for name, times in runs.items()
        if times
        for instruction in module.computations.get(name, {}).values()
    )


def _calls_of(
    module: Module, where: str, instruction: Instruction, weigh: Callable[[str], float]
) -> Iterator[tuple[str, float]]:
    if instruction.opcode == "while":
        yield instruction.attribute("body"), _trips(module, module.computations[where], instruction)
    elif instruction.opcode == "conditional":
        branches = _branches(instruction)
        cheapest = min(branches, key=weigh)
        yield from ((name, float(name == cheapest)) for name in branches)
    elif instruction.opcode in ("fusion", "call", "async-start"):
        yield instruction.attribute("calls") or instruction.attribute("to_apply"), 1.0


def _branches(conditional: Instruction) -> list[str]:
    """The computations that a conditional chooses from, each once."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.rest)
    two = ("true_computation", "false_computation")
    names = listed[1].split(",") if listed else map(conditional.attribute, two)
    return list(dict.fromkeys(name.strip().lstrip("%") for name in names))


def _trips(module: Module, where: Computation, loop: Instruction) -> float:
    """How often the loop's body runs: from its limit, where its counter begins, and what each run
    adds to it; once where one of these is not a number."""
    known_count = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known_count:
        return float(known_count[1])
    condition = module.computations.get(loop.attribute("condition"), {})
    test = _root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.rest:
        return 1.0
    counter, limit = (_original(condition, name) for name in test.operands[:2])
    index = counter.attribute("index") if counter is not None else ""
    begins = where.get(loop.operands[0]) if loop.operands else None
    first = _constant(_element(where, begins, index))
    most = _constant(limit)
    step = _step(module.computations.get(loop.attribute("body"), {}), index)
    if first is None or most is None or not step:
        return 1.0
    return float(max(math.ceil((most - first) / step), 0))


def _step(body: Computation, index: str) -> int:
    """What a run of the body adds to an element of its state; 0 if it does something else to it."""
    element = _element(body, _root(body), index)
    if element is None or element.opcode != "add":
        return 0
    terms = [_original(body, name) for name in element.operands]
    has_own = any(
        term is not None and term.opcode == "get-tuple-element" and term.attribute("index") == index
        for term in terms
    )
    added = [number for number in map(_constant, terms) if number is not None]
    return max(added[0], 0) if has_own and len(added) == 1 else 0


def _root(computation: Computation) -> Instruction | None:
    return next((instruction for instruction in computation.values() if instruction.is_root), None)


def _element(where: Computation, state: Instruction | None, index: str) -> Instruction | None:
    if state is None or state.opcode != "tuple" or not index.isdigit():
        return None
    return _original(where, state.operands[int(index)])


def _original(where: Computation, name: str) -> Instruction | None:
    """The instruction behind copies."""
    instruction = where.get(name)
    while (
        instruction is not None
        and instruction.opcode in ("copy", "bitcast")
        and instruction.operands
    ):
        instruction = where.get(instruction.operands[0])
    return instruction


def _constant(instruction: Instruction | None) -> int | None:
    number = re.match(r"(-?\d+)", instruction.rest) if instruction is not None else None
    return (
        int(number[1])
        if instruction is not None and instruction.opcode == "constant" and number
        else None
    )


# -- operations ------------------------------------------------------------------------------------


def count_flops(module: Module) -> float:
    """Return the operations of all matrix multiplications and convolutions; what else is computed
    is small beside them, and never bounds a matrix unit."""

    def cost(name: str, instruction: Instruction) -> float:
        is_product = instruction.opcode in ("dot", "convolution")
        return _flops_of(module.computations[name], instruction) if is_product else 0.0

    return _sum_up(module, count_runs(module, cost), cost)


def count_kernels(module: Module) -> int:
    """Return how many custom kernels a program has: what they multiply is in no count."""
    instructions = (one for own in module.computations.values() for one in own.values())
    return sum('"tpu_custom_call"' in one.rest for one in instructions)


def _flops_of(where: Computation, instruction: Instruction) -> float:
    lhs, rhs = (_array_of(where, name) for name in instruction.operands[:2])
    if lhs is None or rhs is None or not instruction.arrays:
        return 0.0
    result = instruction.arrays[0]
    if instruction.opcode == "dot":
        over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        axes = [int(axis) for axis in over[1].split(",") if axis] if over else []
        return 2.0 * math.prod(result.dims) * math.prod(lhs.dims[axis] for axis in axes)
    return _flops_of_window(instruction, lhs, rhs, result)


def _flops_of_window(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if not labels:
        return 0.0
    of_left, of_right, of_made = labels[1], labels[2], labels[3]
    features = result.dims[of_made.index("f")] * result.dims[of_made.index("b")]
    flops = 2.0 * features * rhs.dims[of_right.index("i")]
    for number, axis in enumerate(sorted(letter for letter in of_made if letter.isdigit())):
        flops *= _positions(
            _Window(instruction.rest, number),
            lhs.dims[of_left.index(axis)],
            rhs.dims[of_right.index(axis)],
            result.dims[of_made.index(axis)],
        )
    return flops


class _Window:
    """One dimension of a convolution's window. Batches of matrices are such dimensions too: with
    gaps as wide as the window, in which nothing is multiplied."""

    def __init__(self, attributes: str, number: int) -> None:
        window = re.search(r"window=\{([^}]*)\}", attributes)
        self._fields = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
        self._number = number

    def value(self, name: str, default: int) -> int:
        """Return the number that this field has in this dimension."""
        text = self._fields.get(name, "")
        return int(text.split("x")[self._number].split("_")[0]) if text else default


def _positions(window: _Window, inputs: int, kernel: int, outputs: int) -> int:
    """How often, over all outputs of one dimension, an element of the kernel meets one of the
    input."""
    stride, low = window.value("stride", 1), window.value("pad", 0)
    between, dilation = window.value("lhs_dilate", 1), window.value("rhs_dilate", 1)
    if outputs * kernel > _MOST_POSITIONS:
        return min(outputs, inputs) * kernel if between == 1 else inputs
    end = (inputs - 1) * between + 1
    met = 0
    for out in range(outputs):
        for at in range(kernel):
            place = out * stride - low + at * dilation
            met += 0 <= place < end and not place % between
    return met


def _array_of(where: Computation, name: str) -> Array | None:
    instruction = where.get(name)
    return instruction.arrays[0] if instruction is not None and instruction.arrays else None


# -- memory ----------------------------------------------------------------------------------------


def count_bytes(module: Module) -> float:
    """Return at least how many bytes are read from and written to the chip's memory. Of arrays that
    an instruction only takes or puts a part of, that part counts."""
    fused = _find_fused(module)

    def cost(name: str, instruction: Instruction) -> float:
        if name in fused or instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0.0
        return _bytes_of(module, module.computations[name], instruction)

    return _sum_up(module, count_runs(module, cost), cost)


def _find_fused(module: Module) -> set[str]:
    """The computations of fusions, whose instructions have no arrays of their own."""
    return {
        instruction.attribute("calls")
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "fusion"
    }


def _bytes_of(module: Module, where: Computation, instruction: Instruction) -> float:
    inner = (
        module.computations.get(instruction.attribute("calls"), {})
        if instruction.opcode == "fusion"
        else {}
    )
    read_bytes = [
        _bytes_read(where, name, inner, number) for number, name in enumerate(instruction.operands)
    ]
    part = (
        0
        if instruction.opcode in _PUT_PARTS
        else sum(array.padded_bytes for array in instruction.arrays)
    )
    for number in range(len(_wholes(instruction))):
        read_bytes[number] = min(read_bytes[number], part)
    return sum(read_bytes) + _bytes_written(where, instruction, inner)


def _bytes_read(where: Computation, name: str, inner: Computation, number: int) -> float:
    array = _array_of(where, name)
    if array is None or not array.in_hbm:
        return 0.0
    own = _parameter(inner, number)
    users = [user for user in inner.values() if own is not None and own.name in user.operands]
    if users and all(own is not None and own.name in _wholes(user) for user in users):
        return float(
            sum(user.arrays[0].padded_bytes for user in users if user.opcode in _TAKE_PARTS)
        )
    return float(array.padded_bytes)


def _wholes(instruction: Instruction) -> Sequence[str]:
    """The operands that an instruction takes a part of, or puts one in: a scatter has as many of
    them as of updates, with the indices between."""
    if instruction.opcode == "scatter":
        return instruction.operands[: len(instruction.operands) // 2]
    return instruction.operands[:1] if instruction.opcode in _TAKE_PARTS + _PUT_PARTS else ()


def _parameter(inner: Computation, number: int) -> Instruction | None:
    return next(
        (
            instruction
            for instruction in inner.values()
            if instruction.opcode == "parameter" and re.match(rf"{number}\b", instruction.rest)
        ),
        None,
    )


def _bytes_written(where: Computation, instruction: Instruction, inner: Computation) -> float:
    updates = [of for of in inner.values() if of.opcode in _PUT_PARTS]
    if instruction.opcode in _PUT_PARTS:
        updates, inner = [instruction], where
    if updates:
        return sum(_bytes_put(inner, update) for update in updates)
    arrays = instruction.arrays[:1] if instruction.opcode.endswith("-start") else instruction.arrays
    return float(sum(array.padded_bytes for array in arrays if array.in_hbm))


def _bytes_put(where: Computation, instruction: Instruction) -> float:
    """Of an array that has fewer bytes than what is put into it, each byte once."""
    names = _wholes(instruction)
    wholes = [_array_of(where, name) for name in names]
    parts = [_array_of(where, name) for name in instruction.operands[-len(names) :]]
    if instruction.opcode == "dynamic-update-slice":
        parts = [_array_of(where, instruction.operands[1])]
    return float(
        sum(
            min(whole.padded_bytes, part.padded_bytes)
            for whole, part in zip(wholes, parts, strict=True)
            if whole is not None and part is not None and whole.in_hbm
        )
    )


def find_buffers(module: Module, most: int) -> list[Buffer]:
    """Return the largest arrays in the chip's memory, with the lines that made them; arguments by
    their names. Of equal ones from one line the first. There is room for those of all branches."""
    buffers: dict[tuple[str, str], Buffer] = {}
    fused = _find_fused(module)
    for name in count_runs(module, lambda *_: 0.0):
        for instruction in module.computations.get(name, {}).values() if name not in fused else ():
            if _is_given(instruction, name == module.entry):
                for array in instruction.arrays:
                    _note_buffer(buffers, module, instruction, array)
    return sorted(buffers.values(), key=lambda buffer: -buffer.bytes)[:most]


def _is_given(instruction: Instruction, in_entry: bool) -> bool:
    """Whether it has memory of its own."""
    if instruction.opcode == "parameter":
        return in_entry
    return instruction.opcode not in _MOVES and not instruction.opcode.endswith(
        ("-start", "-update", "-done")
    )


def _note_buffer(
    buffers: dict[tuple[str, str], Buffer], module: Module, instruction: Instruction, array: Array
) -> None:
    if not array.in_hbm or array.padded_bytes < _LEAST_BUFFER:
        return
    is_argument = instruction.opcode == "parameter"
    source = "" if is_argument else module.source_of(instruction)
    what = (
        f"argument {instruction.op_name}" if is_argument else instruction.op_name.rpartition("/")[2]
    )
    buffers.setdefault(
        (array.text, source or what),
        Buffer(
            array.text, array.padded_bytes, array.data_bytes, what or instruction.opcode, source
        ),
    )


# -- between chips ---------------------------------------------------------------------------------


def find_collectives(module: Module, layout: DeviceLayout) -> list[Collective]:
    """Return what is sent between chips and slices, the same kinds over the same axes together,
    the most bytes first."""

    def cost(name: str, instruction: Instruction) -> float:
        return _describe_transfer(module, name, instruction, layout)[2]

    sums: dict[tuple[str, str, bool], list[float]] = {}
    for name, times in count_runs(module, cost).items():
        for instruction in module.computations.get(name, {}).values() if times else ():
            kind, size, wire, axes, crosses = _describe_transfer(module, name, instruction, layout)
            if kind:
                total = sums.setdefault((kind, axes, crosses), [0.0, 0.0, 0.0])
                for index, value in enumerate((times, times * size, times * wire)):
                    total[index] += value
    collectives = [
        Collective(kind, axes, crosses, round(count), round(size), round(wire))
        for (kind, axes, crosses), (count, size, wire) in sums.items()
    ]
    return sorted(collectives, key=lambda one: -one.wire_bytes)


_NOTHING = ("", 0.0, 0.0, "", False)


def _describe_transfer(
    module: Module, where: str, instruction: Instruction, layout: DeviceLayout
) -> tuple[str, float, float, str, bool]:
    kind = instruction.opcode.removesuffix("-start")
    if instruction.opcode == "send" and "xla_megascale" in instruction.rest:
        return _describe_transfer_between(instruction, layout)
    if kind not in _KINDS or not instruction.arrays:
        return _NOTHING
    group = layout.read_group(instruction.rest)
    if len(group) < 2:
        return _NOTHING
    size = float(max(_sizes(module.computations[where], instruction)))
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # as this compiler writes one
    wire = size * _share_sent(kind, len(group))
    return kind, size, wire, layout.name_axes(group), layout.crosses(group)


def _describe_transfer_between(
    instruction: Instruction, layout: DeviceLayout
) -> tuple[str, float, float, str, bool]:
    """What a slice sends to others: its whole operand, which is one part of what a gather makes."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
    kind = transfer[1].lower().replace("_", "-") if transfer else "send"
    kind = "collective-permute" if kind == "one-to-one" else kind
    size = float(instruction.arrays[0].data_bytes) if instruction.arrays else 0.0
    if kind == "all-gather":
        size *= layout.slice_count
    wire = size * _share_sent(kind, layout.slice_count)
    return kind, size, wire, layout.between_slices, True


def _share_sent(kind: str, members: int) -> float:
    """The part of an array that each of the members must send at least, whatever the algorithm."""
    if kind.startswith("collective") or kind == "send":
        return 1.0
    return (members - 1) / members * (2 if kind == "all-reduce" else 1)


def _sizes(where: Computation, instruction: Instruction) -> Sequence[int]:
    """The bytes of what goes in and of what comes out: the whole of a gather is its result, that
    of a scatter its operand."""
    operands = [_array_of(where, name) for name in instruction.operands]
    return (
        sum(array.data_bytes for array in operands if array is not None),
        max(array.data_bytes for array in instruction.arrays)
        if instruction.opcode.endswith("-start")
        else sum(array.data_bytes for array in instruction.arrays),
    )
