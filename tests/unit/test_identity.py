"""The identity of a host, read from the variables that a manifest sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._host.identity import from_environ
from kinetic.errors import UsageError

SHARED = {
    "KINETIC_STORE": "gs://bucket",
    "KINETIC_JOB_ID": "job-00c0ffee",
    "KINETIC_HOSTS": "8",
    "KINETIC_COORDINATOR": "kinetic-job-00c0ffee-host-0-0.kinetic-job-00c0ffee:7777",
    "KINETIC_TOKEN": "a token\n",
    "KINETIC_TLS_CERTIFICATE": "a certificate",
    "KINETIC_TLS_KEY": "a key",
}
"""Environment variables that a pod template sets alike for all hosts."""


def of_pod(slice_: int, pod: int, per_slice: int = 4) -> dict[str, str]:
    return {
        "KINETIC_JOB_INDEX": str(slice_),
        "KINETIC_POD_INDEX": str(pod),
        "KINETIC_HOSTS_PER_SLICE": str(per_slice),
        "KINETIC_HOST_ADDRESS": "10.0.0.7",
    }


@given(slices=st.integers(1, 8), per_slice=st.integers(1, 16))
def test_the_pods_of_all_slices_are_numbered_through(slices, per_slice):
    hosts = [
        from_environ(SHARED | of_pod(slice_, pod, per_slice)).host
        for slice_ in range(slices)
        for pod in range(per_slice)
    ]
    assert hosts == list(range(slices * per_slice))


def test_an_index_that_is_told_counts_more():
    assert from_environ(SHARED | of_pod(1, 3) | {"KINETIC_HOST_INDEX": "2"}).host == 2


def test_secrets_come_as_variables_and_the_key_is_the_leaders():
    leader, other = (from_environ(SHARED | of_pod(0, pod)) for pod in (0, 1))
    assert (leader.token, leader.certificate, leader.key) == ("a token", "a certificate", "a key")
    assert (other.token, other.certificate, other.key) == ("a token", "a certificate", "")


def test_a_folder_of_secrets_counts_more_than_variables(tmp_path):
    for name in ("token", "tls.crt", "tls.key"):
        (tmp_path / name).write_text(f"the file {name}")
    leader = from_environ(SHARED | of_pod(0, 0) | {"KINETIC_CREDENTIALS": str(tmp_path)})
    assert (leader.token, leader.certificate, leader.key) == (
        "the file token",
        "the file tls.crt",
        "the file tls.key",
    )


def test_nothing_that_is_the_hosts_reaches_the_function():
    env = SHARED | of_pod(0, 0) | {"KINETIC_TEE": "1", "TPU_WORKER_ID": "0", "MINE": "1"}
    assert from_environ(env).base_env == {
        "KINETIC_JOB_ID": "job-00c0ffee",
        "KINETIC_HOSTS": "8",
        "TPU_WORKER_ID": "0",
        "MINE": "1",
    }


@pytest.mark.parametrize(
    ("address", "target"), [("10.0.0.7", "10.0.0.7:7777"), ("fd00::7", "[fd00::7]:7777")]
)
def test_the_leader_listens_on_its_own_address_and_the_others_call_it_by_name(address, target):
    at = {"KINETIC_HOST_ADDRESS": address}
    assert from_environ(SHARED | of_pod(0, 0) | at).target == target
    assert from_environ(SHARED | of_pod(0, 1) | at).target == SHARED["KINETIC_COORDINATOR"]


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (("KINETIC_POD_INDEX",), "KINETIC_HOST_INDEX"),
        (("KINETIC_HOSTS_PER_SLICE",), "KINETIC_HOSTS_PER_SLICE"),
        (("KINETIC_TOKEN",), "KINETIC_CREDENTIALS"),
        (("KINETIC_TLS_KEY",), "KINETIC_TLS_KEY"),
    ],
)
def test_what_is_missing_is_named(without, named):
    env = {k: v for k, v in (SHARED | of_pod(0, 0)).items() if k not in without}
    with pytest.raises(UsageError, match=f"^{named} is not set"):
        from_environ(env)


def test_what_is_malformed_is_said():
    with pytest.raises(UsageError, match="malformed: invalid literal"):
        from_environ(SHARED | of_pod(0, 0) | {"KINETIC_POD_INDEX": ""})


def test_temporary_files_lie_where_the_machine_keeps_them():
    def scratch(**variables):
        return from_environ(SHARED | of_pod(0, 0) | variables).scratch

    job = f"{SHARED['KINETIC_JOB_ID']}-0"
    assert scratch() == f"/tmp/kinetic/{job}"
    assert scratch(TMPDIR="/disk") == f"/disk/kinetic/{job}"
    assert scratch(TMPDIR="") == f"/tmp/kinetic/{job}"
    assert scratch(TMPDIR="/disk", KINETIC_SCRATCH="/other") == f"/other/{job}"
