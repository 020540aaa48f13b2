"""Cost of one run of a program on one device: operations, bytes of memory, bytes between chips, and
its largest arrays. Pure.

The compiler's own `cost_analysis` counts the body of a loop once, so a model whose layers are a
`scan` would count as one layer. This module counts each instruction as often as it runs. It does
not count operations inside custom kernels, but it counts their arrays.
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
"""Instructions that read and write no memory themselves; computations that they call may."""
_MOVES = _FREE | {"copy"}
"""Instructions that make no new array."""
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_TAKE_PARTS = ("dynamic-slice", "slice", "gather")
_PUT_PARTS = ("dynamic-update-slice", "scatter")
_LEAST_BUFFER = 1 << 20
_MOST_POSITIONS = 1 << 22
"""Most window positions that are counted one by one; larger numbers are estimated."""
Cost = Callable[[str, Instruction], float]
"""Cost of one run of an instruction in the named computation."""


def count_runs(module: Module, cost: Cost) -> dict[str, float]:
    """Return a lower bound of how often each computation runs, fusions included. A loop of unknown
    length counts once. Of the branches of a conditional, only the cheapest counts."""
    runs_of: dict[str, dict[str, float]] = {}

    def count(name: str) -> dict[str, float]:
        if name not in runs_of:
            runs: dict[str, float] = defaultdict(float, {name: 1.0})
            for instruction in module.computations.get(name, {}).values():
                for called, repeats in _list_calls(module, name, instruction, weigh):
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


def _list_calls(
    module: Module, where: str, instruction: Instruction, weigh: Callable[[str], float]
) -> Iterator[tuple[str, float]]:
    if instruction.opcode == "while":
        yield (
            instruction.attribute("body"),
            _count_trips(module, module.computations[where], instruction),
        )
    elif instruction.opcode == "conditional":
        branches = _list_branches(instruction)
        cheapest = min(branches, key=weigh)
        yield from ((name, float(name == cheapest)) for name in branches)
    elif instruction.opcode in ("fusion", "call", "async-start"):
        yield instruction.attribute("calls") or instruction.attribute("to_apply"), 1.0


def _list_branches(conditional: Instruction) -> list[str]:
    """Return the computations from which a conditional chooses, without duplicates."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.rest)
    two = ("true_computation", "false_computation")
    names = listed[1].split(",") if listed else map(conditional.attribute, two)
    return list(dict.fromkeys(name.strip().lstrip("%") for name in names))


def _count_trips(module: Module, where: Computation, loop: Instruction) -> float:
    """Return the number of runs of a loop's body, computed from the start, step and limit of its
    counter; 1 if one of these is no constant."""
    known_count = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known_count:
        return float(known_count[1])
    condition = module.computations.get(loop.attribute("condition"), {})
    test = _find_root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.rest:
        return 1.0
    counter, limit = (_skip_copies(condition, name) for name in test.operands[:2])
    index = counter.attribute("index") if counter is not None else ""
    begins = where.get(loop.operands[0]) if loop.operands else None
    first = _read_constant(_find_element(where, begins, index))
    most = _read_constant(limit)
    step = _find_step(module.computations.get(loop.attribute("body"), {}), index)
    if first is None or most is None or not step:
        return 1.0
    return float(max(math.ceil((most - first) / step), 0))


def _find_step(body: Computation, index: str) -> int:
    """Return the constant that a loop's body adds to an element of its state; 0 if the body changes
    the element in another way."""
    element = _find_element(body, _find_root(body), index)
    if element is None or element.opcode != "add":
        return 0
    terms = [_skip_copies(body, name) for name in element.operands]
    has_own = any(
        term is not None and term.opcode == "get-tuple-element" and term.attribute("index") == index
        for term in terms
    )
    added = [number for number in map(_read_constant, terms) if number is not None]
    return max(added[0], 0) if has_own and len(added) == 1 else 0


def _find_root(computation: Computation) -> Instruction | None:
    return next((instruction for instruction in computation.values() if instruction.is_root), None)


def _find_element(where: Computation, state: Instruction | None, index: str) -> Instruction | None:
    if state is None or state.opcode != "tuple" or not index.isdigit():
        return None
    return _skip_copies(where, state.operands[int(index)])


def _skip_copies(where: Computation, name: str) -> Instruction | None:
    """Return the instruction whose result is passed on, through copies and bitcasts, as `name`."""
    instruction = where.get(name)
    while (
        instruction is not None
        and instruction.opcode in ("copy", "bitcast")
        and instruction.operands
    ):
        instruction = where.get(instruction.operands[0])
    return instruction


def _read_constant(instruction: Instruction | None) -> int | None:
    number = re.match(r"(-?\d+)", instruction.rest) if instruction is not None else None
    return (
        int(number[1])
        if instruction is not None and instruction.opcode == "constant" and number
        else None
    )


# -- arithmetic ------------------------------------------------------------------------------------


def count_flops(module: Module) -> float:
    """Return the operations of all matrix multiplications and convolutions. Other operations are
    few in comparison, and do not run on matrix units."""

    def cost(name: str, instruction: Instruction) -> float:
        is_product = instruction.opcode in ("dot", "convolution")
        return _count_product_flops(module.computations[name], instruction) if is_product else 0.0

    return _sum_up(module, count_runs(module, cost), cost)


def count_kernels(module: Module) -> int:
    """Return the number of custom kernels, whose operations `count_flops` cannot count."""
    instructions = (one for own in module.computations.values() for one in own.values())
    return sum('"tpu_custom_call"' in one.rest for one in instructions)


def _count_product_flops(where: Computation, instruction: Instruction) -> float:
    lhs, rhs = (_find_array(where, name) for name in instruction.operands[:2])
    if lhs is None or rhs is None or not instruction.arrays:
        return 0.0
    result = instruction.arrays[0]
    if instruction.opcode == "dot":
        over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        axes = [int(axis) for axis in over[1].split(",") if axis] if over else []
        return 2.0 * math.prod(result.dims) * math.prod(lhs.dims[axis] for axis in axes)
    return _count_window_flops(instruction, lhs, rhs, result)


def _count_window_flops(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if not labels:
        return 0.0
    lhs_axes, rhs_axes, result_axes = labels[1], labels[2], labels[3]
    features = result.dims[result_axes.index("f")] * result.dims[result_axes.index("b")]
    flops = 2.0 * features * rhs.dims[rhs_axes.index("i")]
    for number, axis in enumerate(sorted(letter for letter in result_axes if letter.isdigit())):
        flops *= _count_positions(
            _Window(instruction.rest, number),
            lhs.dims[lhs_axes.index(axis)],
            rhs.dims[rhs_axes.index(axis)],
            result.dims[result_axes.index(axis)],
        )
    return flops


class _Window:
    """One dimension of a convolution's window. XLA also writes the batch dimension of a batched
    multiplication in this way, with gaps as wide as the window, which multiply nothing."""

    def __init__(self, attributes: str, number: int) -> None:
        window = re.search(r"window=\{([^}]*)\}", attributes)
        self._fields = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
        self._number = number

    def value(self, name: str, default: int) -> int:
        """Return the value of a window's field, such as "stride", in this dimension."""
        text = self._fields.get(name, "")
        return int(text.split("x")[self._number].split("_")[0]) if text else default


def _count_positions(window: _Window, inputs: int, kernel: int, outputs: int) -> int:
    """Return the number of multiplications along one dimension: pairs of an output and an element
    of the kernel that meet an element of the input, not padding."""
    stride, low = window.value("stride", 1), window.value("pad", 0)
    between, dilation = window.value("lhs_dilate", 1), window.value("rhs_dilate", 1)
    if outputs * kernel > _MOST_POSITIONS:
        return min(outputs, inputs) * kernel if between == 1 else inputs
    end = (inputs - 1) * between + 1
    count = 0
    for output in range(outputs):
        for element in range(kernel):
            position = output * stride - low + element * dilation
            count += 0 <= position < end and not position % between
    return count


def _find_array(where: Computation, name: str) -> Array | None:
    instruction = where.get(name)
    return instruction.arrays[0] if instruction is not None and instruction.arrays else None


# -- memory ----------------------------------------------------------------------------------------


def count_bytes(module: Module) -> float:
    """Return a lower bound of the bytes read from and written to the chip's memory. If an
    instruction uses only a part of an array, only the bytes of that part count."""
    fused = _find_fused(module)

    def cost(name: str, instruction: Instruction) -> float:
        if name in fused or instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0.0
        return _count_instruction_bytes(module, module.computations[name], instruction)

    return _sum_up(module, count_runs(module, cost), cost)


def _find_fused(module: Module) -> set[str]:
    """Return the computations of fusions. Arrays inside these take no memory."""
    return {
        instruction.attribute("calls")
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "fusion"
    }


def _count_instruction_bytes(module: Module, where: Computation, instruction: Instruction) -> float:
    inner = (
        module.computations.get(instruction.attribute("calls"), {})
        if instruction.opcode == "fusion"
        else {}
    )
    read_bytes = [
        _count_read_bytes(where, name, inner, number)
        for number, name in enumerate(instruction.operands)
    ]
    part = (
        0
        if instruction.opcode in _PUT_PARTS
        else sum(array.padded_bytes for array in instruction.arrays)
    )
    for number in range(len(_list_wholes(instruction))):
        read_bytes[number] = min(read_bytes[number], part)
    return sum(read_bytes) + _count_written_bytes(where, instruction, inner)


def _count_read_bytes(where: Computation, name: str, inner: Computation, number: int) -> float:
    array = _find_array(where, name)
    if array is None or not array.in_hbm:
        return 0.0
    own = _find_parameter(inner, number)
    users = [user for user in inner.values() if own is not None and own.name in user.operands]
    if users and all(own is not None and own.name in _list_wholes(user) for user in users):
        return float(
            sum(user.arrays[0].padded_bytes for user in users if user.opcode in _TAKE_PARTS)
        )
    return float(array.padded_bytes)


def _list_wholes(instruction: Instruction) -> Sequence[str]:
    """Return the operands of which the instruction reads or writes only a part. The operands of a
    scatter are these, then indices, then an update for each of these."""
    if instruction.opcode == "scatter":
        return instruction.operands[: len(instruction.operands) // 2]
    return instruction.operands[:1] if instruction.opcode in _TAKE_PARTS + _PUT_PARTS else ()


def _find_parameter(inner: Computation, number: int) -> Instruction | None:
    return next(
        (
            instruction
            for instruction in inner.values()
            if instruction.opcode == "parameter" and re.match(rf"{number}\b", instruction.rest)
        ),
        None,
    )


def _count_written_bytes(where: Computation, instruction: Instruction, inner: Computation) -> float:
    updates = [of for of in inner.values() if of.opcode in _PUT_PARTS]
    if instruction.opcode in _PUT_PARTS:
        updates, inner = [instruction], where
    if updates:
        return sum(_count_put_bytes(inner, update) for update in updates)
    arrays = instruction.arrays[:1] if instruction.opcode.endswith("-start") else instruction.arrays
    return float(sum(array.padded_bytes for array in arrays if array.in_hbm))


def _count_put_bytes(where: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction writes into parts of arrays: at most an array's size."""
    names = _list_wholes(instruction)
    wholes = [_find_array(where, name) for name in names]
    parts = [_find_array(where, name) for name in instruction.operands[-len(names) :]]
    if instruction.opcode == "dynamic-update-slice":
        parts = [_find_array(where, instruction.operands[1])]
    return float(
        sum(
            min(whole.padded_bytes, part.padded_bytes)
            for whole, part in zip(wholes, parts, strict=True)
            if whole is not None and part is not None and whole.in_hbm
        )
    )


def find_buffers(module: Module, most: int) -> list[Buffer]:
    """Return the largest arrays in the chip's memory, each with its source line or argument name.
    Equal arrays from one line count once. The arrays of all branches are included."""
    buffers: dict[tuple[str, str], Buffer] = {}
    fused = _find_fused(module)
    for name in count_runs(module, lambda *_: 0.0):
        for instruction in module.computations.get(name, {}).values() if name not in fused else ():
            if _has_memory(instruction, name == module.entry):
                for array in instruction.arrays:
                    _note_buffer(buffers, module, instruction, array)
    return sorted(buffers.values(), key=lambda buffer: -buffer.bytes)[:most]


def _has_memory(instruction: Instruction, in_entry: bool) -> bool:
    """True if the instruction's result has memory of its own."""
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
    source = "" if is_argument else module.find_source(instruction)
    name = (
        f"argument {instruction.op_name}" if is_argument else instruction.op_name.rpartition("/")[2]
    )
    buffers.setdefault(
        (array.text, source or name),
        Buffer(
            array.text, array.padded_bytes, array.data_bytes, name or instruction.opcode, source
        ),
    )


# -- between chips ---------------------------------------------------------------------------------


def find_collectives(module: Module, layout: DeviceLayout) -> list[Collective]:
    """Return the transfers between chips and slices, summed by kind and axes, largest first."""

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
    if kind not in _COLLECTIVES or not instruction.arrays:
        return _NOTHING
    group = layout.read_group(instruction.rest)
    if len(group) < 2:
        return _NOTHING
    size = float(max(_measure_sizes(module.computations[where], instruction)))
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # libtpu writes it in this way.
    wire = size * _share_sent(kind, len(group))
    return kind, size, wire, layout.name_axes(group), layout.crosses(group)


def _describe_transfer_between(
    instruction: Instruction, layout: DeviceLayout
) -> tuple[str, float, float, str, bool]:
    """Describe a transfer between slices: kind, bytes of the array, bytes that each slice sends,
    axes, and True. The array of a gather is the operands of all slices together."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
    kind = transfer[1].lower().replace("_", "-") if transfer else "send"
    kind = "collective-permute" if kind == "one-to-one" else kind
    size = float(instruction.arrays[0].data_bytes) if instruction.arrays else 0.0
    if kind == "all-gather":
        size *= layout.slice_count
    wire = size * _share_sent(kind, layout.slice_count)
    return kind, size, wire, layout.between_slices, True


def _share_sent(kind: str, members: int) -> float:
    """Return the smallest amount that each member must send, as a multiple of the array's size."""
    if kind.startswith("collective") or kind == "send":
        return 1.0
    return (members - 1) / members * (2 if kind == "all-reduce" else 1)


def _measure_sizes(where: Computation, instruction: Instruction) -> Sequence[int]:
    """Return the bytes of the operands, and those of the results. The whole array has the larger of
    the two sizes: a gather has it as result, a scatter as operand."""
    operands = [_find_array(where, name) for name in instruction.operands]
    return (
        sum(array.data_bytes for array in operands if array is not None),
        max(array.data_bytes for array in instruction.arrays)
        if instruction.opcode.endswith("-start")
        else sum(array.data_bytes for array in instruction.arrays),
    )
