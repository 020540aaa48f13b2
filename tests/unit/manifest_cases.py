"""Plans and settings for tests of manifests, and how their documents are held against a definition.

In: names of accelerators, options. Out: plans; what does not fit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan, Versions

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
REGENERATE = os.environ.get("KINETIC_REGENERATE_GOLDEN") == "1"
FIELDS = json.loads((GOLDEN / "jobset-fields.json").read_text())
"""Fields of a JobSet v1alpha2 and their types, from its definition; lists are {"[]": items}."""
SETTINGS = PodSettings(
    image="docker.io/library/python:3.11-slim",
    store_uri="gs://lab-kinetic/store",
    bootstrap="print('becomes a host')",
    variables={"KINETIC_RUNTIME": "1" * 64},
)
PLACE = Place("gke", cluster="tpus", project="lab", namespace="team-a")


def planned(accelerator="cpu", *, place=PLACE, **more):
    kept = ("slices", "retries", "debug", "env", "cpu", "memory", "shm", "privileged")
    kept += ("pathways_flags",)
    options = {name: more.pop(name) for name in kept if name in more}
    return Plan(
        job_id="job-00c0ffee",
        name="Trainer.fit",
        place=place,
        options=Options(resolve(accelerator), **options),
        payload=Blob("0" * 64, 1000),
        versions=Versions("3.11.9", "3.1.0", "1.0.0"),
        created_at=1_700_000_000.0,
        **more,
    )


def misfits(value, kind, at=""):
    """Where a value does not have the fields and types of a kind."""
    if isinstance(kind, list):
        return [] if value in kind else [at]
    if isinstance(kind, str):
        kinds = {"integer": int, "string": str, "boolean": bool, "object": dict, "Job": dict}
        return [] if type(value) is kinds[kind] else [at]
    if "[]" in kind:
        return [m for n, each in enumerate(value) for m in misfits(each, kind["[]"], f"{at}[{n}]")]
    unknown = [f"{at}.{name}" for name in value if name not in kind]
    known = [(n, v) for n, v in value.items() if n in kind]
    return unknown + [m for n, v in known for m in misfits(v, kind[n], f"{at}.{n}")]
