"""The JobSet of a job that one process controls through Pathways: Pathways' servers with the
options that they need, and kinetic's pods. KINETIC_REGENERATE_GOLDEN=1 rewrites the golden
files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
from manifest_cases import FIELDS, PLACE, REGENERATE, SETTINGS, misfits, planned

from kinetic._backends.kubernetes import observed, pathways, states
from kinetic._backends.kubernetes.diagnosis import JobCause, Observed, diagnose
from kinetic._backends.kubernetes.manifests import render
from kinetic._core import layout
from kinetic._core.accelerators.families import PATHWAYS_MACHINES
from kinetic._core.options import MAX_FAILURES
from kinetic._core.plan import Limits
from kinetic._core.state import JobStatus
from kinetic._host import identity
from kinetic.errors import PreflightError

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes" / "pathways"
SINGLE = {"place": replace(PLACE, backend="pathways"), "controller": "single"}
NOWHERE = replace(
    SETTINGS, image="none", store_uri="/store", python="/opt/bin/python", bootstrap=""
)
CASES = {
    "tpu-v6e-16": (planned("tpu-v6e-16", **SINGLE), SETTINGS),
    "2-slices": (
        planned(
            "tpu-v6e-16:spot",
            slices=2,
            retries=3,
            **SINGLE | {"place": replace(PLACE, backend="pathways", queue="team-a")},
            priority="high",
            reservation="next-week",
            secrets=("HF_TOKEN",),
        ),
        replace(SETTINGS, head_pool="cpu-np", pathways_version="20260701-jax_0.10.2"),
    ),
    "tpu-v5litepod-8": (
        planned(
            "tpu-v5litepod-8",
            debug=True,
            limits=Limits(grace_s=45.5),
            **SINGLE,
            priority="high",
        ),
        SETTINGS,
    ),
    "elastic": (planned("tpu-v6e-16", slices=(1, 3), **SINGLE), SETTINGS),
    "flags": (
        planned(
            "tpu-v6e-16",
            slices=2,
            **SINGLE,
            cpu="4",
            memory="64Gi",
            pathways_flags={
                "proxy-server": ["--xla_tpu_enable_latency_hiding_scheduler=true"],
                "server": ["--server_port=29999", "--name=$(HOME)"],
                "worker": ["--v=1"],
            },
        ),
        SETTINGS,
    ),
    "simulated": (
        planned("tpu-v6e-16:spot", **SINGLE),
        replace(NOWHERE, simulated=True, service_account=""),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_are_the_golden_ones(name):
    written = json.dumps(render(*CASES[name]), indent=1) + "\n"
    path = GOLDEN / f"{name}.json"
    if REGENERATE:
        path.write_text(written)
    assert written == path.read_text(), f"KINETIC_REGENERATE_GOLDEN=1 writes {path.name} anew"


def test_flags_of_the_user_come_after_those_of_pathways():
    workload = render(*CASES["flags"])[0]
    pods = [r["template"]["spec"]["template"]["spec"] for r in workload["spec"]["replicatedJobs"]]
    args = {
        each["name"]: each["args"]
        for pod in pods
        for each in (*pod.get("initContainers", ()), *pod["containers"])
        if "args" in each
    }
    assert args["pathways-proxy"][-1] == "--xla_tpu_enable_latency_hiding_scheduler=true"
    assert args["pathways-rm"][-2:] == ["--server_port=29999", "--name=$$(HOME)"]
    assert args["pathways-rm"][0].startswith("--server_port=")
    assert args["pathways-worker"][-1] == "--v=1"


def test_every_golden_file_has_its_case():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", ["1.30", "1.33", kubernetes_validate.latest_version()])
def test_documents_are_valid(name, version):
    workload, secret = render(*CASES[name])
    assert misfits(workload["spec"], FIELDS["spec"]) == []
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job"}
        | replicated["template"]
        | {"metadata": replicated["template"]["metadata"] | {"name": replicated["name"]}}
        for replicated in workload["spec"]["replicatedJobs"]
    ]
    for document in (*jobs, secret):
        kubernetes_validate.validate(document, version, strict=True)
    last = f"{workload['metadata']['name']}-pathways-worker-99-255-abcde"
    assert len(last) <= 63


# -- each field of the JobSet ----------------------------------------------------------------------

SCRATCH = "gs://lab-kinetic/store/jobs/job-00c0ffee/pathways"
SERVER = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:20260701-jax_0.10.2"
PROXY = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server:20260701-jax_0.10.2"
LABEL, ANNOTATION = "metadata.labels['{}']", "metadata.annotations['{}']"
COORDINATOR = LABEL.format("jobset.sigs.k8s.io/coordinator")
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
CHIPS = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "4x4",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/reservation-name": "next-week",
}
TABLE = {
    "coordinator.replicatedJob": "pathways-head",
    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
    "startupPolicy.startupPolicyOrder": "InOrder",
    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["pathways-head"]},
    "failurePolicy.restartStrategy": "Recreate",
    "failurePolicy.maxRestarts": 3,
    "head.replicas": 1,
    "head.annotation": "kubernetes.io/hostname",
    "head.backoffLimit": 0,
    "head.completions": 1,
    "head.parallelism": 1,
    "head.completionMode": "Indexed",
    "head.pod.restartPolicy": "Never",
    "head.pod.nodeSelector": {"cloud.google.com/gke-nodepool": "cpu-np"},
    "head.pod.tolerations": None,
    "head.proxy.image": PROXY,
    "head.proxy.args": [
        "--server_port=29000",
        "--resource_manager_address=$(PATHWAYS_HEAD):29001",
        f"--gcs_scratch_location={SCRATCH}",
    ],
    "head.proxy.env": {
        "PATHWAYS_HEAD": COORDINATOR,
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    },
    "head.proxy.ports": [29000],
    "head.proxy.limits": {"cpu": "16", "memory": "100G"},
    "head.proxy.restartPolicy": "Always",
    "head.rm.image": SERVER,
    "head.rm.args": [
        "--server_port=29001",
        f"--gcs_scratch_location={SCRATCH}",
        "--node_type=resource_manager",
        "--instance_count=2",
        "--instance_type=tpuv6e:4x4",
    ],
    "head.rm.env": {
        "REPLICATED_JOB_NAME": ANNOTATION.format("jobset.sigs.k8s.io/replicatedjob-name"),
        "JOBSET_NAME": ANNOTATION.format("jobset.sigs.k8s.io/jobset-name"),
        "HOST_ADDRESS": COORDINATOR,
        "TPU_SKIP_MDS_QUERY": "true",
    },
    "head.rm.ports": [29001, 29002],
    "head.rm.limits": {"cpu": "8", "memory": "32G"},
    "head.rm.restartPolicy": "Always",
    "head.kinetic.jax": {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://localhost:29000",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    },
    "head.kinetic.limits": None,
    "worker.replicas": 2,
    "worker.annotation": "cloud.google.com/gke-nodepool",
    "worker.backoffLimit": 4 * 4 * 4,  # hosts x starts of each host x attempts
    "worker.completions": 4,
    "worker.parallelism": 4,
    "worker.completionMode": "Indexed",
    "worker.pod.restartPolicy": "OnFailure",
    "worker.pod.nodeSelector": CHIPS,
    "worker.pod.volumes": [
        {"hostPath": {"path": "/tmp", "type": "DirectoryOrCreate"}, "name": "shared-tmp"}
    ],
    "worker.worker.image": SERVER,
    "worker.worker.args": [
        "--resource_manager_address=$(PATHWAYS_HEAD):29001",
        "--server_port=29005",
        f"--gcs_scratch_location={SCRATCH}",
    ],
    "worker.worker.env": {
        "TPU_MIN_LOG_LEVEL": "0",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "XCLOUD_ENVIRONMENT": "GCP",
        "MEGASCALE_GRPC_ENABLE_XOR_TRACER": "false",
        "MEGASCALE_NUM_SLICES": LABEL.format("jobset.sigs.k8s.io/replicatedjob-replicas"),
        "MEGASCALE_SLICE_ID": LABEL.format("jobset.sigs.k8s.io/job-index"),
        "JOBSET_NAME": ANNOTATION.format("jobset.sigs.k8s.io/jobset-name"),
        "REPLICATED_JOB_NAME": ANNOTATION.format("jobset.sigs.k8s.io/replicatedjob-name"),
        "PATHWAYS_HEAD": COORDINATOR,
        "MEGASCALE_COORDINATOR_ADDRESS": COORDINATOR,
    },
    "worker.worker.ports": [29005, 29006, 8471, 8080],
    "worker.worker.limits": {"google.com/tpu": "4"},
}
"""Expected fields of the JobSet, taken from the JobSets of xpk and of Pathways' own builder."""


def found_in(spec):
    """Return the fields of a JobSet under the same names as in `TABLE`."""
    parts = dict(spec)
    for replicated in spec["replicatedJobs"]:
        name, template = replicated["name"].removeprefix("pathways-"), replicated["template"]
        pod = template["spec"]["template"]
        parts[name] = template["spec"] | {
            "replicas": replicated["replicas"],
            "annotation": pod["metadata"]["annotations"].get(EXCLUSIVE),
            "pod": pod["spec"],
        }
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            env = {e["name"]: e.get("value") or path_of(e) for e in container.get("env", ())}
            parts[name][container["name"].removeprefix("pathways-")] = container | {
                "env": env,
                "ports": [port["containerPort"] for port in container.get("ports", ())],
                "limits": container.get("resources", {}).get("limits"),
                "jax": {n: v for n, v in env.items() if n.startswith(("JAX_", "IFRT_"))},
            }
    return parts


def path_of(variable):
    source = variable["valueFrom"]
    return source["fieldRef"]["fieldPath"] if "fieldRef" in source else "secret"


def at(parts, path):
    for name in path.split("."):
        parts = parts.get(name) if parts is not None else None
    return parts


@pytest.mark.parametrize("path", TABLE)
def test_every_known_field_is_there(path):
    workload, _ = render(*CASES["2-slices"])
    assert at(found_in(workload["spec"]), path) == TABLE[path]


@pytest.mark.parametrize(("slices", "to_lose"), [((1, 3), 2), ((2, 3), 1), ((3, 3), 1), (3, 0)])
def test_the_proxy_is_told_how_many_slices_may_be_away(slices, to_lose):
    workload, _ = render(planned("tpu-v6e-16", slices=slices, **SINGLE), SETTINGS)
    args = found_in(workload["spec"])["head"]["proxy"]["args"]
    flags = [arg for arg in args if "elastic" in arg]
    assert flags == ([f"--num_elastic_slices={to_lose}"] if to_lose else [])


def test_machines_are_replaced_as_often_as_the_job_survives_losses():
    workload, _ = render(*CASES["elastic"])
    machines, starts, losses = 4, 4, MAX_FAILURES
    assert at(found_in(workload["spec"]), "worker.backoffLimit") == machines * starts * (1 + losses)


def test_the_builder_knows_the_machines_that_options_allow():
    from pathwaysutils.experimental.gke.jobset import MACHINE_TYPE_TO_TPU_VERSION_MAP as known

    assert {name for name in known if name.endswith("t")} == PATHWAYS_MACHINES


@pytest.mark.parametrize("name", CASES)
def test_pods_are_found_and_the_one_of_the_controller_is_the_only_host(name):
    plan, settings = CASES[name]
    workload, _ = render(plan, settings)
    shape = observed.shape_of(workload)
    machines = plan.options.most_slices * plan.topology.hosts
    assert [(s.noun, s.pods) for s in shape.sets] == [("host", 1), ("worker", machines)]
    for replicated in workload["spec"]["replicatedJobs"]:
        template = replicated["template"]
        for labelled in (template, template["spec"]["template"]):
            assert labelled["metadata"]["labels"]["kinetic.dev/job-id"] == plan.job_id
    head = found_in(workload["spec"])["head"]["kinetic"]
    assert head["name"] == observed.main_container({"spec": {"containers": [head]}})["name"]
    fields = {"status.podIP": "10.0.0.1"}
    env = {
        n: fields.get(v, "0" if v.startswith("metadata.") else v) for n, v in head["env"].items()
    }
    who = identity.from_environ(env)
    assert (who.host, who.hosts, who.is_pod, who.simulated) == (0, 1, True, settings.simulated)
    assert who.target == "10.0.0.1:7777"


@pytest.mark.starts_processes
def test_nothing_of_pathways_runs_where_chips_are_virtual():
    workload, _ = render(*CASES["simulated"])
    parts = found_in(workload["spec"])
    for container in (parts["head"]["rm"], parts["head"]["proxy"], parts["worker"]["worker"]):
        assert (container["image"], container["limits"]) == ("none", None)
        idle = subprocess.Popen([sys.executable, *container["command"][1:]])
        idle.terminate()
        assert idle.wait(60) in (0, -15)  # -15: SIGTERM came before its handler.
    assert EXCLUSIVE not in json.dumps(workload)
    assert "cloud.google.com" not in json.dumps(workload)


# -- errors and observed pods ----------------------------------------------------------------------


def test_without_the_builder_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils.experimental.gke.jobset", None)
    with pytest.raises(PreflightError, match=r"pip install 'pathwaysutils\[gke\]'"):
        render(*CASES["tpu-v6e-16"])


def test_pathways_needs_a_bucket():
    with pytest.raises(PreflightError, match=r"a store in a bucket.* but the store is /store"):
        pathways.check(NOWHERE)
    for settings in (SETTINGS, replace(NOWHERE, simulated=True)):
        pathways.check(settings)


def test_the_scratch_folder_of_pathways_is_removed_with_the_job():
    assert layout.JobKeys("job-1").pathways.startswith(f"{layout.JobKeys('job-1').prefix}/")


def pod(workload, name, index, **status):
    """Return one pod of the JobSet, in the given status; the JobSet has one slice."""
    (replicated,) = [r for r in workload["spec"]["replicatedJobs"] if r["name"] == name]
    spec = replicated["template"]["spec"]["template"]["spec"]
    labels = {observed.REPLICATED_JOB_LABEL: name, observed.JOB_INDEX_LABEL: "0"}
    labels[observed.INDEX_LABEL] = str(index)
    metadata = {"name": f"{name}-0-{index}", "uid": f"{name}-{index}", "labels": labels}
    container = {"name": spec["containers"][0]["name"]} | status
    conditions = [{"type": "Ready", "status": "True"}] if "running" in str(status) else []
    return {
        "metadata": metadata,
        "spec": spec | {"nodeName": "n"},
        "status": {"containerStatuses": [container], "conditions": conditions},
    }


def test_a_job_runs_when_all_machines_do():
    workload, _ = render(*CASES["tpu-v6e-16"])
    running, crashed = {"state": {"running": {}}}, {"terminated": {"exitCode": 1}}
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    head = pod(workload, "pathways-head", 0, **running)
    workers = [pod(workload, "pathways-worker", n, **running) for n in range(4)]
    assert states.status_of(workload, [head, *workers]).phase is JobStatus.RUNNING
    some = states.status_of(workload, [head, *workers[:2]])
    assert (some.phase, some.reason) == (JobStatus.PENDING, "3 of 5 pods run")
    workers[3] = pod(workload, "pathways-worker", 3, state=waits, lastState=crashed)
    stuck = states.status_of(workload, [head, *workers])
    assert stuck.phase is JobStatus.PENDING
    assert stuck.reason == "worker 3 does not start: CrashLoopBackOff"


def unscheduled(workload, name, index):
    actual = pod(workload, name, index)
    scheduled = {"type": "PodScheduled", "status": "False", "message": "0/9 nodes: Insufficient"}
    actual["status"] = {"phase": "Pending", "conditions": [scheduled]}
    del actual["spec"]["nodeName"]
    return actual


def diagnosed(workload, pods, nodes=None):
    finding = diagnose(Observed(workload, pods=pods, nodes=nodes))
    return None if finding is None else (finding.kind, finding.sentence)


def test_what_is_said_of_pods_names_them_as_users_know_them():
    workload, _ = render(*CASES["tpu-v6e-16"])
    running = {"state": {"running": {}}}
    head = pod(workload, "pathways-head", 0, **running)
    workers = [pod(workload, "pathways-worker", n, **running) for n in range(4)]
    assert diagnosed(workload, [head, *workers]) is None

    waiting = [unscheduled(workload, "pathways-worker", n) for n in (2, 3)]
    kind, message = diagnosed(workload, [head, *workers[:2], *waiting])
    assert kind is JobCause.PARTIAL_SLICE
    assert message.startswith(
        "2 of 4 workers have nodes; workers 2, 3 wait for a node with tpu-v6e-"
    )

    none = [unscheduled(workload, "pathways-worker", n) for n in range(4)]
    kind, message = diagnosed(workload, [head, *none], nodes=[])
    assert kind is JobCause.NO_NODE_POOL
    assert message.startswith("No node of the cluster has tpu-v6e-slice 4x4.")

    kind, message = diagnosed(workload, [unscheduled(workload, "pathways-head", 0)])
    assert kind is JobCause.NO_ROOM
    assert "The pod of the controller requests cpu 8 + 16, memory 32G + 100G." in message

    killed = {"exitCode": 137, "reason": "OOMKilled"}
    head = pod(workload, "pathways-head", 0, state={"terminated": killed})
    kind, message = diagnosed(workload, [head, *workers])
    assert (kind, message[:15]) == (JobCause.OUT_OF_MEMORY, "Host 0 was lost")

    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    workers[1]["status"]["conditions"].append(evicted)
    kind, message = diagnosed(workload, workers)
    assert (kind, message[:17]) == (JobCause.EVICTED, "Worker 1 was lost")


def test_hosts_whose_pods_are_gone_are_known_by_their_names():
    def failed(accelerator, pod, **options):
        workload, _ = render(planned(accelerator, **options), SETTINGS)
        message = f"Container kinetic for pod team-a/{pod}-x2x4z failed with exit code 42 matching"
        event = {"type": "Warning", "reason": "PodFailurePolicy", "message": message}
        condition = {"type": "Failed", "status": "True", "message": "jobset failed"}
        ended = workload | {"status": {"conditions": [condition]}}
        return diagnose(Observed(ended, events=lambda _: [event])).hosts

    own = "kinetic-job-00c0ffee"
    assert failed("tpu-v6e-16", f"{own}-host-1-2", slices=2) == (6,)
    assert failed("cpu:2", f"{own}-host-3-0", slices=4) == (3,)
    assert failed("cpu", f"{own}-0") == (0,)
    assert failed("tpu-v6e-16", f"{own}-pathways-head-0-0", **SINGLE) == (0,)
