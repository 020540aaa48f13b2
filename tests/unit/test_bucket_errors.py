"""Messages about a bucket's refusals name the bucket, the permission or cause, and the remedy. The
simulated answers have the real service's words."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("google.cloud.storage")

from doubles.gcs import serving

from kinetic._store.gcs import GcsStore
from kinetic.errors import StoreError

WHO = "someone@example.iam.gserviceaccount.com"


@pytest.fixture
def double(monkeypatch):
    with serving("bucket") as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.uri)
        yield running


def message_of(act) -> str:
    with pytest.raises(StoreError) as caught:
        act(GcsStore("gs://bucket/store", patience_s=0.1))
    text = str(caught.value)
    assert "gs://bucket" in text
    assert "\n" not in text
    assert "Traceback" not in text
    return text


CASES = {
    "expired credentials": (
        401,
        "Invalid Credentials",
        ("does not accept your credentials", "gcloud auth application-default login"),
    ),
    "nobody": (
        401,
        "Anonymous caller does not have storage.objects.get access to the object.",
        ("does not accept your credentials", "GOOGLE_APPLICATION_CREDENTIALS"),
    ),
    "no right to replace": (
        403,
        f"{WHO} does not have storage.objects.delete access to the Google Cloud Storage object.",
        ("permission storage.objects.delete on gs://bucket", "roles/storage.objectUser", WHO),
    ),
    "a bucket of another project": (
        403,
        f"{WHO} does not have storage.objects.get access to the Google Cloud Storage object.",
        ("permission storage.objects.get on gs://bucket", "roles/storage.objectViewer", WHO),
    ),
    "retention": (
        403,
        "Object 'bucket/a' is subject to bucket's retention policy and cannot be deleted, "
        "overwritten or archived until 2031-09-20T12:18:15.93713-07:00",
        ("2031-09-20", "remove the policy or the hold from gs://bucket"),
    ),
    "a hold": (
        403,
        "Object 'bucket/a' is under active Temporary hold and cannot be deleted, overwritten or "
        "archived until hold is removed.",
        ("Temporary hold", "remove the policy or the hold from gs://bucket"),
    ),
    "requester pays": (
        400,
        "Bucket is a requester pays bucket but no user project provided.",
        ("buckets update gs://bucket --no-requester-pays",),
    ),
    "a perimeter": (
        403,
        "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: x",
        ("perimeter", "let this machine in"),
    ),
    "no billing": (
        403,
        "The project to be billed is associated with a closed billing account.",
        ("closed billing account", "Turn billing on"),
    ),
    "too many requests": (
        429,
        "The object exceeded the rate limit for object mutation operations.",
        ("rate limit", "tried for a while", "try again later"),
    ),
    "the service is down": (503, "We encountered an internal error.", ("try again later",)),
}
ACTS = {
    "read": lambda store: store.get("a"),
    "write": lambda store: store.put("a", b""),
    "delete": lambda store: store.delete("a"),
    "renew": lambda store: store.renew("a"),
    "list": lambda store: list(store.list("a")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("act", ACTS)
def test_a_refusal_says_what_to_do(double, case, act):
    status, message, expected = CASES[case]
    double.fail(times=10**6, status=status, message=message)
    text = message_of(ACTS[act])
    for part in expected:
        assert part in text


def test_renewing_needs_a_permission_of_its_own(double):
    GcsStore("gs://bucket/store").put("a", b"")
    double.buckets.grow_old("bucket", 30 * 86400.0)
    double.denied.add("storage.objects.update")
    assert "permission storage.objects.update on gs://bucket" in message_of(ACTS["renew"])


def test_a_refused_connection_names_the_proxy_variable_and_no_pool(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    text = message_of(ACTS["read"])
    assert "Connection refused" in text
    assert "HTTPSConnectionPool" not in text
    assert "HTTPS_PROXY" in text


def test_a_proxy_that_is_not_there(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://storage.example")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    text = message_of(ACTS["read"])
    assert "proxy" in text
    assert "HTTPS_PROXY" in text


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "words", [["jobs", "list"], ["jobs", "prune", "--yes"], ["jobs", "logs", "--last"]]
)
def test_the_command_line_says_it_without_a_traceback(double, monkeypatch, words):
    monkeypatch.setenv("KINETIC_STORE", "gs://bucket/store")
    double.denied.add("storage.objects.list")
    line = [sys.executable, "-m", "kinetic", *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode != 0
    assert "storage.objects.list on gs://bucket" in done.stderr
    assert "Traceback" not in done.stderr
