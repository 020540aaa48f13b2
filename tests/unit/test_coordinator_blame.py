"""Finding the host that makes a gang hang, from the stack traces of the workers."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._core.gang.blame import (
    RETURNED,
    explain_hang,
    format_groups,
    name_hosts,
    notice_of,
    odd_hosts,
    parse,
    summarize_groups,
)

JAX = '  File "/v/site-packages/jax/_src/array.py", line 9 in _value\n'
USER = '  File "/w/train.py", line 5 in <module>\n'
LOADING = '  File "/w/data.py", line 3 in load\n' + USER
OTHER = '  File "/w/data.py", line 8 in parse\n' + USER
WAITING = JAX + USER


def dump(main: str, address: str = "0x00007fa0b2e8ab80", *, others: int = 1) -> str:
    thread = (
        f"Thread {address[:-3]}{{:03x}} (most recent call first):\n"
        '  File "threading.py", line 982 in run\n\n'
    )
    return (
        "".join(map(thread.format, range(others)))
        + f"Current thread {address} (most recent call first):\n{main}"
    )


@pytest.mark.parametrize(
    ("stacks", "returned", "odd"),
    [
        ({0: LOADING}, (), (0,)),
        ({0: WAITING, 1: WAITING, 2: LOADING, 3: WAITING}, (), (2,)),
        ({0: WAITING, 1: LOADING, 2: LOADING, 3: LOADING}, (), (1, 2, 3)),
        ({0: LOADING, 1: LOADING, 2: OTHER}, (), (2,)),
        ({0: LOADING, 1: OTHER}, (), (0, 1)),
        ({0: WAITING, 1: WAITING, 2: WAITING}, (), (0, 1, 2)),
        ({0: WAITING, 1: JAX + LOADING, 2: WAITING}, (), (1,)),
        ({0: WAITING, 1: "", 2: LOADING}, (), (1,)),
        ({0: WAITING, 1: LOADING, 2: ""}, {1, 2}, (0,)),
        ({0: "garbage 0x12", 1: "garbage 0x34", 2: "other garbage"}, (), (2,)),
        ({}, (), ()),
    ],
)
def test_the_odd_host_out(stacks, returned, odd):
    assert odd_hosts(stacks, returned) == odd


def test_addresses_and_side_threads_do_not_tell_hosts_apart():
    assert (
        parse(dump(LOADING))
        == parse(dump(LOADING, "0x00001111deadbeef", others=3))
        == parse(LOADING)
    )


def test_the_main_thread_is_found_in_a_real_dump():
    done = threading.Event()
    side = threading.Thread(target=done.wait)
    side.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    done.set()
    side.join()
    assert text.count("most recent call first") >= 2
    assert parse(text).frames[0][1] == "test_the_main_thread_is_found_in_a_real_dump"


def test_with_too_many_threads_the_one_that_took_the_signal_counts():
    text = (
        f"Current thread 0x12 (most recent call first):\n{LOADING}\n"
        + dump(WAITING).replace("Current thread", "Thread")
        + "...\n"
    )
    assert parse(text) == parse(LOADING)


@pytest.mark.parametrize(
    "path", ["/home/me/jax/train.py", "/w/jaxlib_notes.py", "/w/myjax/_src.py"]
)
def test_a_frame_in_the_users_file_does_not_count_as_waiting(path):
    assert not parse(f'  File "{path}", line 1 in f\n').waits


@pytest.mark.parametrize(
    "path",
    [
        "/v/site-packages/jax/experimental/x.py",
        "/v/dist-packages/jaxlib/x.py",
        "/src/jax/jax/_src/api.py",
        r"C:\s\jaxlib\x.py",
    ],
)
def test_a_frame_in_jax_counts_as_waiting(path):
    assert parse(f'  File "{path}", line 1 in f\n').waits


def test_groups_are_printed_once_most_recent_call_last_odd_one_first():
    text = format_groups({0: WAITING, 1: LOADING, 2: WAITING, 3: WAITING})
    assert text.splitlines()[:3] == [
        "host 1 is at data.py:3 in load:",
        "  /w/train.py:5 in <module>",
        "  /w/data.py:3 in load",
    ]
    assert text.count("hosts 0, 2-3 wait at train.py:5 in <module>:\n") == 1
    assert text.count("_value") == 1


def test_who_did_not_answer_is_shown():
    assert "host 1:\n  (no answer)" in format_groups({0: WAITING, 1: ""})


@pytest.mark.parametrize(
    ("hosts", "name"),
    [([3], "host 3"), ([2, 5], "hosts 2, 5"), ([3, 0, 2], "hosts 0, 2-3"), (range(9), "hosts 0-8")],
)
def test_names_of_hosts(hosts, name):
    assert name_hosts(hosts) == name


@given(
    st.dictionaries(
        st.integers(0, 9), st.one_of(st.text(), st.sampled_from([WAITING, LOADING, OTHER, ""]))
    ),
    st.sets(st.integers(0, 9)),
)
def test_a_running_host_is_always_blamed_and_a_returned_one_never(stacks, returned):
    odd = odd_hosts(stacks, returned)
    assert set(odd) <= stacks.keys() - returned
    assert bool(odd) == bool(stacks.keys() - returned)
    assert list(odd) == sorted(odd)
    format_groups(stacks)


def test_the_gist_names_who_holds_up_and_what_the_others_wait_in():
    many_calls = '  File "/v/site-packages/jax/_src/api.py", line 7 in call\n' * 9
    assert summarize_groups(
        {0: JAX + many_calls + LOADING, 1: LOADING, 2: JAX + many_calls + LOADING}, (1,)
    ) == (
        "host 1 is at data.py:3 in load:\n  /w/train.py:5 in <module>\n  /w/data.py:3 in load\n"
        "hosts 0, 2 wait at data.py:3 in load:\n"
        "  /w/train.py:5 in <module>\n  /w/data.py:3 in load\n  jax/_src/api.py:7 in call\n"
        "  … 8 more calls …\n  jax/_src/array.py:9 in _value\n"
    )


def test_the_gist_says_who_did_not_answer_and_who_said_something_else():
    assert summarize_groups({0: "", 1: "it is stopped", 2: OTHER}, (0, 1)) == (
        "host 0:\n  (no answer)\nhost 1:\n  it is stopped\n"
        "host 2 is at data.py:8 in parse:\n  /w/train.py:5 in <module>\n  /w/data.py:8 in parse\n"
    )


@given(
    st.dictionaries(
        st.integers(0, 999), st.sampled_from([WAITING, LOADING * 40, OTHER * 99, "", "text\n" * 50])
    )
)
def test_the_gist_fits_on_a_screen(stacks):
    by_itself = {
        host: f'  File "/w/own-{host}.py", line 1 in f\n{text}' for host, text in stacks.items()
    }
    for host_stacks in (stacks, by_itself):
        text = summarize_groups(host_stacks, odd_hosts(host_stacks, ()))
        assert len(text.splitlines()) <= 43
        assert all(len(line) <= 120 for line in text.splitlines())


def test_very_many_hosts_are_counted_not_listed():
    assert (
        name_hosts(range(0, 1000, 2))
        == "hosts 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 488 more"
    )


def test_a_host_that_runs_no_python_code_is_said_to():
    assert format_groups({0: dump(LOADING), 1: dump("", others=0)}).startswith(
        "host 1:\n  (runs no Python code)\n"
    )


EARLY = JAX + '  File "/w/train.py", line 7 in early\n' + USER
LATE = JAX + '  File "/w/train.py", line 9 in late\n' + USER
STILL = "hosts 0-1, 3 of 4 stood still for 31 s"


@pytest.mark.parametrize(
    ("stacks", "explanation"),
    [
        (
            {0: EARLY, 1: EARLY, 2: RETURNED, 3: EARLY},
            "host 2 has returned; hosts 0-1, 3 wait for it at train.py:7 in early. Hosts 0-1, 3 of "
            "4 stood still for 31 s",
        ),
        (
            {0: EARLY, 1: LATE, 2: RETURNED, 3: RETURNED},
            "hosts 2-3 have returned; host 0 waits for them at train.py:7 in early; host 1 waits "
            "for them at train.py:9 in late.",
        ),
        (
            {0: EARLY, 1: LOADING, 2: RETURNED, 3: EARLY},
            f"{STILL}; host 1 differs from the others; host 2 has returned",
        ),
        ({0: EARLY, 1: EARLY, 2: "", 3: EARLY}, f"{STILL}; waiting for host 2"),
        ({0: EARLY, 1: EARLY, 3: EARLY}, STILL),
    ],
)
def test_a_hang_is_explained_by_who_has_returned(stacks, explanation):
    assert explain_hang(stacks, (0, 1, 3), odd_hosts(stacks, ()), STILL).startswith(explanation)


def test_who_has_returned_is_shown_first_and_never_blamed():
    stacks = {0: EARLY, 1: EARLY, 2: RETURNED}
    assert odd_hosts(stacks, ()) == (0, 1)
    assert format_groups(stacks).startswith(
        "host 2 has returned\n\nhosts 0-1 wait at train.py:7 in early:\n  /w/train.py:5"
    )
    assert summarize_groups(stacks, (0, 1)) == (
        "host 2 has returned\nhosts 0-1 wait at train.py:7 in early:\n"
        "  /w/train.py:5 in <module>\n  /w/train.py:7 in early\n  jax/_src/array.py:9 in _value\n"
    )


SYNC = (
    JAX
    + '  File "/v/site-packages/jax/_src/api.py", line 7 in call\n' * 6
    + '  File "/v/site-packages/jax/multihost.py", line 3 in sync_global_devices\n'
    + '  File "/v/site-packages/jax/_src/traceback_util.py", line 3 in reraise\n'
)


def test_the_call_that_the_others_wait_in_is_named():
    early = SYNC + '  File "/w/train.py", line 7 in early\n' + USER
    stacks = {0: early, 1: early, 2: RETURNED}
    assert explain_hang(stacks, (0, 1), (0, 1), STILL).startswith(
        "host 2 has returned; hosts 0-1 wait for it in sync_global_devices at train.py:7 in early."
    )
    assert (
        "  /w/train.py:7 in early\n  jax/multihost.py:3 in sync_global_devices\n"
        "  … 7 more calls …\n  jax/_src/array.py:9 in _value\n"
    ) in summarize_groups(stacks, (0, 1))


def test_a_long_stack_shows_its_own_lines_and_the_innermost_calls():
    library = "".join(
        f'  File "/v/site-packages/requests/s.py", line {n} in f{n}\n' for n in range(9)
    )
    assert summarize_groups({0: library + LOADING + USER * 30}, (0,)) == (
        "host 0 is at data.py:3 in load:\n  /w/train.py:5 in <module>\n  /w/data.py:3 in load\n"
        "  … 4 more calls …\n" + "".join(f"  requests/s.py:{n} in f{n}\n" for n in (4, 3, 2, 1, 0))
    )


def test_the_notice_is_one_line():
    assert notice_of((2,), (0, 1, 3), 30) == (
        "host 2 has returned, and hosts 0-1, 3 have stood still for 30 s: do they wait for it in a "
        "collective?"
    )
    assert notice_of((0, 1), (2,), 30.0).endswith(
        "host 2 has stood still for 30 s: does it wait for them in a collective?"
    )
