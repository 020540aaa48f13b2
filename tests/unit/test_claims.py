"""A slice's claims to network devices are created with its workload, and removed with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster.fake import FakeCluster
from doubles.memory_store import MemoryStore
from manifest_cases import SETTINGS, planned

from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.backend import KubernetesBackend
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic.errors import BackendUnavailable, PreflightError

PLAN = planned("tpu-v6e-16", slices=2, place=Place("pathways"), network_devices="2")
REF = JobRef(PLAN.job_id, PLAN.place, "tpu-v6e-16", "f", "f", 0.0, "memory://claims", hosts=8)
CLAIMS = "resourceclaimtemplates"


def backend_on(cluster: FakeCluster) -> KubernetesBackend:
    variables = {"KUBECONFIG": str(cluster.kubeconfig)}
    access = kubeconfig.find(variables)
    settings = replace(SETTINGS, service_account="")
    return KubernetesBackend(
        "pathways", MemoryStore("claims"), settings, lambda: HttpApi(access, variables)
    )


@pytest.mark.starts_processes
def test_a_claim_template_is_made_before_the_secret_and_goes_with_the_workload(
    cluster: FakeCluster,
) -> None:
    backend = backend_on(cluster)
    backend.submit(REF, backend.render(PLAN), {})
    (template,) = cluster.objects(CLAIMS)
    (jobset,) = cluster.objects("jobsets")
    (owner,) = template["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("JobSet", jobset["metadata"]["uid"])
    created = [r.resource for r in cluster.requests if r.verb == "create"]
    assert created == ["jobsets", CLAIMS, "secrets"], "without a Secret a submission is incomplete"
    backend.cleanup(REF)
    cluster.wait_for(lambda: not cluster.left_over())


def test_a_workload_whose_claims_cannot_be_made_is_removed(cluster: FakeCluster) -> None:
    backend = backend_on(cluster)
    cluster.faults.fail(403, times=1, verb="create", resource=CLAIMS)
    with pytest.raises((PreflightError, BackendUnavailable)):
        backend.submit(REF, backend.render(PLAN), {})
    cluster.wait_for(lambda: not cluster.left_over())


def test_a_claim_template_whose_answer_was_lost_is_ours(cluster: FakeCluster) -> None:
    backend = backend_on(cluster)
    cluster.faults.reset(verb="create", resource=CLAIMS, after=True)
    backend.submit(REF, backend.render(PLAN), {})
    assert len(cluster.objects(CLAIMS)) == 1
    backend.cleanup(REF)
    cluster.wait_for(lambda: not cluster.left_over())
