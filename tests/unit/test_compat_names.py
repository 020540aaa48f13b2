"""Names, commands and options of keras-kinetic: those that exist still work, the others say what to
use instead."""

from __future__ import annotations

import importlib

import click
import pytest

import kinetic
from kinetic.cli.root import call, root
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
    ("words", "options"),
    [
        ("init", "--project --zone --cluster --profile-name --namespace -y"),
        (
            "up",
            "--project --zone --cluster --force-destroy --no-force-destroy --accelerator "
            "--min-nodes --profile-name --namespace -y --preview",
        ),
        ("down", "--project --zone --cluster -y"),
        ("status", "--project --zone --cluster"),
        ("pool add", "--accelerator --min-nodes --spot --reservation --preview -y --zone"),
        ("pool remove", "--preview -y --project"),
        ("pool list", "--project --zone --cluster"),
    ],
)
def test_a_command_about_clusters_takes_its_options(words, options):
    """The command lines of keras-kinetic's documentation are understood."""
    command = root
    context = click.Context(root)
    for word in words.split():
        command = command.get_command(context, word)
    names = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert set(options.split()) <= names


@pytest.mark.parametrize(
    "words", ["jobs list --output-dir out --namespace n", "accelerators --project p v6e-8"]
)
def test_an_option_that_changes_nothing_here_is_taken(words, home):
    assert call(words.split()) == 0
