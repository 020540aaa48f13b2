"""Comparison of the programs that the hosts of a gang run for the first time. Pure.

In: a `ProgramNote` for each program over several processes, in each host's order; the time. Out:
one sentence at the first difference. Hosts that run different programs, or the same ones in another
order, wait for each other's collectives for ever, or compute wrong values.

Promises: only programs of the same set of processes are compared, only those of main threads in
their order, and a difference counts only if another host has not run the program after `GRACE_S`.
"""

from __future__ import annotations

import base64
import itertools
import math
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kinetic._core.outcome import name_hosts as name_many
from kinetic._core.values import dataclass

GRACE_S = 1.0
"""Time in which hosts may run the same programs in another order, in several threads say."""
DONATED = " (donated)"
"""Ending of the type of an argument that its program may overwrite."""
_MOST_SINGLY = 4
_TOLERANCE = 1e-3
_FLOATS = ("f", "bf")
"""Beginnings of the names of floating-point types."""
_MOST_TEXT = 80
_VALUE = r"%\w+(#\d+)?,? ?"
_CONSTANT = r"\bconstant\b"
_Operation = tuple[str, str]
_FOR_EVER = "Collectives of the two will wait for each other for ever."
_NO_WAIT = "Their collectives match, so the hosts go on with values that differ."
_UNKNOWN = "The hosts may wait for each other for ever, or go on with values that differ."


@dataclass(frozen=True)
class ProgramNote:
    """A program over several processes that a host runs for the first time.

    Attributes:
        number: the host's count of such programs, from 1.
        fingerprint: equal for equal programs, whatever their source lines.
        name, line: name of the function, and the user's line that called it: "train.py:41".
        processes: indices of the processes that run the program; () for all.
        is_main: True if the main thread runs it, and it may wait for other hosts.
        before: digest of the programs of earlier calls in this process; "" for a new process.
        arguments, shardings: type and sharding of each argument.
        names: names of the arguments.
        mesh: the mesh and the order of its devices.
        flags: flags of the compiler.
        collectives: digest of the collectives in their order and of their devices; "" if unknown,
            as in loops.
        operations: from `pack_operations`.
        call: number of the host's call of the program, from 1; of further calls, only the inputs
            and the outputs are compared.
        inputs: for each argument that must be equal on all hosts: the digest of a value of this
            host; for a replicated array its type and some of its numbers, such as "f32[2] 0.5 nan";
            "" for other arguments.
        results: names of the results.
        outputs: type and some numbers of each small result that must be equal on all hosts; "" for
            others. A note with outputs has nothing else to compare.
    """

    number: int
    fingerprint: str
    name: str
    line: str
    processes: tuple[int, ...] = ()
    is_main: bool = True
    before: str = ""
    arguments: tuple[str, ...] = ()
    shardings: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    mesh: str = ""
    flags: tuple[str, ...] = ()
    collectives: str = ""
    operations: str = ""
    inputs: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    call: int = 1

    @property
    def title(self) -> str:
        """The program with its line: "train_step at train.py:41"."""
        return f"{self.name} at {self.line}" if self.line else self.name


class Difference(NamedTuple):
    """A difference between hosts, in a sentence; `hosts` are to blame."""

    sentence: str
    hosts: tuple[int, ...]


class _Suspect(NamedTuple):
    """A call whose inputs or outputs differ between hosts: those of each host so far, and the time
    at which the difference was found."""

    note: ProgramNote
    of_hosts: Mapping[int, tuple[str, ...]]
    since: float


class _Group:
    """The hosts that run programs over one set of processes."""

    def __init__(self) -> None:
        self.in_order: dict[int, list[str]] = {}
        """Fingerprints of the programs of each host's main thread."""
        self.of_host: dict[int, set[str]] = {}
        """Fingerprints of all programs of each host."""
        self.first: list[str] = []
        """The first fingerprint with each number."""
        self.differs_at: int | None = None
        self.since = 0.0
        self.is_reordered = False
        """True if the hosts run the same programs in another order so far."""


class ProgramWatch:
    """Compares the programs of one gang's hosts."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._groups: dict[tuple[tuple[int, ...], str], _Group] = {}
        self._notes: dict[str, ProgramNote] = {}
        self._last: dict[int, int] = {}
        self._values: dict[tuple[str, str, int, bool], dict[int, tuple[str, ...]]] = {}
        """Inputs or outputs of each host, for each call of a program."""
        self._suspect: _Suspect | None = None
        self.values: Difference | None = None
        """The first inputs or outputs that should be the same on all hosts and are not."""
        self.difference: Difference | None = None
        """The first difference; at most one is named for each gang."""

    @property
    def is_due(self) -> bool:
        """True if a difference may be certain soon."""
        return self._suspect is not None or (
            self.difference is None
            and any(
                group.differs_at is not None and not group.is_reordered
                for group in self._groups.values()
            )
        )

    def note(self, host: int, note: ProgramNote, now: float) -> None:
        """Note a program of a host. Idempotent: each host counts its programs."""
        if note.number <= self._last.get(host, 0) or self.difference is not None:
            return
        self._last[host] = note.number
        self._note_values(host, note, now)
        if note.call == 1 and not note.outputs:
            self._note_program(host, note, now)
        self._compare_values(now)

    def _note_program(self, host: int, note: ProgramNote, now: float) -> None:
        self._notes.setdefault(note.fingerprint, note)
        group = self._groups.setdefault((note.processes, note.before), _Group())
        group.of_host.setdefault(host, set()).add(note.fingerprint)
        programs = group.in_order.setdefault(host, [])
        if not note.is_main:
            return
        programs.append(note.fingerprint)
        at = len(programs) - 1
        if at == len(group.first):
            group.first.append(note.fingerprint)
        elif group.first[at] != note.fingerprint and (
            group.differs_at is None or at < group.differs_at
        ):
            group.differs_at, group.since = at, now

    def _note_values(self, host: int, note: ProgramNote, now: float) -> None:
        """Note the inputs or the outputs of a host's call, and whether they differ from those of
        another host."""
        if self.values is not None:
            return
        call = note.fingerprint, note.before, note.call, bool(note.outputs)
        of_hosts = self._values.setdefault(call, {})
        own = of_hosts[host] = note.outputs or note.inputs
        if self._counts_all(note, of_hosts):
            del self._values[call]
        if self._suspect is None:
            pairs = (pair for other in of_hosts.values() for pair in zip(own, other, strict=False))
            if any(all(pair) and _find_difference(*pair) is not None for pair in pairs):
                self._suspect = _Suspect(note, of_hosts, now)

    def _counts_all(self, note: ProgramNote, of_hosts: Mapping[int, object]) -> bool:
        """True if all hosts that run a program are among these."""
        return len(of_hosts) == (len(note.processes) or self._hosts)

    def _compare_values(self, now: float, *, is_over: bool = False) -> None:
        """Name the hosts whose values differ, once those of all hosts are known or late. If the
        hosts run the program in another order, that is the difference."""
        if self._suspect is None:
            return
        note, of_hosts, since = self._suspect
        if not (is_over or now - since >= GRACE_S or self._counts_all(note, of_hosts)):
            return
        self._suspect = None
        group = self._groups.get((note.processes, note.before), _Group())
        orders = (group.in_order.get(host, ()) for host in of_hosts)
        places = {order.index(note.fingerprint) for order in orders if note.fingerprint in order}
        if len(places) < 2 or group.differs_at is None:
            self.values = _describe_values(note, of_hosts)
        elif self.difference is None:
            self.difference = self._compare(group, group.differs_at, is_late=True, stands=True)

    def find_difference(
        self,
        now: float,
        *,
        is_over: bool = False,
        stands: bool = False,
        returned: Collection[int] = (),
    ) -> Difference | None:
        """Return the first difference, once it is certain.

        Args:
            now: the time.
            is_over: the gang is stopped, and hosts may have failed because of the difference.
            stands: all hosts stand still, waiting in JAX, or have returned; then another order
                counts, too, and a program that some hosts have not begun.
            returned: hosts whose function has returned, which explains why the others wait.
        """
        self._compare_values(now, is_over=is_over)
        for group in self._groups.values() if self.difference is None else ():
            at, is_late = group.differs_at, now - group.since >= GRACE_S
            if at is not None and (stands or ((is_over or is_late) and not group.is_reordered)):
                self.difference = self._compare(group, at, is_late=is_late, stands=stands)
                group.is_reordered = is_late
            elif stands:
                self.difference = self._find_missing(group, returned, is_over=is_over)
            if self.difference is not None:
                break
        return self.difference

    def _compare(self, group: _Group, at: int, *, is_late: bool, stands: bool) -> Difference | None:
        """Compare program number `at` of all hosts that have run so many."""
        sides: dict[str, list[int]] = {}
        for host in sorted(group.in_order):
            if len(programs := group.in_order[host]) > at:
                sides.setdefault(programs[at], []).append(host)
        absent = [
            side
            for side in sides
            if any(side not in group.of_host[h] for own in sides for h in sides[own] if own != side)
        ]
        if len(absent) < (1 if is_late else len(sides)) and not stands:
            return None
        # The largest side is right; of several, that with the lowest host.
        majority = max(sides, key=lambda side: len(sides[side]))
        minority = next(side for side in sides if side != majority)
        return _describe_sides(
            (sides[minority], self._notes[minority]), (sides[majority], self._notes[majority])
        )

    def _find_missing(
        self, group: _Group, returned: Collection[int], *, is_over: bool
    ) -> Difference | None:
        """Find a program that only some hosts have begun when all stand still or have returned."""
        is_whole = self._groups.get(((), "")) is group
        # Kept processes may have run the program in an earlier call.
        members = range(self._hosts) if is_whole else group.in_order
        counts = {host: len(group.in_order.get(host, ())) for host in sorted(members)}
        least = min(counts.values(), default=0)
        callers = [host for host in counts if counts[host] > least]
        others = [host for host in counts if counts[host] == least]
        if not callers or set(others) <= set(returned):
            return None
        note = self._notes[group.in_order[callers[0]][least]]
        if any(note.fingerprint in group.of_host.get(host, ()) for host in others):
            return None
        minority = min(callers, others, key=len)
        is_pair = len(callers) == len(others)
        effect = "Collectives of this program wait for all hosts."
        if (earlier := self._find_namesake(group, others, note)) is None:
            which = f"{note.title}, which {_name_hosts(others)} {_have(others)} not"
        else:
            pair = _find_pair(note.arguments, earlier.arguments)
            which = f"{note.title} with {pair[0]}, but {_name_hosts(others)} with {pair[1]}"
            effect = _describe_effect(note, earlier) if is_over else effect
        return Difference(
            f"{_name_hosts(callers)} {_have(callers)} called {which}. {effect}",
            tuple(sorted((*callers, *others)) if is_pair else minority),
        )

    def _find_namesake(
        self, group: _Group, hosts: Sequence[int], note: ProgramNote
    ) -> ProgramNote | None:
        """Return the last program of the same title, with other arguments, that these hosts have
        all called."""
        for fingerprint in reversed(group.in_order.get(hosts[0], [])):
            other, of_host = self._notes[fingerprint], group.of_host
            is_alike = other.title == note.title and other.arguments != note.arguments
            if is_alike and all(fingerprint in of_host.get(host, ()) for host in hosts):
                return other
        return None


def _find_difference(one: str, other: str) -> tuple[str, str] | None:
    """Compare two hosts' descriptions of one array: its type and numbers, or a digest. Return the
    first two numbers that differ, or the two descriptions if they have no numbers; None if they
    agree. Floating-point numbers agree up to rounding, because hosts may have different hardware.
    """
    (kind, *numbers), (_, *others) = one.split(), other.split()
    if not numbers or len(numbers) != len(others):
        return None if one == other else (one, other)
    tolerance = _TOLERANCE if kind.startswith(_FLOATS) else 0.0
    for a, b in zip(numbers, others, strict=True):
        if a != b and not (tolerance and math.isclose(float(a), float(b), rel_tol=tolerance)):
            return a, b
    return None


def _describe_values(
    note: ProgramNote, of_hosts: Mapping[int, tuple[str, ...]]
) -> Difference | None:
    """Return the first difference of the hosts' values of one call, in a sentence that names the
    minority, or two hosts if no value is that of most hosts; the values of results are always
    numbers."""
    for at in (at for at, own in enumerate(note.outputs or note.inputs) if own):
        texts = {host: of_hosts[host][at] for host in sorted(of_hosts) if of_hosts[host][at]}
        sides: list[list[int]] = []
        for host, text in texts.items():
            alike = (side for side in sides if _find_difference(texts[side[0]], text) is None)
            if (side := next(alike, None)) is None:
                sides.append(side := [])
            side.append(host)
        if len(sides) > 1:
            return _describe_value(note, at, sides, texts)
    return None


def _describe_value(
    note: ProgramNote, at: int, sides: Sequence[list[int]], texts: Mapping[int, str]
) -> Difference:
    """Return the difference of the argument or result number `at`. `sides` are the groups of hosts
    with the same value."""
    most = max(sides, key=len)
    hosts = sorted(host for side in sides if side is not most for host in side)
    s, what = ("s", "another value") if len(hosts) == 1 else ("", "other values")
    what, pair = f"{what} than {_name_hosts(most)}", (hosts[0], most[0])
    if len(hosts) >= len(most):
        s, what, pair = "", "different values", (min(pair), max(pair))
        hosts = [*pair]
    in_call = f" in call {note.call}" if note.call > 1 else ""
    names = note.results if note.outputs else note.names
    name = names[at] if at < len(names) else f"number {at}"
    if note.outputs:
        values = _find_difference(texts[pair[0]], texts[pair[1]]) or ("", "")
        type_ = note.outputs[at].partition(" ")[0]
        sentence = (
            f"{_name_hosts(hosts)} get{s} {what} for {name} ({type_}) of {note.title}"
            f"{in_call}, which should be the same on all hosts: {values[0]} and {values[1]}. An "
            "array that counts as replicated differs between them: find it with "
            "jax.experimental.multihost_utils.assert_equal."
        )
    else:
        type_ = note.arguments[at].removesuffix(DONATED)
        sentence = (
            f"{_name_hosts(hosts)} give{s} {note.title}{in_call} {what} for the argument "
            f"{name} ({type_}), which it takes for the same on all hosts: give the "
            "same to all, or make a global array of the parts "
            "(jax.make_array_from_process_local_data)."
        )
    return Difference(sentence, tuple(hosts))


def _describe_sides(
    minority: tuple[list[int], ProgramNote], majority: tuple[list[int], ProgramNote]
) -> Difference:
    """Return the difference of the programs of two groups of hosts. If the groups are of equal
    size, neither counts as right."""
    (hosts, one), (others, other) = minority, majority
    everybody = sorted((*hosts, *others))
    is_pair = len(hosts) == len(others)
    if is_pair:
        opening = f"{_name_hosts(everybody)} compile different programs"
        description = _describe(one, other, f"on {_name_hosts(hosts)}", f"on {_name_hosts(others)}")
    else:
        compiles = "compiles" if len(hosts) == 1 else "compile"
        opening = f"{_name_hosts(hosts)} {compiles} another program than {_name_hosts(others)}"
        description = _describe(one, other, "there", "here")
    return Difference(
        f"{opening}: {description}. {_describe_effect(one, other)}",
        tuple(everybody if is_pair else hosts),
    )


def _describe_effect(one: ProgramNote, other: ProgramNote) -> str:
    """Return a sentence on what happens to hosts that run two different programs."""
    if not (one.collectives and other.collectives):
        return _UNKNOWN
    if one.collectives != other.collectives:
        return _FOR_EVER
    # Of two functions, one may only be additional: its host is one call behind from then on.
    return _NO_WAIT if one.title == other.title else _UNKNOWN


def _have(hosts: Sequence[int]) -> str:
    return "has" if len(hosts) == 1 else "have"


def _name_hosts(hosts: Sequence[int]) -> str:
    """Return "hosts 0, 1 and 3"; with ranges if there are more than four."""
    if not 1 < len(hosts) <= _MOST_SINGLY:
        return name_many(hosts)
    *first, last = map(str, sorted(hosts))
    return f"hosts {', '.join(first)} and {last}"


def _describe(one: ProgramNote, other: ProgramNote, in_one: str, in_other: str) -> str:
    """Return a sentence on the first difference of two programs; `in_one` and `in_other` are its
    words for their hosts."""
    if one.name != other.name or len(one.arguments) != len(other.arguments):
        counts = [f" with {len(note.arguments)} arguments" for note in (one, other)]
        if one.name != other.name or counts[0] == counts[1]:
            counts = ["", ""]
        return f"{one.title}{counts[0]} {in_one}, {other.title}{counts[1]} {in_other}"
    title = one.title if one.line == other.line else f"{one.title} (or {other.line})"
    if one.arguments != other.arguments:
        form, pair = "takes {}", _find_pair(one.arguments, other.arguments)
    elif one.flags != other.flags:
        form, pair = "is compiled with {}", _find_pair(one.flags, other.flags)
    elif one.mesh != other.mesh:
        form, pair = "runs on {}", (one.mesh, other.mesh)
    elif one.shardings != other.shardings:
        pairs = zip(one.arguments, one.shardings, other.shardings, strict=False)
        argument, *both = next(row for row in pairs if row[1] != row[2])
        form, pair = f"takes {argument} split {{}}", (both[0], both[1])
    else:
        return f"{title} {_describe_operations(one, other, in_one, in_other)}"
    return f"{title} {form.format(pair[0])} {in_one}, {pair[1]} {in_other}"


def _find_pair(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    pairs = zip(one, other, strict=False)
    absent = "nothing"
    only = [next((x for x in a if x not in b), absent) for a, b in ((one, other), (other, one))]
    return next((pair for pair in pairs if pair[0] != pair[1]), (only[0], only[1]))


def _describe_operations(one: ProgramNote, other: ProgramNote, in_one: str, in_other: str) -> str:
    """Return a sentence on the first operation that differs, with the user's lines. A different
    constant, or order of operands, counts only if all operations are the same otherwise."""
    whole = [unpack_operations(note.operations) for note in (one, other)]
    bare = [[(re.sub(_VALUE, "", text), line) for text, line in own] for own in whole]
    brief = [[each for each in own if not re.search(_CONSTANT, each[0])] for own in bare]
    pairs = (itertools.zip_longest(*both, fillvalue=("nothing", "")) for both in (brief, bare))
    for first, second in itertools.chain.from_iterable(pairs):
        if first[0] != second[0]:
            texts = [
                f"{text}{' at ' if line else ''}{line}" for text, line in _shorten(first, second)
            ]
            return f"has {texts[0]} {in_one}, {texts[1]} {in_other}"
    for first, second in zip(*whole, strict=True):
        if first[0] != second[0]:
            lines = " or ".join(dict.fromkeys(line for _, line in (first, second) if line))
            name = f"{_split(first[0])[0]}{' at ' if lines else ''}{lines}"
            return f"has {name} with other operands, or in another order, {in_one} than {in_other}"
    return f"has other constants or options {in_one} than {in_other}"


def _split(operation: str) -> tuple[str, str]:
    """Return the name of an operation, and its text without its value and its dialect."""
    text = re.sub(r"^((%\S+ )?= )?\W?(stablehlo\.)?", "", operation)
    return re.split(r"[^\w.-]", text, maxsplit=1)[0], text


def _shorten(one: _Operation, other: _Operation) -> list[_Operation]:
    """Return short texts of two operations that differ in more than the names of values: only their
    names if these differ, else what differs in the operations."""
    names, texts = zip(*(_split(text) for text, _ in (one, other)), strict=True)
    if names[0] == names[1] or not all(names):
        names = tuple(re.sub(_VALUE, "", text) for text in texts)
        pairs = enumerate(zip(*names, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(map(len, names)))
        start = 0 if same < _MOST_TEXT // 2 else same - _MOST_TEXT // 4
        opening = "…" if start else ""
        names = tuple(f"{opening}{name[start : start + _MOST_TEXT]}" for name in names)
    return [(names[0], one[1]), (names[1], other[1])]


def pack_operations(operations: Collection[_Operation]) -> str:
    """Return the operations of a program, each with the user's line, in little space."""
    text = "\n".join(f"{operation}\t{line}" for operation, line in operations)
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def unpack_operations(packed: str) -> list[_Operation]:
    """Return the operations that `pack_operations` has packed."""
    lines = zlib.decompress(base64.b64decode(packed)).decode().splitlines() if packed else []
    return [(operation, line) for operation, _, line in (line.partition("\t") for line in lines)]
