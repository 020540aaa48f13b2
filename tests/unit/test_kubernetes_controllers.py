"""What the doctor finds out about JobSet and Kueue, from what a cluster answers."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic._backends.kubernetes import controllers
from kinetic._backends.kubernetes.controllers import JobSets, Queues
from kinetic._backends.kubernetes.errors import Forbidden, Refused
from kinetic._backends.kubernetes.resources import JOBSETS, LOCAL_QUEUES, QUEUE_WORKLOADS, Resource
from kinetic.errors import BackendUnavailable, NotFound

PATTERNS = "onJobFailureMessagePatterns"


class FakeApi:
    server, namespace = "https://c", "ml"

    def __init__(
        self,
        *known: Resource,
        images: dict[str, str] | None = None,
        queue: object = None,
        create: BaseException | None = None,
        unknown_field: str = "",
    ) -> None:
        self.known, self.images, self.queue = known, images or {}, queue
        self.error, self.unknown_field = create, unknown_field
        self.tried: list[dict[str, Any]] = []

    def knows(self, resource: Resource) -> bool:
        return resource in self.known

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> dict[str, Any]:
        if resource.plural == "deployments":
            if namespace not in self.images:
                raise Forbidden("You may not get deployments.")
            container = {"image": self.images[namespace]}
            return {"spec": {"template": {"spec": {"containers": [container]}}}}
        assert resource in LOCAL_QUEUES
        assert resource.version == self.known[-1].version
        if isinstance(self.queue, BaseException):
            raise self.queue
        assert isinstance(self.queue, dict)
        return self.queue

    def create(
        self, resource: Resource, document: dict[str, Any], *, dry_run: bool
    ) -> dict[str, Any]:
        assert dry_run
        assert resource is JOBSETS
        self.tried.append(document)
        if self.error is not None:
            raise self.error
        if self.unknown_field and self.unknown_field in str(document):
            raise Refused(f'The cluster says: unknown field "{self.unknown_field}".')
        return document | {"spec": document["spec"] | {"successPolicy": {"operator": "All"}}}


def asked(*known: Resource, **settings: Any) -> JobSets:
    return controllers.jobsets(FakeApi(*known, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("registry.k8s.io/jobset/jobset:v0.12.0", "0.12.0"),
        ("example.com:5000/jobset:v0.9.1-gke.3", "0.9.1-gke.3"),
        (f"registry.k8s.io/jobset/jobset:v0.10.1@sha256:{'0' * 64}", "0.10.1"),
        (f"example.com:5000/jobset@sha256:{'0' * 64}", ""),
        ("example.com/jobset:main", ""),
    ],
)
def test_the_version_is_that_of_the_image(image: str, version: str) -> None:
    found = asked(JOBSETS, images={"jobset-system": image})
    assert found == JobSets(True, version)


def test_the_version_is_unknown_to_who_may_not_look() -> None:
    assert asked(JOBSETS) == JobSets(True)


def test_jobset_is_not_installed() -> None:
    assert asked() == JobSets()


def test_an_old_one_takes_jobsets_without_messages() -> None:
    assert asked(JOBSETS, unknown_field=PATTERNS) == JobSets(True, is_old=True)


def test_one_that_takes_neither_says_why() -> None:
    found = asked(JOBSETS, unknown_field="coordinator")
    assert "coordinator" in found.fault
    assert not found.is_old


@pytest.mark.parametrize("error", [Refused("No."), BackendUnavailable("No.")])
def test_one_that_refuses_says_why(error: BaseException) -> None:
    assert asked(JOBSETS, create=error) == JobSets(True, fault="No.")


def test_rights_are_no_fault_of_jobset() -> None:
    assert asked(JOBSETS, create=Forbidden("You may not.")) == JobSets(True)


def test_a_jobset_of_two_hosts_is_tried() -> None:
    api = FakeApi(JOBSETS)
    controllers.jobsets(api)  # type: ignore[arg-type]
    (tried,) = api.tried
    assert tried["kind"] == "JobSet"
    assert PATTERNS in str(tried)


@pytest.mark.parametrize("workloads", QUEUE_WORKLOADS)
@pytest.mark.parametrize(
    ("queue", "found"),
    [
        ({}, Queues(True, "", "team-a", True)),
        (
            {"status": {"conditions": [{"type": "Active", "status": "True"}]}},
            Queues(True, "", "team-a", True),
        ),
        (
            {"status": {"conditions": [{"type": "Active", "status": "False", "message": "Off."}]}},
            Queues(True, "", "team-a", True, "Off"),
        ),
        (NotFound("There is none."), Queues(True, "", "team-a", False)),
        (Forbidden("You may not."), Queues(True, "", "team-a")),
    ],
)
def test_a_queue(workloads: Resource, queue: object, found: Queues) -> None:
    api: Any = FakeApi(workloads, queue=queue)
    assert controllers.queues(api, "team-a") == found


def test_no_queue_is_named() -> None:
    images = {"kueue-system": "registry.k8s.io/kueue/kueue:v0.13.2"}
    api: Any = FakeApi(QUEUE_WORKLOADS[0], images=images)
    assert controllers.queues(api, "") == Queues(True, "0.13.2")
    nothing: Any = FakeApi()
    assert controllers.queues(nothing, "team-a") == Queues(queue="team-a")
