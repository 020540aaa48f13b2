"""Volumes of pods in memory, /dev/shm and checkpoints, and the network devices that pods claim."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from manifest_cases import PLACE, SETTINGS, env_of, planned, pod_of

from kinetic._backends.kubernetes import manifests
from kinetic._backends.kubernetes.manifests import render
from kinetic._backends.kubernetes.volumes import LOCAL_FOLDER, MULTI_TIER_DRIVER
from kinetic._core.place import ALL_DEVICES, MULTI_TIER
from kinetic._host import identity
from kinetic._host.agent import workspace


def local_volume(plan, settings=SETTINGS):
    """Return the volume for a host's local files, its mount path, and the container's resources."""
    workload = render(plan, settings)[0]
    spec = pod_of(workload)["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "local"]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "local"]
    assert env_of(workload)["KINETIC_LOCAL_DIR"] == mount["mountPath"]
    return volume, mount["mountPath"], spec["containers"][0].get("resources", {})


@pytest.mark.parametrize("accelerator", ["cpu", "gpu-l4", "tpu-v6e-16"])
def test_every_host_has_a_folder_in_memory(accelerator):
    volume, folder, resources = local_volume(planned(accelerator))
    assert volume == {"name": "local", "emptyDir": {"medium": "Memory"}}
    assert folder == LOCAL_FOLDER
    assert "memory" not in json.dumps(resources)


def test_memory_of_a_size_is_reserved():
    for accelerator in ("cpu", "tpu-v6e-16"):
        plan = planned(accelerator, local_storage="60Gi")
        volume, _, resources = local_volume(plan)
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "60Gi"}
        assert resources["requests"]["memory"] == "60Gi"
        assert "memory" not in resources.get("limits", {})


def shared_memory(plan):
    """Return the pod's volume that is mounted at /dev/shm."""
    spec = pod_of(render(plan, SETTINGS)[0])["spec"]
    (mount,) = [
        m for m in spec["containers"][0].get("volumeMounts", ()) if m["mountPath"] == "/dev/shm"
    ]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    assert "readOnly" not in mount
    return volume["emptyDir"]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, None),
        ({"memory": "16Gi"}, "8Gi"),
        ({"memory": "7.5Gi"}, "3.75Gi"),
        ({"memory": "16Gi", "shm": "2Gi"}, "2Gi"),
        ({"shm": "500M"}, "500M"),
    ],
)
@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-16"])
def test_processes_of_a_pod_share_memory(accelerator, options, size):
    volume = shared_memory(planned(accelerator, **options))
    assert volume == {"medium": "Memory"} | ({"sizeLimit": size} if size else {})


def test_local_checkpoints_may_be_all_of_the_shared_memory():
    env = {"KINETIC_LOCAL_DIR": "/dev/shm/"}
    spec = pod_of(render(planned("tpu-v6e-16", env=env, shm="8Gi"), SETTINGS)[0])["spec"]
    mounts = [m["name"] for m in spec["containers"][0]["volumeMounts"]]
    assert mounts == ["local", "leader"]


def test_the_head_of_an_elastic_job_takes_nothing_of_what_the_function_needs():
    plan = planned(
        "tpu-v6e-1",
        slices=(1, 2),
        cpu="8",
        memory="32Gi",
        privileged=True,
    )
    workload = render(plan, SETTINGS)[0]
    (head,), (host,) = (pod_of(workload, of)["spec"]["containers"] for of in ("head", "host"))
    assert head["resources"]["requests"] == {"cpu": "1", "memory": "1Gi"}
    assert host["resources"]["requests"] == {"google.com/tpu": "1", "cpu": "8", "memory": "32Gi"}
    assert "privileged" not in head["securityContext"]
    assert host["securityContext"] == {"privileged": True}
    assert "/dev/shm" not in {m["mountPath"] for m in head.get("volumeMounts", ())}


def test_what_a_pod_requests_counts_its_folders_in_memory():
    both = planned("tpu-v6e-16", memory="100Gi", local_storage="60Gi")
    container = pod_of(render(both, SETTINGS)[0])["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"google.com/tpu": "4", "memory": "100Gi"}


def test_pods_without_chips_request_processors_and_memory():
    simulated = replace(SETTINGS, simulated=True)
    plan = planned("tpu-v6e-1", cpu="500m", memory="2Gi")
    container = pod_of(render(plan, simulated)[0])["spec"]["containers"][0]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "2Gi"}}


def test_the_folder_is_where_the_function_wants_it():
    plan = planned("tpu-v6e-16", env={"KINETIC_LOCAL_DIR": "/ramdisk"})
    assert local_volume(plan)[1] == "/ramdisk"


def test_multi_tier_checkpointing_keeps_the_folder_on_the_node():
    plan = planned("tpu-v6e-16", local_storage=MULTI_TIER)
    volume, _, resources = local_volume(plan)
    assert volume["csi"] == {"driver": MULTI_TIER_DRIVER}
    assert "memory" not in json.dumps(resources)
    simulated, _, _ = local_volume(plan, replace(SETTINGS, simulated=True))
    assert simulated["emptyDir"] == {"medium": "Memory"}, "any node will do"


@pytest.mark.parametrize(
    ("storage", "simulated", "accelerator", "slices", "is_ours"),
    [
        ("", False, "tpu-v6e-16", 1, True),
        ("60Gi", False, "tpu-v6e-16", 1, True),
        (MULTI_TIER, False, "tpu-v6e-16", 1, False),
        (MULTI_TIER, False, "tpu-v6e-1", 4, False),
        (MULTI_TIER, False, "tpu-v6e-16", (1, 2), True),
        (MULTI_TIER, False, "tpu-v6e-1", 1, True),
        (MULTI_TIER, True, "tpu-v6e-16", 1, True),
    ],
)
def test_a_host_says_its_place_in_jax_in_a_folder_that_nobody_else_manages(
    storage, simulated, accelerator, slices, is_ours
):
    """GKE's controller writes a host's JAX rank for JobSets that have one replicated Job. For all
    others, kinetic must write it, to a folder that the controller does not manage."""
    place = replace(PLACE, backend="pathways")
    plan = planned(accelerator, slices=slices, local_storage=storage, place=place)
    settings = replace(SETTINGS, simulated=simulated)
    who = identity.from_environ(env_of(render(plan, settings)[0]))
    home = workspace.prepare_home(who, plan)
    assert (home is not None) == is_ours
    if home is not None:
        assert home.variables(moved_in=False) == {"KINETIC_LOCAL_DIR": LOCAL_FOLDER}
        assert not home.is_shared


@pytest.mark.parametrize(
    ("option", "amount"),
    [
        ("2", {"allocationMode": "ExactCount", "count": 2}),
        (ALL_DEVICES, {"allocationMode": "All"}),
    ],
)
def test_pods_of_several_slices_claim_network_devices(option, amount):
    plan = planned("tpu-v6e-16", slices=2, network_devices=option)
    workload, _, template = render(plan, SETTINGS)
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "netdev.google.com"} | amount
    spec = pod_of(workload)["spec"]
    (claim,) = spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
    owner = workload | {"metadata": workload["metadata"] | {"uid": "1-2-3"}}
    (reference,) = manifests.add_owner(template, owner)["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"]) == ("JobSet", "1-2-3")
    simulated = render(plan, replace(SETTINGS, simulated=True))
    assert len(simulated) == 2
    assert "claims" not in json.dumps(simulated).lower()
