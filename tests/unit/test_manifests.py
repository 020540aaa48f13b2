"""Kubernetes manifests of jobs: equal to the golden files in tests/golden/kubernetes (rewritten
with KINETIC_REGENERATE_GOLDEN=1), accepted by the API server's schema, and free of secrets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
from doubles.memory_store import MemoryStore
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from manifest_cases import (
    FIELDS,
    GOLDEN,
    PLACE,
    REGENERATE,
    SETTINGS,
    as_job,
    env_of,
    misfits,
    planned,
    pod_of,
)

from kinetic._backends.kubernetes import manifests, observed
from kinetic._backends.kubernetes.manifests import render
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._backends.kubernetes.volumes import LOCAL_FOLDER
from kinetic._core.place import MULTI_TIER, Place
from kinetic._core.plan import Dataset, Limits, Plan
from kinetic._datasets import call_data
from kinetic._datasets.data import Data
from kinetic._host import identity
from kinetic._host.agent import datasets
from kinetic._host.agent.datasets import Datasets
from kinetic.errors import SetupFailed


def fused(source, *, is_dir=True, mount="", writable=False):
    return Dataset(source, is_dir, mount=mount, fuse=True, writable=writable)


ELASTIC = replace(PLACE, backend="pathways")
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
CASES = {
    "cpu": (planned("cpu"), SETTINGS),
    "cpu-2-4-slices": (planned("cpu:2", slices=4), SETTINGS),
    "gpu-l4": (planned("gpu-l4"), SETTINGS),
    "gpu-h100x8": (planned("gpu-h100x8"), SETTINGS),
    "tpu-v6e-1": (planned("tpu-v6e-1"), SETTINGS),
    "tpu-v5litepod-8": (planned("tpu-v5litepod-8"), SETTINGS),
    "tpu-v6e-16": (planned("tpu-v6e-16"), SETTINGS),
    "tpu-v6e-16-2-slices": (planned("tpu-v6e-16", slices=2), SETTINGS),
    "tpu-v6e-16-elastic": (
        planned("tpu-v6e-16", slices=(1, 2), place=replace(ELASTIC, queue="team-a")),
        SETTINGS,
    ),
    "simulated-elastic": (
        planned("tpu-v6e-8", slices=(2, 3), place=ELASTIC),
        PodSettings(image="none", store_uri="/store", simulated=True, service_account=""),
    ),
    "tpu-v5p-32": (planned("tpu-v5p-32"), SETTINGS),
    "tpu7x-8": (planned("tpu7x-8"), SETTINGS),
    "spot": (planned("tpu-v6e-16:spot", retries=3), SETTINGS),
    "one-host-retries": (planned("gpu-l4", retries=2), SETTINGS),
    "queue-and-priority": (
        planned("tpu-v6e-16", place=replace(PLACE, queue="team-a"), priority="high"),
        SETTINGS,
    ),
    "priority-and-reservation": (
        planned("tpu-v6e-1", priority="high", reservation="next-week"),
        SETTINGS,
    ),
    "shared-reservation": (
        planned("gpu-l4", reservation="projects/other/reservations/next-week"),
        SETTINGS,
    ),
    "debug": (planned("tpu-v6e-8", debug=True, limits=Limits(grace_s=45.5)), SETTINGS),
    "with-secrets": (planned("cpu", secrets=("HF_TOKEN", "WANDB_API_KEY")), SETTINGS),
    "buckets": (
        planned(
            "cpu",
            data=(
                fused("gs://images/train/2024/", mount="/data"),
                Dataset("/home/me/labels", True),
                fused("gs://images/"),
                fused("gs://images/train/labels.csv", is_dir=False),
                fused("gs://runs/mine/", mount="/output", writable=True),
            ),
        ),
        SETTINGS,
    ),
    "local-storage": (
        planned("tpu-v6e-16", local_storage="60Gi"),
        SETTINGS,
    ),
    "multi-tier": (
        planned(
            "tpu-v6e-16",
            slices=2,
            local_storage=MULTI_TIER,
            env={"KINETIC_LOCAL_DIR": "/ramdisk"},
        ),
        SETTINGS,
    ),
    "network-devices": (
        planned("tpu-v6e-16", slices=2, network_devices="2"),
        SETTINGS,
    ),
    "training": (
        planned("tpu-v6e-16", cpu="8", memory="32Gi", privileged=True),
        SETTINGS,
    ),
    "simulated": (
        planned("tpu-v6e-16:spot", reservation="next-week"),
        PodSettings(
            image="none",
            store_uri="/store",
            python="/opt/kinetic/bin/python",
            simulated=True,
            service_account="",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_are_the_golden_ones(name):
    written = json.dumps(render(*CASES[name]), indent=1) + "\n"
    path = GOLDEN / f"{name}.json"
    if REGENERATE:
        path.write_text(written)
    assert written == path.read_text(), f"KINETIC_REGENERATE_GOLDEN=1 writes {path.name} anew"


def test_every_golden_file_has_its_case():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {*CASES, "jobset-fields"}


# -- manifests are valid for the API server --------------------------------------------------------


VERSIONS = ("1.30", "1.33", kubernetes_validate.latest_version())
NEED_A_NEW_CLUSTER = {"network-devices"}


@pytest.mark.parametrize(
    ("name", "version"),
    [(n, v) for n in CASES for v in (VERSIONS[-1:] if n in NEED_A_NEW_CLUSTER else VERSIONS)],
)
def test_documents_are_valid(name, version):
    workload, secret, *others = render(*CASES[name])
    names = [r["name"] for r in workload["spec"].get("replicatedJobs", [{"name": "host"}])]
    for document in (*(as_job(workload, each) for each in names), secret, *others):
        kubernetes_validate.validate(document, version, strict=True)
    if workload["kind"] == "JobSet":
        assert workload["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert misfits(workload["spec"], FIELDS["spec"]) == []


def test_a_field_that_a_jobset_does_not_have_is_found():
    assert misfits({"ttlSecondAfterFinished": 1, "suspend": 1}, FIELDS["spec"]) == [
        ".ttlSecondAfterFinished",
        ".suspend",
    ]


# -- facts that hold for every plan ----------------------------------------------------------------

NAMES = ["cpu", "cpu:4", "gpu-l4", "gpu-h100x8", "tpu-v6e-1", "tpu-v6e-8", "tpu-v5p-32", "tpu7x-8"]
VARIABLES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,20}", fullmatch=True).filter(
    lambda name: not re.match("TPU_|MEGASCALE_|JAX_", name)
)
PLANS = st.builds(
    lambda accelerator, spot, slices, retries, debug, place, secrets, options: planned(
        accelerator + (":spot" if spot and accelerator[:3] != "cpu" else ""),
        slices=slices,
        retries=retries,
        debug=debug,
        place=place,
        secrets=tuple(secrets),
        **options,
    ),
    st.sampled_from(NAMES),
    st.booleans(),
    st.integers(1, 500),
    st.integers(0, 3),
    st.booleans(),
    st.builds(
        Place,
        backend=st.just("gke"),
        namespace=st.sampled_from(["", "team-a"]),
        queue=st.sampled_from(["", "team-a"]),
    ),
    st.sets(VARIABLES, max_size=3),
    st.fixed_dictionaries(
        {
            "priority": st.sampled_from([None, "high"]),
            "reservation": st.sampled_from([None, "next-week"]),
            "local_storage": st.sampled_from([None, "60Gi", MULTI_TIER]),
        }
    ),
)


@hypothesis(deadline=None, max_examples=30)
@given(PLANS)
def test_manifests_of_any_plan_have_all_hosts_and_names_that_fit(plan):
    workload, secret = documents = render(plan, SETTINGS)
    assert json.dumps(documents) == json.dumps(render(plan, SETTINGS)), "it is not deterministic"
    job, slices = as_job(workload)["spec"], plan.options.slices
    replicas = 1
    if workload["kind"] == "JobSet":
        (replicated,) = workload["spec"]["replicatedJobs"]
        replicas = replicated["replicas"]
        last = f"{workload['metadata']['name']}-host-{slices - 1}-{job['completions'] - 1}-abcde"
        assert len(last) <= 63
    assert job["completions"] == job["parallelism"] == plan.topology.hosts
    assert replicas * job["completions"] == plan.hosts == observed.shape_of(workload).hosts
    env = env_of(workload)
    assert not [name for name in env if re.match("TPU_|MEGASCALE_|JAX_", name)]
    assert len(env) == len(pod_of(workload)["spec"]["containers"][0]["env"]), "a name comes twice"
    assert set(secret["stringData"].values()) == {""}
    wanted = {value.partition("/")[2] for value in env.values() if value.startswith("kinetic-job")}
    if "KINETIC_TLS_KEY_DIR" in env:
        wanted.add("tls.key")
    assert wanted - {""} == set(secret["stringData"])
    kubernetes_validate.validate(as_job(workload), "1.33", strict=True)


@pytest.mark.parametrize("name", ["cpu", "cpu-2-4-slices", "tpu-v6e-16", "tpu-v6e-16-2-slices"])
def test_every_pod_knows_who_it_is_and_the_first_one_leads(name):
    plan, _ = CASES[name]
    workload, _ = render(*CASES[name])
    slices, pods = plan.options.slices, plan.topology.hosts
    hosts = [
        identity.from_environ(env_of(workload, slice_, pod))
        for slice_ in range(slices)
        for pod in range(pods)
    ]
    assert [who.host for who in hosts] == list(range(plan.hosts))
    assert {who.hosts for who in hosts} == {plan.hosts}
    assert hosts[0].target == "10.0.0.1:7777"
    key = "kinetic-job-00c0ffee/tls.key"
    assert [who.key for who in hosts] == [key] + [""] * (plan.hosts - 1)
    if plan.hosts > 1:
        assert not (Path(env_of(workload, 0, 1)["KINETIC_TLS_KEY_DIR"]) / "tls.key").exists()
        assert {(who.is_pod, who.restarts) for who in hosts} == {(True, 2)}
        leader = "kinetic-job-00c0ffee-host-0-0.kinetic-job-00c0ffee:7777"
        assert {who.target for who in hosts[1:]} == {leader}


def test_the_head_of_an_elastic_job_leads_and_has_no_chips():
    plan, settings = CASES["tpu-v6e-16-elastic"]
    workload, _ = render(plan, settings)
    head = identity.from_environ(env_of(workload, of="head"))
    indices = [
        identity.from_environ(env_of(workload, slice_, pod))
        for slice_ in range(2)
        for pod in range(4)
    ]
    assert (head.leads, head.target, head.key) == (
        True,
        "10.0.0.1:7777",
        "kinetic-job-00c0ffee/tls.key",
    )
    assert [who.host for who in indices] == list(range(8)), "slices come before the head"
    assert {(who.leads, who.key) for who in indices} == {(False, "")}
    leader = "kinetic-job-00c0ffee-head-0-0.kinetic-job-00c0ffee:7777"
    assert {who.target for who in indices} == {leader}
    assert workload["spec"]["coordinator"]["replicatedJob"] == "head"
    spec = pod_of(workload, "head")["spec"]
    assert "nodeSelector" not in spec
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}}
    shape = observed.shape_of(workload)
    assert (shape.hosts, shape.leader) == (9, 8)


def test_hosts_of_an_elastic_job_and_workers_of_pathways_have_no_key():
    workload, _ = render(*CASES["tpu-v6e-16-elastic"])
    assert not [name for name in env_of(workload) if "TLS_KEY" in name]
    assert "volumes" not in pod_of(workload, "host")["spec"] or not [
        volume for volume in pod_of(workload, "host")["spec"]["volumes"] if "secret" in volume
    ]


def test_a_pod_has_no_more_rights_than_what_it_does_needs():
    (container,) = pod_of(render(*CASES["cpu"])[0])["spec"]["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert "NET_RAW" not in context["capabilities"]["add"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod_of(render(*CASES["buckets"])[0])["spec"]["containers"]
    assert "seccompProfile" in container["securityContext"], "the cluster mounts them"
    data = (Dataset("/home/me/labels", True, mount="/labels"),)
    (container,) = pod_of(render(planned("cpu", data=data), SETTINGS)[0])["spec"]["containers"]
    context = container["securityContext"]
    assert "seccompProfile" not in context, "hosts mount in a user namespace"
    assert "SETFCAP" in context["capabilities"]["add"]
    (container,) = pod_of(render(*CASES["training"])[0])["spec"]["containers"]
    assert container["securityContext"] == {"privileged": True}


def test_only_a_service_account_that_is_named_gives_pods_its_token():
    for named, used in (("", "kinetic"), ("kinetic", "kinetic"), ("trainer", "trainer")):
        plan = planned("cpu", place=replace(PLACE, service_account=named))
        spec = pod_of(render(plan, SETTINGS)[0])["spec"]
        assert spec.get("automountServiceAccountToken", True) is bool(named)
        assert spec["serviceAccountName"] == used


def test_with_its_head_an_elastic_job_ends_and_a_slice_does_not_end_it():
    plan, settings = CASES["tpu-v6e-16-elastic"]
    spec = render(plan, settings)[0]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["head"]}
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    slices, head = (r["template"]["spec"] for r in spec["replicatedJobs"])
    assert slices["backoffLimit"] == 4 * 1000
    assert head["backoffLimit"] == plan.options.elastic.max_failures
    assert {rule["action"] for rule in slices["podFailurePolicy"]["rules"]} == {"Ignore"}
    both = [r["template"]["metadata"]["annotations"] for r in spec["replicatedJobs"]]
    assert [EXCLUSIVE in each for each in both] == [True, False]
    assert EXCLUSIVE not in render(plan, settings)[0]["metadata"]["annotations"]


def test_a_jobset_of_slices_alone_says_itself_that_each_has_a_node_pool():
    for name, pool in {
        "tpu-v6e-16-2-slices": "cloud.google.com/gke-nodepool",
        "cpu-2-4-slices": None,
    }.items():
        workload, _ = render(*CASES[name])
        assert workload["metadata"]["annotations"].get(EXCLUSIVE) == pool
        assert EXCLUSIVE not in as_job(workload)["metadata"]["annotations"]


def test_a_shared_reservation_is_named_with_its_project():
    spec = pod_of(render(*CASES["shared-reservation"])[0])["spec"]
    reserved = {k: v for k, v in spec["nodeSelector"].items() if "/reservation" in k}
    assert reserved == {
        "cloud.google.com/reservation-name": "next-week",
        "cloud.google.com/reservation-project": "other",
        "cloud.google.com/reservation-affinity": "specific",
    }
    spec = pod_of(render(*CASES["priority-and-reservation"])[0])["spec"]
    assert [name for name in spec["nodeSelector"] if "/reservation" in name] == [
        "cloud.google.com/reservation-name"
    ], "node pools that somebody made have this label"


def test_the_sidecar_that_mounts_buckets_has_no_limits():
    annotations = pod_of(render(*CASES["buckets"])[0])["metadata"]["annotations"]
    assert {k: v for k, v in annotations.items() if k.startswith("gke-gcsfuse/")} == {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-limit": "0",
        "gke-gcsfuse/memory-limit": "0",
        "gke-gcsfuse/ephemeral-storage-limit": "0",
    }
    annotations = pod_of(render(*CASES["cpu"])[0])["metadata"]["annotations"]
    assert not [name for name in annotations if "gcsfuse" in name]


def test_secrets_are_filled_in_last_and_go_with_their_workload():
    workload, secret = render(*CASES["with-secrets"])
    values = {"HF_TOKEN": "hf", "WANDB_API_KEY": "wandb"}
    owner = workload | {"metadata": workload["metadata"] | {"uid": "1-2-3"}}
    filled = manifests.with_secrets(
        secret, owner, token="t", certificate="c", key="k", values=values
    )
    assert filled["stringData"] == {
        "token": "t",
        "tls.crt": "c",
        "tls.key": "k",
        "env.HF_TOKEN": "hf",
        "env.WANDB_API_KEY": "wandb",
    }
    (reference,) = filled["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"]) == ("Job", "kinetic-job-00c0ffee")
    assert set(secret["stringData"].values()) == {""}, "the rendered one is as it was"
    kubernetes_validate.validate(filled, "1.33", strict=True)


def test_a_secret_cannot_take_the_place_of_the_gangs_own():
    names = ("KINETIC_TOKEN", "KINETIC_HOSTS", "KINETIC_HOST_ADDRESS")
    mine, own = (env_of(render(planned("cpu", secrets=s), SETTINGS)[0]) for s in (names, ()))
    assert mine == own


def test_what_the_cluster_would_take_for_a_variable_arrives_as_it_is():
    text = "print('$(KINETIC_HOSTS)', '$$', '${HOME}')"
    settings = replace(SETTINGS, bootstrap=text, variables={"KINETIC_REQUIREMENTS": "$(X) $$"})
    workload, _ = render(planned("cpu"), settings)
    (container,) = pod_of(workload)["spec"]["containers"]
    assert expand(container["command"][2]) == text
    (variable,) = [each for each in container["env"] if each["name"] == "KINETIC_REQUIREMENTS"]
    assert expand(variable["value"]) == "$(X) $$"


def expand(text):
    """Expand `$(NAME)` and `$$` in a command as the kubelet does, if every variable is set."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: "$" if match[1] is None else "REPLACED", text)


# -- buckets that the cluster mounts ---------------------------------------------------------------


def test_a_host_finds_what_its_cluster_has_mounted(tmp_path):
    data = call_data.load([], {str(tmp_path): Data("gs://images/", fuse=True)}, cache_dir=tmp_path)
    plan = planned(data=data.data)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    mounts = pod_of(render(plan, SETTINGS)[0])["spec"]["containers"][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == [str(tmp_path), LOCAL_FOLDER, "/dev/shm"]
    who = identity.from_environ(env_of(render(plan, SETTINGS)[0]))
    store = MemoryStore()
    assert datasets.prepare(who, plan, store, tmp_path) == Datasets()

    labels = Dataset("gs://images/labels.csv", False, mount="/labels.csv", fuse=True)
    with pytest.raises(SetupFailed, match="is not mounted on this host, at /_kinetic/"):
        datasets.prepare(who, planned(data=(labels,)), store, tmp_path)
