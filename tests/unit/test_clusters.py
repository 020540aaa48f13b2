"""What `kinetic up` decides: the difference of wanted and observed, previews, bodies, refusals.

KINETIC_REGENERATE_GOLDEN=1 rewrites the previews in tests/golden/clusters: read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic._clusters import bodies, objects, preview
from kinetic._clusters import wanted as wanting
from kinetic._clusters.difference import (
    SERVICES,
    Action,
    difference,
    list_pool_removal,
    list_remains,
    list_removals,
)
from kinetic._clusters.observed import APPLIED, Observed, key_of, slices_of
from kinetic._clusters.ray_cluster import make_ray_cluster
from kinetic._clusters.refusals import explain, explain_operation
from kinetic._clusters.releases import RELEASES
from kinetic._clusters.wanted import LABEL, Mode, Wanted
from kinetic.errors import PreflightError, UnknownAccelerator, UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "clusters"
REGENERATES = bool(os.environ.get("KINETIC_REGENERATE_GOLDEN"))
NONE = {
    "accelerators": (),
    "slices": 1,
    "min_nodes": 0,
    "spot": False,
    "reservation": None,
    "flex_start": False,
    "queued": False,
    "network_devices": False,
    "multi_tier": False,
    "standard": False,
}


def want(*accelerators, zone="", **options):
    """Return what the command line with these options wants."""
    options = NONE | {"accelerators": accelerators} | options
    slices, pools = wanting.plan_pools(options)
    wanting.check_mode(pools, options)
    standard = options["standard"]
    return Wanted(
        "dev",
        "my-project",
        wanting.choose_location(zone, slices, standard=standard),
        Mode.STANDARD if standard else Mode.AUTOPILOT,
        slices,
        pools if standard else (),
        bucket="my-project-kn-dev-store",
        manifests=("jobset", "kueue"),
        has_queue=True,
        multi_tier=options["multi_tier"],
        networks=options["network_devices"],
    )


CASES = {
    "v6e-16-autopilot": want("tpu-v6e-16"),
    "v5e-8-standard-spot": want("v5e-8", zone="us-west4-a", standard=True, spot=True),
    "2x-v6e-256-reservation": want(
        "tpu-v6e-256",
        zone="us-east5-b",
        standard=True,
        slices=2,
        reservation="march",
        multi_tier=True,
        network_devices=True,
    ),
    "cpu-only": want("cpu"),
}
"""The four tables of the documentation."""


def complete(wanted, **more):
    """Return the state in which nothing is missing."""
    documents = [
        *objects.make_access(wanted, "ann"),
        *objects.make_queue(wanted),
        *objects.make_checkpoints(wanted),
        *(RELEASES[name].marker for name in wanted.manifests),
    ]
    cluster = bodies.make_cluster(wanted, "e2-standard-4") | {"status": "RUNNING"}
    pools = [bodies.make_pool(wanted, pool) | {"status": "RUNNING"} for pool in wanted.pools]
    cluster["nodePools"] = [*(cluster.get("nodePools") or ()), *pools]
    return Observed(
        "123",
        frozenset(SERVICES),
        cluster=cluster,
        bucket=bodies.make_bucket(wanted) | {"projectNumber": "123"},
        members=frozenset(bodies.list_members(wanted, "123")),
        objects={key_of(d): objects.mark(d, wanted.name)["metadata"] for d in documents},
        caller="ann",
        **more,
    )


def render(wanted):
    """Return the preview of a new cluster, and the bodies of its cluster, pools and bucket."""
    steps = difference(wanted, Observed())
    of_google = (Action.CREATE_BUCKET, Action.CREATE_CLUSTER, Action.CREATE_POOL)
    documents = [step.body for step in steps if step.action in of_google]
    text = preview.describe(wanted, steps, {})
    return text + "\n\n" + json.dumps(documents, indent=1) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_previews_are_the_golden_ones(name):
    """A new cluster of each documented kind: its steps, prices and requests are as people have read
    and agreed."""
    path = GOLDEN / f"{name}.txt"
    if REGENERATES:
        path.parent.mkdir(exist_ok=True)
        path.write_text(render(CASES[name]))
    assert render(CASES[name]) == path.read_text()


def test_every_golden_preview_has_its_case():
    """No file stays behind when a case is renamed."""
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_complete_cluster_needs_no_step(name):
    """The same command on a complete cluster does nothing."""
    assert difference(CASES[name], complete(CASES[name])) == []


@pytest.mark.parametrize("name", CASES)
def test_each_missing_thing_is_the_only_step(name):
    """One object is missing: it alone is made again."""
    wanted = CASES[name]
    whole = complete(wanted)
    for key in whole.objects:
        rest = {k: digest for k, digest in whole.objects.items() if k != key}
        (step,) = difference(wanted, replace(whole, objects=rest))
        releases = {key_of(r.marker): r.name for r in RELEASES.values()}
        assert step.name == releases.get(key, key)
    for changes, action in (
        ({"services": frozenset(SERVICES[1:])}, Action.ENABLE),
        ({"bucket": None}, Action.CREATE_BUCKET),
    ):
        assert [s.action for s in difference(wanted, replace(whole, **changes))] == [action]
    grants = difference(wanted, replace(whole, members=frozenset()))
    assert {step.action for step in grants} == {Action.GRANT}
    for pool in wanted.pools:
        pools = [p for p in whole.cluster["nodePools"] if p["name"] != pool.name]
        (step,) = difference(wanted, replace(whole, cluster=whole.cluster | {"nodePools": pools}))
        assert (step.action, step.name) == (Action.CREATE_POOL, pool.name)


def test_an_object_that_kinetic_renders_differently_now_is_applied_again():
    """A newer kinetic has another Role: its digest differs, so it is applied."""
    wanted = CASES["cpu-only"]
    whole = complete(wanted)
    role = whole.objects["Role default/kinetic"] | {"annotations": {APPLIED: "0123"}}
    older = dict(whole.objects) | {"Role default/kinetic": role}
    (step,) = difference(wanted, replace(whole, objects=older))
    assert (step.action, step.name) == (Action.APPLY, "Role default/kinetic")


def test_objects_of_others_stay_as_they_are():
    """An administrator has installed JobSet and made the account: both serve, neither is
    changed."""
    wanted = CASES["cpu-only"]
    whole = complete(wanted)
    foreign = {"ServiceAccount default/kinetic": {}, RELEASES["jobset"].definition: {}}
    rest = {k: d for k, d in whole.objects.items() if "jobset" not in k}
    assert difference(wanted, replace(whole, objects=rest | foreign)) == []


def test_a_cluster_that_starts_is_waited_for():
    """Another `up` has begun the cluster: this one waits, and creates no second one."""
    wanted = CASES["cpu-only"]
    whole = complete(wanted)
    starting = replace(whole, caller="", cluster=whole.cluster | {"status": "PROVISIONING"})
    actions = [step.action for step in difference(wanted, starting)]
    assert actions[0] is Action.WAIT
    assert Action.CREATE_CLUSTER not in actions


def test_a_pool_that_gke_gave_up_is_made_again():
    """No machines were free: the pool in the state ERROR is removed, and created once more."""
    wanted = CASES["v5e-8-standard-spot"]
    whole = complete(wanted)
    pools = [
        pool
        | (
            {"status": "ERROR", "conditions": [{"message": "stockout"}]}
            if pool["name"] != "default-pool"
            else {}
        )
        for pool in whole.cluster["nodePools"]
    ]
    steps = difference(wanted, replace(whole, cluster=whole.cluster | {"nodePools": pools}))
    assert [step.action for step in steps] == [Action.REMOVE_POOL, Action.CREATE_POOL]
    assert "stockout" in steps[0].detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"name": "dev"}}, "kinetic did not create"),
        ({"bucket": {"name": "b"}}, "The bucket my-project-kn-dev-store exists"),
        (
            {
                "cluster": {
                    "resourceLabels": {LABEL: "dev"},
                    "autopilot": {"enabled": True},
                    "status": "ERROR",
                    "conditions": [{"message": "no network"}],
                }
            },
            r"GKE failed to create the cluster dev \(no network\)",
        ),
        ({"quotas": {"tpu-v6e-16": 0.0}}, "in us-central1 is 0, .*needs 16"),
    ],
)
def test_what_up_cannot_make_is_refused_with_the_reason(changes, message):
    """Something foreign, broken, or a quota is in the way: nothing is changed."""
    with pytest.raises(PreflightError, match=message):
        difference(CASES["v6e-16-autopilot"], replace(Observed(), **changes))


def test_a_pool_of_that_name_that_is_another_is_refused():
    """The node pool's name is taken, by somebody else's pool or by other machines."""
    wanted = CASES["v5e-8-standard-spot"]
    whole = complete(wanted)
    name = wanted.pools[0].name
    for config, message in (
        ({"machineType": "ct5lp-hightpu-8t"}, "kinetic did not create"),
        (
            {"machineType": "n1", "resourceLabels": {LABEL: "dev"}},
            "exists with 0 to 0 x n1, and not",
        ),
    ):
        cluster = whole.cluster | {"nodePools": [{"name": name, "config": config}]}
        with pytest.raises(PreflightError, match=message):
            difference(wanted, replace(whole, cluster=cluster))


def test_a_pool_that_cannot_become_what_is_asked_for_is_refused():
    """The pool keeps machines without jobs, and the command says that none shall be kept: it must
    not say that nothing is missing while they cost."""
    kept = want("v6e-16", zone="us-east5-b", standard=True, min_nodes=4)
    wanted = want("v6e-16", zone="us-east5-b", standard=True)
    with pytest.raises(PreflightError, match=r"with 4 to 4 x ct6e.*, and not with 0 to 4 x ct6e"):
        difference(wanted, complete(kept))
    reserved = want("v6e-16", zone="us-east5-b", standard=True, reservation="march")
    with pytest.raises(PreflightError, match="and not with 0 to 4 x ct6e-standard-4t of march"):
        difference(reserved, complete(wanted))


def test_a_bucket_of_another_project_is_not_used_nor_removed():
    """Somebody has taken the bucket's name, which is global, and given it the label: no code and no
    results go there."""
    wanted = CASES["cpu-only"]
    whole = complete(wanted)
    taken = replace(whole, bucket=whole.bucket | {"projectNumber": "666"})
    with pytest.raises(PreflightError, match="or belongs to another project"):
        difference(wanted, taken)
    steps = list_removals(wanted, taken, with_bucket=True)
    assert [s.action for s in steps] == [Action.REMOVE_CLUSTER]
    (line,) = list_remains(wanted, taken, with_bucket=True)
    assert "dev-store stays: kinetic did not create it" in line


def test_a_cluster_of_that_name_elsewhere_shares_the_bucket():
    """A second cluster of the name in another place is refused; where there are two, the bucket of
    both stays with the other one."""
    wanted = CASES["cpu-only"]
    with pytest.raises(UsageError, match="has a cluster dev in us-east5, and both would share"):
        difference(wanted, Observed(elsewhere=("us-east5",)))
    both = replace(complete(wanted), elsewhere=("us-east5",))
    steps = list_removals(wanted, both, with_bucket=True)
    assert [s.action for s in steps] == [Action.REMOVE_CLUSTER]
    (line,) = list_remains(wanted, both, with_bucket=True)
    assert "dev-store stays: dev in us-east5 uses it" in line


def test_a_cluster_of_the_other_kind_is_refused():
    """The cluster is Standard, and Autopilot is asked for: it cannot become one."""
    standard = complete(CASES["v5e-8-standard-spot"])
    with pytest.raises(UsageError, match="Run the command with --standard"):
        difference(CASES["v6e-16-autopilot"], standard)


def test_a_zone_without_the_machine_is_refused():
    """GKE's machine types say that the zone lacks it, although the table of zones has it."""
    wanted = CASES["v5e-8-standard-spot"]
    with pytest.raises(PreflightError, match="us-west4-a has no ct5lp-hightpu-8t"):
        difference(wanted, Observed(machines=frozenset({"n1-standard-4"})))


def test_the_default_pool_has_a_machine_that_the_zone_has():
    """us-central2-b has no e2-standard-4: the first of the list that it has is taken."""
    wanted = want("v4-8", zone="us-central2-b", standard=True)
    there = frozenset({"n1-standard-4", "ct4p-hightpu-4t"})
    steps = difference(wanted, Observed(machines=there))
    (cluster,) = [s.body for s in steps if s.action is Action.CREATE_CLUSTER]
    assert cluster["nodePools"][0]["config"]["machineType"] == "n1-standard-4"
    with pytest.raises(PreflightError, match="none of the machines"):
        difference(wanted, Observed(machines=frozenset({"ct4p-hightpu-4t"})))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"zone": "us-east1-b"}, PreflightError, "us-east1-b has no v6e. Zones with v6e: us-c"),
        ({"zone": "moon"}, UsageError, "'moon' is not a zone"),
        ({"zone": "us-east5", "standard": True}, UsageError, "needs a zone, such as us-east5-a"),
        ({"multi_tier": True}, UsageError, "--multi-tier is for node pools.* Add --standard"),
        ({"min_nodes": 4}, UsageError, "--min-nodes is for node pools"),
        ({"standard": True, "min_nodes": 3}, UsageError, "must be 0 or 4 for tpu-v6e-16"),
        (
            {"standard": True, "spot": True, "queued": True},
            UsageError,
            "cannot be both spot and queued provisioning",
        ),
    ],
)
def test_mistakes_are_refused_before_any_login(options, kind, message):
    """A mistake of the command line needs no account to be reported."""
    with pytest.raises(kind, match=message):
        want("tpu-v6e-16", **options)


def test_a_pool_of_tpu7x_is_refused():
    """Node pools of tpu7x need a resource that `up` does not make."""
    with pytest.raises(UsageError, match="need a workload policy"):
        want("tpu7x-8", zone="us-central1-c", standard=True)


def test_an_accelerator_that_is_named_twice_is_refused():
    """Twice the same accelerator would be one node pool at the price of two."""
    with pytest.raises(UsageError, match="Use --slices for several slices of it"):
        want("tpu-v6e-16", "v6e-16")


def test_multi_tier_checkpoints_are_for_tpus():
    """GKE's multi-tier checkpoints serve TPUs only."""
    with pytest.raises(UsageError, match="--multi-tier is for TPUs"):
        want("l4", zone="us-central1-a", standard=True, multi_tier=True)


def test_no_zone_has_everything():
    """v4 and v6e stand in different zones: one cluster cannot have both."""
    with pytest.raises(PreflightError, match="No zone has all of v4, v6e"):
        want("v4-8", "tpu-v6e-16")
    with pytest.raises(UnknownAccelerator):
        want("v6f-16")


def test_a_name_that_google_does_not_accept_is_refused():
    """GKE's and Cloud Storage's rules for names are checked here."""
    with pytest.raises(UsageError, match="GKE does not accept the name 'Dev'"):
        wanting.check_name("Dev")
    with pytest.raises(UsageError, match="63 is the most"):
        wanting.name_bucket("a" * 30, "b" * 40)


def test_a_pool_is_what_googles_tutorial_creates():
    """A v6e slice with several network devices has the fields of the commands in Google's tutorial
    of multislice training."""
    wanted = want("tpu-v6e-16", zone="us-east5-b", standard=True, network_devices=True)
    body = bodies.make_pool(wanted, wanted.pools[0])
    assert body["config"]["machineType"] == "ct6e-standard-4t"
    assert body["placementPolicy"] == {"type": "COMPACT", "tpuTopology": "4x4"}
    assert body["config"]["labels"] == {"cloud.google.com/gke-networking-dra-driver": "true"}
    assert body["config"]["gvnic"] == {"enabled": True}
    assert body["config"]["oauthScopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
    cluster = bodies.make_cluster(wanted, "n1-standard-16")
    assert cluster["networkConfig"] == {"datapathProvider": "ADVANCED_DATAPATH"}
    assert cluster["workloadIdentityConfig"] == {"workloadPool": "my-project.svc.id.goog"}


def test_capacity_is_a_property_of_the_pool():
    """Each way to get machines has its fields in the request."""
    zone = {"zone": "us-east5-b", "standard": True}
    bodies_by = {
        option: bodies.make_pool(w, w.pools[0])
        for option in ("flex_start", "queued", "spot")
        if (w := want("tpu-v6e-16", **{option: True}, **zone))
    }
    assert bodies_by["flex_start"]["config"]["flexStart"] is True
    assert bodies_by["queued"]["queuedProvisioning"] == {"enabled": True}
    assert bodies_by["spot"]["config"]["spot"] is True
    gpu = want("gpu-a100x4", zone="us-central1-a", standard=True, min_nodes=1)
    body = bodies.make_pool(gpu, gpu.pools[0])
    assert body["autoscaling"]["minNodeCount"] == 1
    assert body["config"]["accelerators"][0]["acceleratorCount"] == "4"
    assert slices_of(body) == [gpu.slices[0]] * 11


def test_processors_stay_off_machines_with_chips():
    """The queue's first flavor has no chips and no labels: a pod without chips gets that one."""
    queue = objects.make_queue(CASES["v6e-16-autopilot"])
    (cluster_queue,) = [d for d in queue if d["kind"] == "ClusterQueue"]
    first, second = cluster_queue["spec"]["resourceGroups"][0]["flavors"]
    assert [r["nominalQuota"] for r in first["resources"] if "tpu" in r["name"]] == ["0"]
    assert [r["nominalQuota"] for r in second["resources"] if "tpu" in r["name"]] == ["16"]
    assert queue[0]["spec"] == {}


def test_the_queue_has_room_for_pools_that_are_there():
    """`pool add` to a cluster with a pool: the queue counts both."""
    old = want("tpu-v6e-16", zone="us-east5-b", standard=True)
    new = want("tpu-v6e-64", zone="us-east5-b", standard=True)
    steps = difference(new, complete(old))
    (queue,) = [s.body for s in steps if s.name == "ClusterQueue kinetic"]
    flavors = queue["spec"]["resourceGroups"][0]["flavors"]
    assert [f["resources"][-1]["nominalQuota"] for f in flavors] == ["0", "64", "16"]


def test_down_removes_only_what_has_the_label():
    """A cluster and a bucket of somebody else stay, and it says so."""
    wanted = CASES["cpu-only"]
    own = complete(wanted)
    steps = list_removals(wanted, own, with_bucket=True)
    assert [s.action for s in steps] == [Action.REMOVE_CLUSTER, Action.REMOVE_BUCKET]
    foreign = Observed(cluster={"name": "dev"}, bucket={"name": "b"})
    assert list_removals(wanted, foreign, with_bucket=True) == []
    assert len(list_remains(wanted, foreign, with_bucket=True)) == 2
    steps = list_removals(wanted, own, with_bucket=False)
    assert [s.action for s in steps] == [Action.REMOVE_CLUSTER]
    (line,) = list_remains(wanted, own, with_bucket=False)
    assert "--delete-store my-project-kn-dev-store" in line


def test_pool_remove_removes_only_what_has_the_label():
    """The default pool has the cluster's label; one that gcloud has made has not."""
    whole = complete(CASES["v5e-8-standard-spot"])
    wanted = CASES["v5e-8-standard-spot"]
    pool = wanted.pools[0].name
    assert [s.name for s in list_pool_removal(wanted, whole, pool)] == [pool]
    foreign = {"name": "mine", "config": {"machineType": "n1-standard-4"}}
    others = replace(whole, cluster=whole.cluster | {"nodePools": [foreign]})
    with pytest.raises(PreflightError, match="mine was not removed: kinetic did not create it"):
        list_pool_removal(wanted, others, "mine")
    with pytest.raises(PreflightError, match="default-pool was not removed: GKE's own pods"):
        list_pool_removal(wanted, whole, "default-pool")
    with pytest.raises(PreflightError, match=f"no node pool {pool}; its node pools: mine"):
        list_pool_removal(wanted, others, pool)


def test_lifecycle_rules_never_take_content():
    """An unchanged project's code may be years old: no rule reaches blobs, packs or trees."""
    (records, uploads) = bodies.make_bucket(CASES["cpu-only"])["lifecycle"]["rule"]
    assert not {"blobs/", "packs/", "trees/"} & set(records["condition"]["matchesPrefix"])
    assert uploads["action"] == {"type": "AbortIncompleteMultipartUpload"}


def test_the_limit_of_a_quota_is_the_most_specific_one():
    """The region's own limit for a family counts more than the one for all regions."""
    buckets = [
        {"effectiveLimit": "0", "dimensions": {"tpu_family": "CT6E"}},
        {"effectiveLimit": "64", "dimensions": {"region": "us-east5", "tpu_family": "CT6E"}},
        {"effectiveLimit": "8", "dimensions": {"region": "us-east5", "tpu_family": "CT5LP"}},
    ]
    assert bodies.limit_of(buckets, "us-east5", "CT6E") == 64
    assert bodies.limit_of(buckets, "us-west1", "CT6E") == 0
    assert bodies.limit_of(buckets, "us-west1", "CT4P") is None


def test_a_ray_cluster_is_written_as_google_documents_it():
    """Two slices with network devices and a bucket: the fields of Google's own manifest."""
    wanted = want("tpu-v6e-16", slices=2, network_devices=True)
    claim, cluster = make_ray_cluster(replace(wanted, bucket="data"), "3.12")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["numOfHosts"]) == (2, 4)
    spec = group["template"]["spec"]
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (worker,) = spec["containers"]
    assert worker["resources"]["limits"] == {"google.com/tpu": "4"}
    assert {"name": "MEGASCALE_NUM_SLICES", "value": "2"} in worker["env"]
    (wish,) = spec["resourceClaims"]
    assert wish["resourceClaimTemplateName"] == claim["metadata"]["name"]
    assert worker["resources"]["claims"] == [{"name": wish["name"]}]
    assert worker["image"].endswith("-py312-tpu")
    assert spec["volumes"][1]["csi"]["volumeAttributes"]["bucketName"] == "data"
    cpu_only = make_ray_cluster(want("cpu"), "3.12")
    assert [document["kind"] for document in cpu_only] == ["RayCluster"]


@pytest.mark.parametrize(
    ("code", "words", "reason", "message"),
    [
        (401, "Request had invalid credentials", "", "gcloud auth application-default login"),
        (403, "Permission denied on project p", "", "owner for roles/container.admin"),
        (403, "API has not been used in project 1 before", "", "`kinetic up` enables"),
        (403, "disabled", "SERVICE_DISABLED", "`kinetic up` enables"),
        (403, "Billing must be enabled", "", "billing/linkedaccount\\?project=p"),
        (403, "Insufficient regional quota: CPUS", "", "iam-admin/quotas\\?project=p"),
        (404, "Not found: projects/p", "", "gcloud projects list"),
        (409, "Already exists", "", "another name with --cluster"),
        (400, "Cluster is running incompatible operation operation-1", "", "at work"),
        (400, "Invalid machine type", "", "HTTP 400"),
    ],
)
def test_each_refusal_says_what_to_do(code, words, reason, message):
    """Google's words are quoted, and one sentence names the command or the page that helps."""
    detail = {"message": words, "details": [{"reason": reason}]}
    error = explain("p", "create the cluster dev", code, detail)
    assert "create the cluster dev in the project p" in str(error)
    with pytest.raises(type(error), match=message):
        raise error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("GCE_STOCKOUT: does not have enough resources available", "another zone"),
        ("Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0", "iam-admin/quotas"),
        ("Internal error", "continues with what is missing"),
    ],
)
def test_a_failed_operation_says_what_to_do(words, message):
    """GKE accepted the request, and gave up after ten minutes."""
    assert message in str(explain_operation("p", "create the node pool a", words))
