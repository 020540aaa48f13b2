"""Which processes are a job's: by the title of a fork, and by the mark in the environment of a
program."""

from __future__ import annotations

import pytest

from kinetic._core.kinship import VARIABLE, belongs, job_of, mark

MARKED = f"A=1\0{VARIABLE}={mark('token')}\0KINETIC_JOB_ID=job-1\0".encode()


@pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        (b"kinetic-worker job-1 host 0\0\0", b"", True),
        (b"kinetic-worker job-12 host 0\0", b"", False),
        (b"kinetic-agent job-1 host 0\0", b"", False),
        (b"grep\0kinetic-worker job-1 host 0\0", b"", False),
        (b"sleep\0", MARKED, True),
        (b"sleep\0", b"KINETIC_JOB_ID=job-1\0", False),
        (b"sleep\0", MARKED.replace(mark("token").encode(), mark("other").encode()), False),
        (b"", b"", False),
    ],
)
def test_members(command, environ, expected):
    assert belongs("job-1", "token", command, environ) is expected


def test_the_mark_does_not_give_the_token_away():
    assert "token" not in mark("token")


def test_whose_program_it_is():
    assert job_of(MARKED) == "job-1"
    assert job_of(b"KINETIC_JOB_ID=job-1\0") == ""
    assert job_of(b"\xff\0\0=\0") == ""
