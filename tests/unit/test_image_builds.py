"""Choosing and building a job's image, against a double of Google's services."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from doubles.memory_store import MemoryStore
from google_services import LOG, Google, calls, path_of
from laptop_fakes import plan

from kinetic._backends.kubernetes import images
from kinetic._backends.kubernetes.backend import KubernetesBackend
from kinetic._backends.kubernetes.cloud_build import CloudBuild
from kinetic._backends.kubernetes.image_builds import BundledImages
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Versions
from kinetic.errors import BackendUnavailable, PreflightError, UsageError

CLUSTER = {"cluster": "c", "project": "p", "zone": "us-central1-a"}
INSTALLED = {"a" * 64: b"numpy\n", "b" * 64: b"PK"}


def made(image="bundled", **changes):
    return dataclasses.replace(
        plan(
            place=Place("gke", image=image, **CLUSTER),
            versions=Versions("3.12", "3.1.2", "0.2.0"),
            runtime=Blob("b" * 64, 2),
            requirements=Blob("a" * 64, 6),
        ),
        **changes,
    )


URI = images.image_of(made())


class Caller:
    """A process that submits jobs; it records the notices and the pauses in seconds."""

    def __init__(self, google):
        self.notices, self.waited, self.google = [], [], google
        self.sleep = self.waited.append
        self.images = BundledImages(self.open)

    def open(self, project, region):
        assert (project, region) == ("p", "us-central1")
        at = self.google.addresses
        return CloudBuild(project, region, calls=calls(), addresses=at, sleep=self.pause)

    def pause(self, seconds):
        self.sleep(seconds)

    def choose(self, about):
        return self.images.choose(about, INSTALLED, self.notices.append).place.image


@pytest.fixture
def google():
    double = Google()
    yield double
    double.close()


@pytest.fixture
def caller(google):
    return Caller(google)


# -- "bundled" -------------------------------------------------------------------------------------


def test_an_image_that_is_there_is_used(google, caller):
    google.images.add(path_of(URI))
    for _ in range(3):
        assert caller.choose(made()) == "bundled"
    assert (len(google.calls), caller.notices) == (1, [])


def test_an_image_that_is_missing_is_built_first(google, caller):
    for _ in range(3):
        assert caller.choose(made()) == "bundled"
    (request,) = google.requests
    assert request["images"] == [URI]
    first, last = caller.notices
    assert f"building the image {URI}" in first
    assert f"{LOG}b1" in first
    assert last == "the image is built"
    calls = google.paths()
    check = next(n for n, path in enumerate(calls) if path.endswith("testPermissions"))
    assert check < next(n for n, path in enumerate(calls) if path.startswith("/upload"))


def test_the_time_of_a_build_does_not_count_as_a_wait_for_the_cluster(google, caller):
    about = made(created_at=1.0)
    after = BundledImages(caller.open, clock=lambda: 900.0)
    assert after.choose(about, INSTALLED, caller.notices.append).created_at == 900.0
    assert after.choose(about, INSTALLED, caller.notices.append).created_at == 1.0


def test_a_long_build_is_spoken_of_once_a_minute(google, caller):
    google.states = ["WORKING"] * 30 + ["SUCCESS"]
    caller.choose(made())
    assert caller.notices[1:-1] == [f"the image is still being built ({n} min)" for n in (1, 2)]


def test_a_build_that_fails(google, caller):
    google.states = ["WORKING", "FAILURE"]
    with pytest.raises(PreflightError, match="no such package: frobnicate"):
        caller.choose(made())
    google.states = ["SUCCESS"]
    assert caller.choose(made()) == "bundled"


@pytest.mark.parametrize("code", [403, 404])
def test_missing_rights_are_said_before_anything_is_sent(google, caller, code):
    google.refusals = {"/storage/": (code, {"error": {"message": "no"}})}
    with pytest.raises(PreflightError, match="builds"):
        caller.choose(made())
    assert not google.objects
    assert not google.build_posts()


def test_google_does_not_answer_while_it_builds(google, caller):
    def sleep(_):
        google.trouble = [(503, {})] * 5

    caller.sleep = sleep
    with pytest.raises(BackendUnavailable, match="the next call waits for it"):
        caller.choose(made())
    caller.sleep = caller.waited.append
    google.trouble = []
    assert caller.choose(made()) == "bundled"
    assert len(google.build_posts()) == 1


def test_ctrl_c_cancels_an_own_build(google, caller):
    def sleep(_):
        raise KeyboardInterrupt

    caller.sleep = sleep
    with pytest.raises(KeyboardInterrupt):
        caller.choose(made())
    assert google.builds[0]["status"] == "CANCELLED"
    assert caller.notices[-1] == "the build was cancelled"


def test_a_second_caller_waits_for_the_first_ones_build(google, caller):
    google.states = ["WORKING"] * 3 + ["SUCCESS"]
    caller.open("p", "us-central1").begin(URI, {"Dockerfile": b""}, "p-kn-c-builds")
    assert caller.choose(made()) == "bundled"
    assert len(google.build_posts()) == 1
    assert "is already being built" in caller.notices[0]


def test_ctrl_c_leaves_the_build_of_another_caller(google, caller):
    caller.open("p", "us-central1").begin(URI, {"Dockerfile": b""}, "p-kn-c-builds")

    def sleep(_):
        raise KeyboardInterrupt

    caller.sleep = sleep
    with pytest.raises(KeyboardInterrupt):
        caller.choose(made())
    assert google.builds[0]["status"] == "QUEUED"


def test_a_build_that_another_caller_has_cancelled_is_begun_anew(google, caller):
    other = caller.open("p", "us-central1")
    build = other.begin(URI, {"Dockerfile": b""}, "p-kn-c-builds")

    def sleep(_):
        caller.sleep = caller.waited.append
        other.cancel(build)

    caller.sleep = sleep
    assert caller.choose(made()) == "bundled"
    assert len(google.build_posts()) == 2


def test_threads_of_one_caller_build_once(google, caller):
    threads = [threading.Thread(target=caller.choose, args=(made(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(google.build_posts()) == 1


def test_a_cluster_whose_name_no_registry_can_have():
    with pytest.raises(UsageError, match=r"'10\.0\.0\.1' cannot name one"):
        images.image_of(
            made(place=Place("gke", image="bundled", **CLUSTER | {"cluster": "10.0.0.1"}))
        )


def test_pods_that_install_nothing_need_no_image(google, caller):
    assert caller.choose(made(requirements=None)) == "bundled"
    assert google.calls == []


@pytest.mark.parametrize("image", ["", "prebuilt", "ghcr.io/me/it:1"])
def test_another_image_is_left_alone(google, caller, image):
    assert caller.choose(made(image)) == image
    assert google.calls == []


# -- in the pods -----------------------------------------------------------------------------------


class Pods:
    """A backend of the caller; `image` returns the image of the pods that it renders."""

    def __init__(self, caller):
        settings = PodSettings(image="", store_uri="gs://b", bootstrap="print()")
        store = MemoryStore("memory://pods")
        self.backend = KubernetesBackend(
            "gke", store, settings, self.cluster, supply=lambda: caller.images
        )

    def cluster(self):
        raise AssertionError("a dry run asks no cluster")

    def image(self, about):
        job, _ = self.backend.render(about)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env["KINETIC_REQUIREMENTS"] == "a" * 64
        return container["image"]


ONE_HOST = Options(resolve("cpu"))


def test_a_dry_run_names_the_image_and_asks_nobody(google, caller):
    about = made(options=ONE_HOST)
    assert Pods(caller).image(about) == images.image_of(about)
    assert google.calls == []


def test_pods_start_from_a_public_image_if_none_is_named(google, caller):
    pods, about = Pods(caller), made("", options=ONE_HOST)
    google.images.add(path_of(images.image_of(made(options=ONE_HOST))))
    assert pods.backend.choose_image(about, INSTALLED, caller.notices.append) is about
    assert pods.image(about) == "python:3.12-slim"
    assert google.calls == []
