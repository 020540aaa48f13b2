"""Names, commands and options of keras-kinetic: those that exist still work, the others say what to
use instead."""

from __future__ import annotations

import importlib

import pytest

import kinetic
from kinetic.cli.root import call
from kinetic.credentials import ensure_credentials, invalidate_credential_cache

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "kinetic",
            "run RemoteCallable Data JobHandle attach list_jobs BatchHandle BatchError "
            "attach_batch __version__",
        ),
        ("kinetic.job_status", "JobStatus"),
        ("kinetic.collections", "map BatchHandle BatchError attach_batch"),
        ("kinetic.jobs", "JobHandle JobStatus attach list_jobs"),
        ("kinetic.debug", "cleanup_port_forward"),
        ("kinetic.credentials", "ensure_credentials invalidate_credential_cache"),
    ],
)
def test_every_name_is_there_also_without_importing_its_module(module, names):
    for name in names.split():
        assert hasattr(importlib.import_module(module), name), name
    room = module.partition(".")[2]
    if room:
        assert getattr(kinetic, room) is importlib.import_module(module)


def test_one_class_under_all_its_names():
    assert kinetic.collections.BatchError is kinetic.BatchError
    assert kinetic.collections.attach_batch is kinetic.attach_batch


@pytest.mark.parametrize(("name", "instead"), [("submit", "run_async"), ("map", "run_async_map")])
def test_a_name_that_is_gone_says_what_to_write_instead(name, instead):
    assert not hasattr(kinetic, name)
    with pytest.raises(
        AttributeError, match=rf"'kinetic' has no attribute '{name}': .*\b{instead}\b"
    ):
        getattr(kinetic, name)


def test_a_name_that_never_was_says_no_more_than_that():
    with pytest.raises(AttributeError, match=r"^module 'kinetic' has no attribute 'sumbit'$"):
        kinetic.sumbit  # type: ignore[attr-defined] # noqa: B018


def test_credentials_are_nobodys_business_here():
    ensure_credentials("project", "zone", "cluster")
    invalidate_credential_cache()


@pytest.mark.parametrize(
    "words",
    [
        "init -y --profile-name p",
        "up --accelerator tpu-v5e-1 --min-nodes 1 -y",
        "up --help",
        "down -y",
        "status --project p",
        "pool add --accelerator gpu-l4 --spot",
        "pool list",
    ],
)
def test_a_command_about_clusters_is_refused_with_the_reason(words, capsys: Capture):
    assert call(words.split()) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "does not create clusters" in printed.err


@pytest.mark.parametrize(
    "words", ["jobs list --output-dir out --namespace n", "accelerators --project p v6e-8"]
)
def test_an_option_that_changes_nothing_here_is_taken(words, home):
    assert call(words.split()) == 0
