"""Which lifecycle rules of a bucket delete what jobs still need."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic._store.gcs import list_threats

AGE = {"action": {"type": "Delete"}, "condition": {"age": 30}}


def rule(kind: str = "Delete", **condition: Any) -> dict[str, Any]:
    return {"action": {"type": kind}, "condition": condition}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (rule(age=30), "objects after 30 days"),
        (rule(age=30, isLive=True), "objects after 30 days"),
        (rule(createdBefore="2026-01-01"), "objects made before 2026-01-01"),
        (rule(age=1, matchesPrefix=["team/"]), "objects below team/ after 1 days"),
        (rule(age=1, matchesPrefix=["team/store/jobs/"]), "objects below team/store/jobs/"),
        (rule(age=29, matchesPrefix=["team/store/refs/"]), "objects below team/store/refs/"),
        (rule(createdBefore="2026-01-01", matchesPrefix=["team/store/refs/"]), "objects below"),
        (rule(age=90, matchesPrefix=["team/store/jobs/", "team/store/refs/"]), ""),
        (rule(age=90, matchesPrefix=["team/store/jobs/", "team/store/b"]), "objects below"),
        (rule(age=90, matchesPrefix=["team/store/packs/"]), "objects below team/store/packs/"),
        (rule(age=1, matchesSuffix=[".tmp"]), "objects that end with .tmp after 1 days"),
        (rule(matchesStorageClass=["STANDARD"]), "objects"),
        (rule("SetStorageClass", age=30), ""),
        (rule("AbortIncompleteMultipartUpload", age=7), ""),
        (rule(age=30, isLive=False), ""),
        (rule(numNewerVersions=3), ""),
        (rule(daysSinceNoncurrentTime=7), ""),
        (rule(daysSinceCustomTime=7), ""),
        (rule(age=30, matchesPrefix=["other/", "team/stores"]), ""),
    ],
)
def test_a_rule(found: dict[str, Any], told: str) -> None:
    (said,) = list_threats([found], "team/store/") or ("",)
    assert said.startswith(told)
    assert bool(said) == bool(told)


def test_a_whole_bucket_and_no_rules() -> None:
    assert list_threats([AGE, AGE], "") == ("objects after 30 days",) * 2
    assert list_threats([rule(age=1, matchesPrefix=["tmp/"])], "") == (
        "objects below tmp/ after 1 days",
    )
    assert list_threats([], "") == ()
