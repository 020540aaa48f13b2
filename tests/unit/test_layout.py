"""The keys of the store, which must match their page in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kinetic._core import layout
from kinetic._core.layout import AttemptKeys, GroupKeys, HostKeys, JobKeys, Key

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "store-layout.md"
NAMES = {"number": "n", "index": "i"}
"""Attributes of keys, and their names on the page where these differ."""
OTHER_KEYS = {
    "blobs/sha256/<2 hex>/<62 hex>",
    "bucket-folders/<bucket>/<path>/",
    "jobs/<job_id>/local/",
    "probes/<hex>",
}
"""Keys on the page that `patterns` and the tests cannot derive from `layout`."""


def patterns() -> set[str]:
    """Return all keys of `layout` in the notation of the page."""
    kinds = (JobKeys, AttemptKeys, HostKeys, GroupKeys)
    keys = {key.pattern for kind in kinds for key in vars(kind).values() if isinstance(key, Key)}
    keys |= {make("{digest}") for make in (layout.pack, layout.tree)}
    keys |= {f"{layout.data('{digest}')}/", layout.session("{name}")}
    keys |= {layout.executable("{runtime}", "{digest}")}
    return {re.sub(r"\{(\w+)\}", lambda m: f"<{NAMES.get(m[1], m[1])}>", key) for key in keys}


def page() -> set[str]:
    """Return the keys on the page; an indented key is relative to the last unindented key."""
    listed, folder = set(), ""
    (block,) = re.findall(r"(?s)```text\n(.*?)```", PAGE.read_text())
    for line in block.splitlines():
        key = re.split(r"  +", line.strip())[0]
        if not line.startswith(" "):
            folder = key
        listed.add(f"{folder}{key}" if line.startswith(" ") else key)
    return listed


def is_named(pattern: str, listed: set[str]) -> bool:
    """True if the page lists this key or, for a prefix, any key below it."""
    return pattern in listed or (
        pattern.endswith("/") and any(key.startswith(pattern) for key in listed)
    )


def test_the_page_names_every_key():
    listed = page()
    assert {key for key in patterns() if not is_named(key, listed)} == {
        # These lie in the local backend's own folder.
        "jobs/<job_id>/local/bell",
        "jobs/<job_id>/local/fetching",
    }


def test_the_page_names_nothing_else():
    named = patterns()
    of_logs = {f"{key}{end}" for key in named for end in (".idx", ".d/<offset>")}
    of_lists = {f"listed/<job_id>/{kind}-<text>" for kind in ("ref", "end")}
    of_batches = {"groups/<group_id>/refused/<i>.json"}
    assert page() - named - of_logs - of_lists - of_batches == OTHER_KEYS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (JobKeys("job-1").prefix, "jobs/job-1"),
        (JobKeys("job-1").plan, "jobs/job-1/plan.json"),
        (AttemptKeys("job-1", 2).order_answer("x"), "jobs/job-1/attempts/2/order-answers/x.json"),
        (HostKeys("job-1", 2, 3).log, "jobs/job-1/attempts/2/hosts/3/log"),
        (GroupKeys("grp-1").refusal(3), "groups/grp-1/refused/3.json"),
        (layout.blob("ab" * 32), f"blobs/sha256/ab/{'ab' * 31}"),
    ],
)
def test_a_key_is_made_of_ids_and_indices(key, value):
    assert key == value


def test_only_records_of_jobs_belong_to_one():
    assert layout.job_of(HostKeys("job-1", 2, 3).log) == "job-1"
    assert [layout.job_of(key) for key in ("jobs/job-1", "refs/job-1.json", "")] == [""] * 3
