"""Plans and settings for tests of manifests, and a check of manifests against the API's definition.

In: names of accelerators, options. Out: plans; the paths of fields that violate the definition.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
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
    kept += ("pathways_flags", "controller", "priority", "reservation")
    kept += ("local_storage", "network_devices")
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
    """List the paths in a value whose field or type is not in the definition `kind`."""
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


def as_job(workload, of="host"):
    """Return a workload that is a Job; of a JobSet, the Job from its template named `of`."""
    if workload["kind"] == "Job":
        return workload
    (replicated,) = (r for r in workload["spec"]["replicatedJobs"] if r["name"] == of)
    metadata = replicated["template"]["metadata"] | {"name": workload["metadata"]["name"]}
    spec = replicated["template"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def pod_of(workload, of="host"):
    return as_job(workload, of)["spec"]["template"]


def env_of(workload, slice_=0, pod=0, of="host"):
    """Return a pod's environment variables with the values that a cluster would fill in."""
    values = {
        "status.podIP": "10.0.0.1",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(pod),
        "metadata.labels['jobset.sigs.k8s.io/job-index']": str(slice_),
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "2",
    }
    env = {}
    (container,) = pod_of(workload, of)["spec"]["containers"]
    for each in container["env"]:
        if "value" in each:
            env[each["name"]] = each["value"].replace("$$", "$")
        elif "fieldRef" in each["valueFrom"]:
            env[each["name"]] = values[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            reference = each["valueFrom"]["secretKeyRef"]
            env[each["name"]] = f"{reference['name']}/{reference['key']}"
    if "KINETIC_TLS_KEY_DIR" in env:
        env["KINETIC_TLS_KEY_DIR"] = leader_folder(workload, env)
    return env


def leader_folder(workload, env):
    """Create the folder with the leader's key as a cluster mounts it in a pod; return its path."""
    spec = pod_of(workload, "host")["spec"]
    (volume,) = [v for v in spec["volumes"] if "secret" in v]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["mountPath"] == env["KINETIC_TLS_KEY_DIR"]
    made = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
    for item in volume["secret"]["items"]:
        (made / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (made / item["path"]).write_text(f"{volume['secret']['secretName']}/{item['key']}")
    return str(made / re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], mount["subPathExpr"]))
