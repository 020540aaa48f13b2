"""The comparison of the programs that hosts run: which differences are named, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gang_cases import ended, gang_of, raised
from test_coordinator_hangs import SLEEPING, WAITING, stand_still

from kinetic._core.events import EventKind
from kinetic._core.exits import Exit
from kinetic._core.gang.picture import picture_of
from kinetic._core.gang.programs import (
    GRACE_S,
    ProgramNote,
    ProgramWatch,
    pack_operations,
    unpack_operations,
)
from kinetic._host.verdicts import judge_gang

STEP = ProgramNote(1, "a", "train_step", "train.py:41", arguments=("f32[8,128]",))
SHORT = replace(STEP, fingerprint="b", arguments=("f32[7,128]",))
EVALUATE = ProgramNote(2, "e", "evaluate", "train.py:50", arguments=("f32[8,128]",))
SENTENCE = (
    "host 2 compiles another program than hosts 0, 1 and 3: train_step at train.py:41 takes "
    "f32[7,128] there, f32[8,128] here. The hosts may wait for each other for ever, or go on with "
    "values that differ."
)


def watch_of(*programs: list[ProgramNote], now: float = 0.0) -> ProgramWatch:
    """Return the watch of a gang whose hosts have run these programs, numbered in their order."""
    watch = ProgramWatch(len(programs))
    for host, notes in enumerate(programs):
        for number, note in enumerate(notes, 1):
            watch.note(host, replace(note, number=number), now)
    return watch


def test_the_minority_is_named_with_its_line_and_shapes():
    """One of four hosts has another shape: it alone is named, after the moment of grace."""
    watch = watch_of([STEP], [STEP], [SHORT], [STEP])
    assert watch.is_due
    assert watch.find_difference(GRACE_S / 2) is None
    difference = watch.find_difference(GRACE_S)
    assert difference is not None
    assert difference == (SENTENCE, (2,))
    assert watch.find_difference(100.0) is difference
    assert not watch.is_due


def test_of_two_hosts_both_are_named():
    difference = watch_of([STEP], [SHORT]).find_difference(1.0)
    assert difference is not None
    assert difference.hosts == (0, 1)
    assert difference.sentence.startswith(
        "hosts 0 and 1 compile different programs: train_step at train.py:41 takes f32[7,128] on "
        "host 1, f32[8,128] on host 0."
    )


def test_an_extra_program_is_named_even_if_its_host_goes_on():
    """Host 0 has run a warm-up that the others have not, and then the same programs."""
    warm_up = replace(EVALUATE, name="warm_up", line="train.py:9")
    difference = watch_of([warm_up, STEP], [STEP], [STEP]).find_difference(1.0)
    assert difference is not None
    assert difference.hosts == (0,)
    assert "warm_up at train.py:9 there, train_step at train.py:41 here" in difference.sentence


def test_another_order_is_named_only_when_the_gang_stands_still():
    watch = watch_of([STEP, EVALUATE], [EVALUATE, STEP])
    assert watch.find_difference(10.0) is None
    assert not watch.is_due
    difference = watch.find_difference(11.0, stands=True)
    assert difference is not None
    assert difference.hosts == (0, 1)


def test_programs_of_other_threads_processes_and_calls_are_not_compared():
    """Programs of background threads come in any order, parts of the hosts run programs of their
    own, and a process of a session has compiled programs in earlier calls."""
    behind = [replace(note, is_main=False) for note in (EVALUATE, STEP)]
    parts = [[replace(STEP, processes=(0, 1))], [replace(SHORT, processes=(2, 3))]]
    calls = [[replace(STEP, before="x")], [replace(SHORT, before="y")]]
    for hosts in ([behind, behind[::-1]], parts, calls):
        assert watch_of(*hosts).find_difference(9.0) is None


def test_a_program_that_another_thread_has_run_is_not_missing():
    ran = replace(EVALUATE, is_main=False)
    assert watch_of([EVALUATE, STEP], [ran, STEP]).find_difference(9.0) is None


def test_a_program_that_only_some_have_called_is_named_when_all_stand_still():
    watch = watch_of([STEP, EVALUATE], [STEP])
    assert watch.find_difference(90.0) is None
    difference = watch.find_difference(90.0, stands=True)
    assert difference is not None
    assert difference.hosts == (0, 1)
    assert difference.sentence == (
        "host 0 has called evaluate at train.py:50, which host 1 has not. Collectives of this "
        "program wait for all hosts."
    )
    assert watch_of([STEP], []).find_difference(90.0, stands=True) is not None
    assert watch_of([STEP], [STEP]).find_difference(90.0, stands=True) is None


@pytest.mark.parametrize(
    ("is_over", "effect"),
    [
        (True, "Their collectives match, so the hosts go on with values that differ."),
        (False, "Collectives of this program wait for all hosts."),
    ],
)
def test_a_last_batch_of_another_size_is_named_with_both_shapes(is_over, effect):
    """All hosts have called the step before; host 2 gives it more rows in its last call."""
    step, last = (replace(note, collectives="c") for note in (STEP, SHORT))
    watch = watch_of([EVALUATE, step], [EVALUATE, step], [EVALUATE, step, last])
    difference = watch.find_difference(90.0, stands=True, is_over=is_over)
    assert difference is not None
    assert difference == (
        "host 2 has called train_step at train.py:41 with f32[7,128], but hosts 0 and 1 with "
        f"f32[8,128]. {effect}",
        (2,),
    )


def test_a_program_of_an_earlier_call_is_not_missing():
    """A kept process of a session has it already, and does not note it again."""
    for before in (["x"], ["x", "y"]):
        hosts = [[replace(STEP, before=digest)] for digest in before]
        assert watch_of(*hosts, *[[]] * (2 - len(hosts))).find_difference(9.0, stands=True) is None


def test_a_message_that_arrives_twice_counts_once():
    watch = watch_of([STEP, EVALUATE])
    for _ in range(2):
        watch.note(1, STEP, 0.0)
    watch.note(1, EVALUATE, 0.0)
    assert watch.find_difference(9.0) is None


def test_the_first_operation_that_differs_is_named_with_the_users_lines():
    """Shapes are equal: the operations are compared, without the names of values."""
    common = ("%0 = stablehlo.negate %arg0 : tensor<8xf32>", "train.py:16")
    add, multiply = (
        [common, (f"%1 = stablehlo.{name} %0, %0 : tensor<8xf32>", f"train.py:{line}")]
        for name, line in (("add", 17), ("multiply", 18))
    )
    assert unpack_operations(pack_operations(add)) == add
    one = replace(STEP, operations=pack_operations(add), collectives="c")
    other = replace(one, fingerprint="b", operations=pack_operations(multiply))
    difference = watch_of([one], [one], [other]).find_difference(1.0)
    assert difference is not None
    assert difference.sentence == (
        "host 2 compiles another program than hosts 0 and 1: train_step at train.py:41 has "
        "multiply at train.py:18 there, add at train.py:17 here. Their collectives match, so the "
        "hosts go on with values that differ."
    )


@pytest.mark.parametrize(
    ("here", "there", "name", "effect"),
    [
        ("c", "c", "train_step", "Their collectives match, so the hosts go on with values that"),
        ("c", "d", "train_step", "Collectives of the two will wait for each other for ever."),
        ("", "", "train_step", "The hosts may wait for each other for ever, or go on with values"),
        ("c", "", "train_step", "The hosts may wait for each other for ever, or go on with values"),
        ("c", "c", "evaluate", "The hosts may wait for each other for ever, or go on with values"),
    ],
)
def test_hosts_wait_for_ever_only_if_their_collectives_are_known_to_differ(
    here, there, name, effect
):
    """The collectives of large programs, and of those with loops, are unknown."""
    one = replace(STEP, collectives=here)
    other = replace(SHORT, name=name, collectives=there)
    difference = watch_of([one], [one], [other]).find_difference(1.0)
    assert difference is not None
    assert f". {effect}" in difference.sentence


def test_the_gang_says_the_difference_once_and_stores_it():
    """The hosts get the sentence as a notice, and readers of events as the attempt's difference."""
    gang = gang_of(4)
    for host, note in enumerate((STEP, STEP, SHORT, STEP)):
        gang.note_programs(host, (note,), 1.0)
    assert gang.urgent
    assert not gang.view(0).notice
    events = (*gang.sweep(1.0), *gang.sweep(2.1), *gang.sweep(2.2))
    (event,) = (event for event in events if event.kind is EventKind.PROGRAMS)
    assert (event.detail, event.hosts) == (SENTENCE, (2,))
    assert gang.view(0).notice == SENTENCE
    assert not gang.urgent
    attempt = picture_of(events, 4).current
    assert attempt.difference == SENTENCE == attempt.to_json()["difference"]


def test_a_hang_is_explained_by_the_difference():
    gang = gang_of(4, hang_timeout_s=30.0)
    for host, note in enumerate((STEP, STEP, SHORT, STEP)):
        gang.note_programs(host, (note,), 1.0)
    stand_still(gang, range(4), 40.0)
    for host in range(4):
        gang.stacks(host, 1, WAITING, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (2,)
    assert gang.view(2).stop_exit is Exit.HANG
    assert gang.stop_reason.startswith(f"{SENTENCE} All 4 hosts stood still for 31 s")


def test_a_host_outside_of_jax_is_blamed_for_what_it_has_not_called():
    """Host 1 loads data while host 0 waits in a program that host 1 has not begun."""
    gang = gang_of(2, hang_timeout_s=30.0)
    gang.note_programs(0, (STEP,), 1.0)
    stand_still(gang, range(2), 40.0)
    for host, text in enumerate((WAITING, SLEEPING)):
        gang.stacks(host, 1, text, 40.1)
    gang.sweep(40.2)
    assert gang.first_failure == (1,)
    assert "train_step" not in gang.stop_reason


def test_timeouts_and_failures_are_explained_by_the_difference():
    """Collectives of different sizes fail on some platforms, and the job may end by its timeout."""
    for fail in (
        lambda gang: gang.sweep(9.0),
        lambda gang: gang.report(raised(0, consequence=True), 8.0),
    ):
        gang = gang_of(2, timeout_s=8.5)
        for host, note in enumerate((STEP, SHORT)):
            gang.note_programs(host, (note,), 1.0)
        fail(gang)
        gang.sweep(9.0)
        gang.sweep(99.0)
        assert ". Hosts 0 and 1 compile different programs: train_step at" in gang.stop_reason


def test_a_timeout_names_values_that_differ():
    """Beside a difference of the programs that has been named since."""
    gang = gang_of(2, timeout_s=8.5)
    note = replace(STEP, names=("flag",), inputs=("x",))
    for host, inputs in enumerate(("x", "y")):
        gang.note_programs(host, (replace(note, inputs=(inputs,)),), 1.0)
    for host, program in enumerate((EVALUATE, replace(SHORT, number=2))):
        gang.note_programs(host, (program,), 2.0)
    gang.sweep(9.0)
    assert ". Hosts 0 and 1 compile different programs: " in gang.stop_reason
    assert ". Hosts 0 and 1 give train_step at train.py:41 different values " in gang.stop_reason


def test_a_difference_of_hosts_that_return_at_once_is_named():
    gang = gang_of(2)
    for host, note in enumerate((STEP, SHORT)):
        gang.note_programs(host, (note,), 1.0)
    gang.report(ended(0), 1.1)
    assert EventKind.PROGRAMS in [event.kind for event in gang.sweep(1.1)]


def test_inputs_that_should_be_the_same_are_compared_once():
    """Host 1 has given another batch; numbers and global arrays, without a digest, are not
    compared. The sentence is said once, and does not explain a later hang."""
    note = replace(STEP, arguments=("f32[]", "i32[4]"), names=("lr", "batch"), inputs=("", "x"))
    gang = gang_of(3)
    for host, inputs in enumerate((("", "x"), ("y", "z"), ("", "u"))):
        gang.note_programs(host, (replace(note, inputs=inputs),), 1.0)
    gang.report(ended(0), 1.1)
    (event,) = (event for event in gang.sweep(9.0) if event.kind is EventKind.PROGRAMS)
    assert event.hosts == (0, 1)
    assert event.detail == (
        "hosts 0 and 1 give train_step at train.py:41 different values for the argument batch "
        "(i32[4]), which it takes for the same on all hosts: give the same to all, or make a "
        "global array of the parts (jax.make_array_from_process_local_data)."
    )
    gang.report(raised(1), 9.1)
    gang.sweep(99.0)
    assert "batch" not in gang.stop_reason


def test_constants_count_only_if_all_operations_are_the_same():
    """Constants come first in a module, and their names differ with their number."""
    three, four = (
        (f"%cst_{n} = stablehlo.constant dense<{n}.0> : tensor<f32>", "train.py:9") for n in (3, 4)
    )
    add = ("%0 = stablehlo.add %arg0, %cst_3 : tensor<f32>", "train.py:10")
    subtract = ("%0 = stablehlo.subtract %arg0, %cst_4 : tensor<f32>", "train.py:11")
    same = (add[0].replace("cst_3", "cst_4"), add[1])
    for operations, wanted in (
        ([four, subtract], "subtract at train.py:11 there, add at train.py:10 here"),
        (
            [four, same],
            "constant dense<4.0> : tensor<f32> at train.py:9 there, constant dense<3.0>",
        ),
    ):
        one = replace(STEP, operations=pack_operations([three, add]))
        other = replace(one, fingerprint="b", operations=pack_operations(operations))
        difference = watch_of([one], [one], [other]).find_difference(1.0)
        assert difference is not None
        assert wanted in difference.sentence


def test_hosts_that_wait_in_different_programs_are_named_with_their_lines():
    """The hosts have run the same programs, and now stand in different ones."""
    gang = gang_of(2)
    for host in range(2):
        gang.note_programs(host, (STEP, EVALUATE), 1.0)
    stand_still(gang, range(2), 70.0, stalled_s=61.0)
    gang.stacks(0, 1, WAITING, 70.1)
    gang.stacks(1, 1, WAITING.replace("line 5", "line 8"), 70.1)
    gang.sweep(70.2)
    assert gang.view(0).notice == (
        "all 2 hosts have stood still for 60 s: host 0 waits at train.py:5 in <module>; host 1 "
        "waits at train.py:8 in <module>."
    )


def test_inputs_of_further_calls_are_compared_by_their_number():
    """The hosts give the same batch at first, and another one in call 3; a repeated message, and a
    host that is a call behind, are no difference."""
    note = replace(STEP, arguments=("i32[4]",), names=("batch",), inputs=("f0",))
    watch = watch_of([note], [note])
    for number, inputs in ((2, "b"), (3, "f")):
        further = replace(note, number=number, call=number, inputs=(inputs,))
        watch.note(0, further, 1.0)
        watch.note(1, replace(further, inputs=(inputs * (number - 1),)), 1.0)
        watch.note(1, replace(further, inputs=("again",)), 1.0)
        assert (watch.values is not None) == (number == 3)
    assert watch.find_difference(9.0) is None
    assert watch.values is not None
    assert watch.values.sentence.startswith(
        "hosts 0 and 1 give train_step at train.py:41 in call 3 different values for the argument "
        "batch (i32[4])"
    )


@pytest.mark.parametrize(
    ("here", "there", "both"),
    [
        ("f32[] 0.3", "f32[] 0.12", "0.3 and 0.12"),
        ("f32[] 0.3", "f32[] nan", "0.3 and nan"),
        ("f32[2] 1.0 0.3", "f32[2] 1.00001 inf", "0.3 and inf"),
        ("i32[] 30000", "i32[] 30001", "30000 and 30001"),
        ("bf16[] 0.3", "bf16[] 0.31", "0.3 and 0.31"),
        ("f32[] 0.3", "f32[] 0.30001", ""),
        ("bf16[] 0.3", "bf16[] 0.30001", ""),
        ("f32[2] nan -inf", "f32[2] nan -inf", ""),
        ("f32[] 0.3", "", ""),
    ],
)
def test_outputs_that_should_be_the_same_are_compared(here, there, both):
    """Rounding is no difference, and neither are outputs of one host alone."""
    note = replace(STEP, results=("result[0]",))
    watch = watch_of([note], [note])
    for host, output in ((1, there), (0, here)):
        watch.note(host, replace(note, number=2, call=2, outputs=(output,)), 1.0)
    assert watch.find_difference(9.0) is None
    sentence = "" if watch.values is None else watch.values.sentence
    opening = f"hosts 0 and 1 get different values for result[0] ({here.split()[0]}) of train_step "
    assert bool(sentence) == bool(both)
    if both:
        assert sentence.startswith(f"{opening}at train.py:41 in call 2, which should be the same")
        assert f"on all hosts: {both}. " in sentence


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
@pytest.mark.parametrize("order", [(2, 0, 1, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_the_one_host_whose_value_differs_is_named(kind, order):
    """Whichever host is heard first, once all have been heard."""
    note = replace(STEP, arguments=("f32[]",), names=("lr",), results=("loss",))
    watch = ProgramWatch(4)
    for host in order:
        assert watch.values is None
        value = "f32[] 0.5" if host == 2 else "f32[] 0.25"
        watch.note(host, replace(note, **{kind: (value,)}), 1.0)
    sentence, hosts = watch.values or ("", ())
    assert hosts == (2,)
    given, received = (
        "host 2 gives train_step at train.py:41 another value than hosts 0, 1 and 3 for the "
        "argument lr (f32[]), which",
        "host 2 gets another value than hosts 0, 1 and 3 for loss (f32[]) of train_step at "
        "train.py:41, which should be the same on all hosts: 0.5 and 0.25. ",
    )
    assert sentence.startswith(given if kind == "inputs" else received)


def test_values_of_hosts_that_are_not_heard_of_are_not_awaited_for_long():
    """Host 3 never comes to the call; of the others, each has another value."""
    note = replace(STEP, arguments=("f32[]",), names=("lr",))
    watch = ProgramWatch(4)
    for host in range(3):
        watch.note(host, replace(note, inputs=(f"f32[] {host}",)), 1.0)
    assert watch.is_due
    watch.find_difference(1.0 + GRACE_S / 2)
    assert watch.values is None
    watch.find_difference(1.0 + GRACE_S)
    assert watch.values is not None
    assert watch.values.hosts == (0, 1)
    assert not watch.is_due


def test_another_order_of_programs_explains_values_that_differ():
    """Host 3 calls two programs in another order, and takes the results of one for the other's."""
    watch = watch_of([STEP, EVALUATE], [STEP, EVALUATE], [STEP, EVALUATE], [EVALUATE, STEP])
    assert watch.find_difference(9.0) is None
    for host in range(4):
        number = "2.0" if host == 3 else "1.0"
        watch.note(host, replace(STEP, number=3, outputs=(f"f32[] {number}",)), 9.0)
    assert watch.values is None
    assert watch.difference is not None
    assert watch.difference.hosts == (3,)
    assert "evaluate at train.py:50 there, train_step at train.py:41 here" in (
        watch.difference.sentence
    )


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("differing", ["programs", "inputs"])
def test_a_strict_gang_ends_with_the_difference_as_its_cause(differing, returns):
    """Also if another host has returned already, or returns before it can be stopped."""
    gang = gang_of(4, is_strict=True)
    given = replace(STEP, names=("batch",), inputs=("a",))
    other = SHORT if differing == "programs" else replace(given, inputs=("b",))
    gang.note_programs(0, (given,), 1.0)
    if returns:
        gang.report(ended(0), 1.1)
    for host, note in ((1, given), (2, other), (3, given)):
        gang.note_programs(host, (note,), 1.2)
    gang.sweep(2.3)
    assert gang.first_failure == (2,)
    assert [gang.view(host).stop_exit for host in (1, 2)] == [Exit.STOPPED, Exit.DIFFERED]
    for host in range(4):
        gang.report(ended(host), 2.4)
    outcome = judge_gang(gang)
    assert outcome.verdict == "failed"
    assert outcome.blamed == (2,)
    assert outcome.first is not None
    assert outcome.first.exit is Exit.DIFFERED
    assert "train_step at train.py:41" in outcome.reason


def test_a_strict_gang_whose_collective_breaks_names_the_difference():
    """Collectives of different sizes fail on some platforms before the second of grace is over."""
    gang = gang_of(2, is_strict=True)
    for host, note in enumerate((STEP, SHORT)):
        gang.note_programs(host, (note,), 1.0)
    gang.report(raised(0, consequence=True), 1.1)
    gang.report(raised(1, consequence=True), 1.2)
    outcome = judge_gang(gang)
    assert outcome.reason.startswith("hosts 0 and 1 compile different programs: train_step")
    assert (outcome.blamed, {report.exit for report in outcome.reports}) == (
        (0, 1),
        {Exit.DIFFERED},
    )


def test_long_operations_are_cut_where_they_differ():
    """The beginning that both have is left out."""
    begin = "%1 = stablehlo.collective_permute " + "x" * 200
    one, other = (
        replace(STEP, fingerprint=end, operations=pack_operations([(begin + end, "train.py:9")]))
        for end in ("[0, 1]", "[1, 0]")
    )
    difference = watch_of([one], [one], [other]).find_difference(1.0)
    assert difference is not None
    same = "x" * 19
    assert f"…{same}[1, 0] at train.py:9 there, …{same}[0, 1] at" in difference.sentence


def test_operands_in_another_order_are_named_as_such():
    """The texts of the operations are equal but for the names of values."""
    texts = "%1 = stablehlo.add %0, %arg0 : tensor<8xf32>", "%1 = stablehlo.add %arg0, %0 : "
    one, other = (
        replace(STEP, fingerprint=text, operations=pack_operations([(text, "train.py:9")]))
        for text in (texts[0], f"{texts[1]}tensor<8xf32>")
    )
    difference = watch_of([one], [one], [other]).find_difference(1.0)
    assert difference is not None
    assert (
        "train_step at train.py:41 has add at train.py:9 with other operands, or in another order, "
        "there than here."
    ) in difference.sentence


def test_operations_of_which_one_begins_like_the_other_are_cut_at_its_end():
    begin = "%1 = stablehlo.custom_call " + "x" * 200
    one, other = (
        replace(STEP, fingerprint=end, operations=pack_operations([(begin + end, "train.py:9")]))
        for end in ("", " {more}")
    )
    difference = watch_of([one], [one], [other]).find_difference(1.0)
    assert difference is not None
    assert f"…{'x' * 20} {{more}} at train.py:9 there, …{'x' * 20} at" in difference.sentence
