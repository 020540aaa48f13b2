"""The place of a job (backend, cluster, zone, …) in plan and reference, and the backend for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from laptop_fakes import FakeBackend, plan, ref

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._client import planning
from kinetic._client.handle import JobHandle
from kinetic._client.options import check_options
from kinetic._config import settings as configuration
from kinetic._core import layout
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._core.ref import ATTRIBUTES, JobRef
from kinetic._store.local import LocalStore

CLUSTER = Place(
    "gke",
    cluster="tpus",
    project="lab",
    zone="us-central2-b",
    namespace="team-a",
    image="gcr.io/lab/image:1",
    image_repo="gcr.io/lab",
    queue="team-a-queue",
    service_account="trainer",
)
OPTIONS = {
    "backend": "gke",
    "cluster": "tpus",
    "project": "lab",
    "zone": "us-central2-b",
    "namespace": "team-a",
    "container_image": "gcr.io/lab/image:1",
    "base_image_repo": "gcr.io/lab",
    "queue": "team-a-queue",
    "priority": "high",
    "reservation": "next-week",
    "local_storage": "60Gi",
    "service_account": "trainer",
}


class Fixed(FakeBackend):
    name = "gke"


@pytest.fixture
def project(home, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))


def test_a_place_survives_json_and_is_small():
    assert Place("local").to_json() == {"backend": "local"}
    for place in (Place("local", "pathways"), CLUSTER):
        assert Place.from_json(json.loads(json.dumps(place.to_json() | {"unknown": 1}))) == place
    assert (CLUSTER.requested, Place("local", "gke").requested) == ("gke", "gke")


@pytest.mark.parametrize("damaged", [{}, [], None, {"backend": 7}, {"backend": "gke", "zone": []}])
def test_a_damaged_place(damaged):
    with pytest.raises(errors.CorruptRecord, match="place of the job is damaged"):
        Place.from_json(damaged)


@pytest.mark.starts_processes
def test_options_of_a_cluster_arrive_in_the_plan_the_reference_and_the_handle(home, project):
    backends = []

    def maker(place, store):
        backends.append((place, Fixed(store)))
        return backends[-1][1]

    with registry.substitute_backend("gke", maker):
        handle = kinetic.run("cpu", **OPTIONS)(print).run_async()
        attached = kinetic.attach(handle.job_id)
        assert not attached.status().ended  # Makes a backend from the reference.
    store = LocalStore(home)
    stored_plan = Plan.from_json(json.loads(store.get(layout.JobKeys(handle.job_id).plan)))
    assert [place for place, _ in backends] == [CLUSTER, CLUSTER]
    assert stored_plan.place == handle.ref.place == attached.ref.place == CLUSTER
    options = stored_plan.options
    assert (options.priority, options.reservation) == ("high", "next-week")
    assert options.local_storage == "60Gi"
    assert (attached.cluster_name, attached.zone, attached.project) == (
        "tpus",
        "us-central2-b",
        "lab",
    )
    assert (attached.namespace, attached.image_uri) == ("team-a", "gcr.io/lab/image:1")
    assert (attached.backend, attached.requested_backend) == ("gke", "gke")
    assert (attached.k8s_name, attached.bucket_name) == ("", "")


@pytest.mark.starts_processes
def test_settings_name_the_place_too_and_options_come_first(home, project, monkeypatch):
    monkeypatch.setenv("KINETIC_CLUSTER", "tpus")
    monkeypatch.setenv("KINETIC_NAMESPACE", "team-a")
    with registry.substitute_backend("gke", lambda _, store: Fixed(store)):
        place = kinetic.run("cpu", namespace="team-b")(print).plan().plan.place
    assert place == Place("gke", cluster="tpus", namespace="team-b")


@pytest.mark.starts_processes
def test_what_stands_in_for_a_cluster_keeps_what_was_asked_for(home, project):
    view = kinetic.run("cpu", namespace="team-a")(print).plan()
    assert view.plan.place == Place("local", stands_in_for="gke", namespace="team-a")
    assert "local (stands in for gke)" in repr(view)


def test_references_of_older_versions_stay_readable():
    old = {
        "job_id": "job-00000001",
        "backend": "local",
        "requested_backend": "pathways",
        "accelerator": "tpu-v6e-16",
        "func_name": "train",
        "display_name": "train",
        "created_at": 1_000_000.0,
        "store_uri": "/s",
        "hosts": 4,
        "project": "",
        "cluster_name": "",
        "zone": "",
        "namespace": "team-a",
        "bucket_name": "",
        "k8s_name": "",
        "image_uri": "",
        "debug": False,
        "output_dir": "",
    }
    read = JobRef.from_json(old)
    assert read.place == Place("local", stands_in_for="pathways", namespace="team-a")
    assert (read.job_id, read.hosts, read.store_uri) == ("job-00000001", 4, "/s")
    assert read.attributes() == old | {"schema_version": 1}
    assert JobRef.from_json(old | {"requested_backend": "local"}).place.stands_in_for == ""


def test_a_reference_is_small_and_a_handle_has_all_attributes():
    reference = ref(store_uri="gs://bucket/kinetic")
    assert set(reference.to_json()) == {
        "schema_version",
        "job_id",
        "place",
        "accelerator",
        "func_name",
        "display_name",
        "created_at",
        "store_uri",
        "hosts",
    }
    assert JobRef.from_json(json.loads(json.dumps(reference.to_json()))) == reference
    assert JobRef.from_json(json.loads(json.dumps(reference.attributes()))) == reference
    led = replace(reference, place=Place("ray", address="http://head:8265"), has_head=True)
    for one in (led, replace(reference, has_single_controller=True)):
        assert JobRef.from_json(one.to_json()) == JobRef.from_json(one.attributes()) == one
    handle = JobHandle(reference, store=LocalStore("/s"))
    assert handle.bucket_name == "bucket"
    assert {name for name in ATTRIBUTES if not hasattr(handle, name)} == set()
    assert set(dir(handle)) >= ATTRIBUTES
    with pytest.raises(AttributeError, match="no attribute 'cluster_nam'"):
        _ = handle.cluster_nam


def test_a_backend_that_this_version_lacks():
    with pytest.raises(
        errors.PreflightError, match="This version of kinetic has no backend 'slurm'"
    ):
        registry.make(Place("slurm"), LocalStore("/s"))


def test_the_local_backend_looks_at_the_environment_when_it_starts_a_host(home, project):
    """Listing jobs makes a backend and must be fast: a backend reads the environment only when it
    starts a host."""
    backend = registry.make(Place("local"), LocalStore(home))
    assert "_environ" not in vars(backend)
    assert backend._environ["PATH"]


@pytest.mark.parametrize(
    ("accelerator", "slices", "backend"),
    [
        ("cpu:2", 1, "gke"),
        ("gpu-l4", 1, "gke"),
        ("tpu-v6e-4", 1, "gke"),
        ("tpu-v6e-8", 1, "pathways"),
        ("cpu:2", 4, "pathways"),
        ("gpu-l4", 2, "pathways"),
        ("tpu-v6e-4", 2, "pathways"),
    ],
)
def test_several_hosts_are_a_job_set_whatever_they_are(accelerator, slices, backend):
    place = chosen({"KINETIC_CLUSTER": "c"}, accelerator=accelerator, slices=slices)
    assert place.place.backend == backend


def test_what_pods_get_by_settings_goes_to_jobs_that_can_use_it():
    cluster = {"KINETIC_CLUSTER": "c", "KINETIC_LOCAL_STORAGE": "60GB"}
    environ = cluster | {"KINETIC_NETWORK_DEVICES": "2"}
    two = planned(environ, slices=2).options
    assert (two.local_storage, two.network_devices) == ("60G", "2")
    assert planned(environ).options.network_devices is None
    assert planned(environ, accelerator="gpu-l4", slices=2).options.network_devices is None
    single = planned(environ, slices=2, controller="single").options
    assert (single.local_storage, single.network_devices) == (None, None)


def test_only_a_service_account_that_somebody_names_is_in_the_place():
    cluster = {"KINETIC_CLUSTER": "c"}
    assert chosen(cluster).place.service_account == ""
    named = cluster | {"KINETIC_SERVICE_ACCOUNT": "team"}
    assert chosen(named).place.service_account == "team"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KINETIC_LOCAL_STORAGE", "plenty", 'KINETIC_LOCAL_STORAGE must be a size .*"multi-tier"'),
        ("KINETIC_NETWORK_DEVICES", "x", "KINETIC_NETWORK_DEVICES must be a number such as 2"),
    ],
)
def test_settings_of_pods_that_cannot_work(variable, value, words):
    with pytest.raises(errors.UsageError, match=words):
        chosen({variable: value})


# -- jobs with a single controller -----------------------------------------------------------------


def chosen(environ=None, **options):
    settings = configuration.load({"KINETIC_HOME": "/home/me"} | (environ or {}), profile={})
    backends = check_options(None, {"accelerator": "tpu-v6e-8"} | options)
    place, notice = registry.select(backends, settings)
    return SimpleNamespace(place=place, notice=notice)


def planned(environ=None, **options):
    settings = configuration.load({"KINETIC_HOME": "/home/me"} | (environ or {}), profile={})
    backends = check_options(None, {"accelerator": "tpu-v6e-8"} | options)
    place = registry.select(backends, settings)[0]
    return replace(plan(), place=place, options=planning.complete_options(backends, settings))


def test_a_single_controller_is_a_backend_of_its_own():
    single = chosen(controller="single")
    assert (single.place.backend, single.place.requested) == ("local", "pathways")
    assert single.notice.endswith("simulating tpu-v6e-8 (one process with 8 chips) here")
    two = chosen(controller="single", slices=2)
    assert two.notice.endswith("2 slices of tpu-v6e-8 (one process with 16 chips) here")
    on_cluster = chosen({"KINETIC_CLUSTER": "c"}, controller="single", accelerator="tpu-v6e-4")
    assert on_cluster.place.backend == "pathways"


def test_its_slices_may_come_and_go_here_and_on_a_cluster():
    for environ, backend in (({}, "local"), ({"KINETIC_CLUSTER": "c"}, "pathways")):
        backends = planned(environ, controller="single", slices=(1, 2))
        assert (backends.place.backend, backends.has_head) == (backend, False)


@pytest.mark.parametrize(
    ("environ", "options", "has_head"),
    [
        ({}, {}, False),
        ({"KINETIC_CLUSTER": "c"}, {}, True),
        ({"KINETIC_CLUSTER": "c"}, {"backend": "local"}, False),
    ],
)
def test_elastic_jobs_have_a_head_where_hosts_are_programs(environ, options, has_head):
    assert planned(environ, slices=(1, 2), **options).has_head == has_head
    assert not planned(environ, slices=2, **options).has_head


def test_jobs_on_ray_are_led_by_a_driver():
    place = chosen({"KINETIC_ADDRESS": "http://head:8265"}, accelerator="cpu").place
    assert (place.backend, place.address) == ("ray", "http://head:8265")
    assert planned({"KINETIC_ADDRESS": "http://head:8265"}, accelerator="cpu").has_head
    assert place.is_cluster
    assert not place.has_pods


@pytest.mark.parametrize(
    ("accelerator", "shape"),
    [
        ("gpu-h100x8", "2 slices of gpu-h100x8 (2 hosts x 8 GPUs)"),
        ("cpu", "2 slices of cpu (2 hosts x 1 device)"),
        ("tpu-v6e-4", "2 slices of tpu-v6e-4 (2 hosts x 4 chips)"),
    ],
)
def test_what_is_simulated_is_told_in_its_own_words(accelerator, shape):
    notice = chosen(accelerator=accelerator, slices=2).notice
    assert notice == f"kinetic: no cluster configured; simulating {shape} here"


def test_a_single_controller_is_not_a_job_of_one_host():
    for environ, options in (({"KINETIC_BACKEND": "gke"}, {}), ({}, {"backend": "gke"})):
        with pytest.raises(errors.UsageError, match='needs the backend "pathways"'):
            chosen(environ, controller="single", **options)
