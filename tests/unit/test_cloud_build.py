"""The calls to Cloud Build, against a double that answers as Google's documentation says."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest
from google_services import LOG, Google, calls, path_of

from kinetic._backends.kubernetes import images
from kinetic._backends.kubernetes.cloud_build import CloudBuild
from kinetic.errors import BackendUnavailable, PreflightError

URI = "us-central1-docker.pkg.dev/p/kn-c/base:tpu-0123"
FILES = {"Dockerfile": b"FROM x\n", "requirements.txt": b"numpy\n"}
BUILDS = "/v1/projects/p/locations/us-central1/builds"


@pytest.fixture
def google():
    service = Google()
    yield service
    service.close()


@pytest.fixture
def waited():
    return []


@pytest.fixture
def builds(google, waited):
    return CloudBuild(
        "p", "us-central1", calls=calls(), addresses=google.addresses, sleep=waited.append
    )


def test_an_image_is_built(google, builds, waited):
    build = builds.begin(URI, FILES, "p-kn-c-builds")
    assert (build.build_id, build.status, build.log_url) == ("b1", "QUEUED", f"{LOG}b1")
    assert builds.wait(build).status == "SUCCESS"
    (((bucket, name), sent),) = google.objects.items()
    (request,) = google.requests
    assert request["images"] == [URI]
    assert request["source"]["storageSource"] == {"bucket": bucket, "object": name}
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(sent))) as archive:
        assert sorted(archive.getnames()) == sorted(FILES)
    assert google.paths() == [
        "/upload/storage/v1/b/p-kn-c-builds/o",
        BUILDS,
        f"{BUILDS}/b1",
        f"{BUILDS}/b1",
    ]
    assert {proof for *_, proof in google.calls} == {"Bearer t0"}
    assert waited == [5.0, 5.0]
    assert builds.has(URI)


def test_the_same_files_are_sent_once(google, builds):
    for _ in range(2):
        builds.begin(URI, FILES, "b")
    assert len(google.objects) == 1
    assert google.requests[0] == google.requests[1]


def test_the_newest_build_of_an_image(google, builds):
    assert builds.newest(URI) is None
    builds.begin(URI.replace("kn-c", "kn-d"), FILES, "b")
    assert builds.newest(URI) is None
    builds.begin(URI, FILES, "b")
    builds.begin(URI, FILES, "b")
    assert builds.newest(URI).build_id == "b3"


def test_a_build_that_fails_shows_the_end_of_its_log(google, builds):
    google.states = ["QUEUED", "FAILURE"]
    google.log = [f"line {number}" for number in range(40)] + ["no such package"]
    build = builds.wait(builds.begin(URI, FILES, "b"))
    message = str(builds.failure(URI, build))
    assert 'FAILURE: "step 0 exited with 1". Change the project\'s requirements' in message
    assert "\n  line 39\n  no such package\n" in message
    assert "line 20" not in message
    assert message.endswith(f"{LOG}b1")


@pytest.mark.parametrize(
    ("status", "advice"), [("TIMEOUT", "20 min"), ("EXPIRED", "try again later")]
)
def test_a_build_that_did_not_succeed_says_its_status_its_log_and_what_to_do(
    google, builds, status, advice
):
    google.states = [status]
    google.refusals = {"/v2/entries": (403, {})}
    message = str(builds.failure(URI, builds.wait(builds.begin(URI, FILES, "b"))))
    assert status in message
    assert advice in message
    assert f"The log: {LOG}b1" in message


def test_a_build_that_never_ends_is_given_up(google, builds, waited):
    google.states = ["WORKING"]
    cancelled = []
    with pytest.raises(PreflightError, match="within its time limit of 80 min"):
        builds.wait(builds.begin(URI, FILES, "b"), cancelled.append)
    assert cancelled == [60.0 * number for number in range(1, 81)]


def test_has_says_if_the_registry_has_an_image(google, builds):
    assert not builds.has(URI)
    google.images.add(path_of(URI))
    assert builds.has(URI)
    assert google.calls[-1][2] == "Bearer t0"


def test_requests_are_repeated_while_the_service_is_busy(google, builds):
    google.trouble = [(503, {}), (429, {}, {"Retry-After": "0"}), (429, {})]
    assert not builds.has(URI)
    assert len(google.calls) == 4


def test_a_service_that_stays_busy_is_an_error_after_five_requests(google, builds):
    google.trouble = [(503, {})] * 9
    with pytest.raises(BackendUnavailable, match="does not answer"):
        builds.has(URI)
    assert len(google.calls) == 5


def test_a_registry_that_is_out_of_reach(google, builds):
    google.server.server_close()
    with pytest.raises(BackendUnavailable, match="does not answer"):
        builds.has(URI)


def test_a_build_is_begun_once_at_most(google, builds):
    google.trouble = [(200, {}), (503, {})]
    with pytest.raises(BackendUnavailable):
        builds.begin(URI, FILES, "b")
    assert len(google.build_posts()) == 1


def test_a_build_whose_answer_was_lost_is_found(google, builds):
    tags = ["kinetic", images.build_tag(URI)]
    google.builds.append({"id": "b1", "status": "QUEUED", "images": [URI], "tags": tags})
    google.trouble = [(200, {}), (503, {})]
    assert builds.begin(URI, FILES, "b").build_id == "b1"


def test_a_build_that_was_turned_away_is_asked_for_again(google, builds):
    google.trouble = [(200, {}), (429, {})]
    assert builds.begin(URI, FILES, "b").build_id == "b1"
    assert len(google.build_posts()) == 2


@pytest.mark.parametrize(
    ("code", "advice"), [(401, "gcloud auth"), (403, "cloudbuild.builds.editor"), (404, "enabled")]
)
def test_a_refused_build_says_what_to_do(google, builds, code, advice):
    google.refusals = {"/": (code, {"error": {"message": "no such thing"}})}
    with pytest.raises(PreflightError, match="no such thing") as caught:
        builds.begin(URI, FILES, "b")
    assert advice in str(caught.value)
    assert len(google.calls) == (3 if code == 401 else 1)  # 401: again with two new tokens


def test_a_token_that_expires_is_renewed(google, builds):
    build = builds.begin(URI, FILES, "b")
    google.tokens = {"Bearer t1"}
    assert builds.wait(build).status == "SUCCESS"


# -- before anything is sent -----------------------------------------------------------------------


def test_check_asks_for_the_repository_and_the_rights_on_the_bucket(google, builds):
    builds.check(URI, "b")
    assert google.paths() == [
        "/v1/projects/p/locations/us-central1/repositories/kn-c",
        "/storage/v1/b/b/iam/testPermissions",
    ]


@pytest.mark.parametrize(
    ("refusals", "permissions", "message"),
    [
        ({"/v1/projects/p/locations/us-central1/repo": (404, {})}, ["x"], "repositories create"),
        ({"/storage": (404, {})}, [], "gcloud storage buckets create gs://b"),
        ({}, ["storage.objects.get"], "bucket gs://b: you lack storage.objects.create"),
        ({"/storage": (403, {})}, [], "storage.objectUser"),
    ],
)
def test_check_names_a_missing_repository_bucket_or_right(
    google, builds, refusals, permissions, message
):
    google.refusals, google.permissions = refusals, permissions
    with pytest.raises(PreflightError, match=message):
        builds.check(URI, "b")
    assert not google.objects


def test_a_repository_that_may_not_be_looked_at_may_be_there(google, builds):
    google.refusals = {"/v1/projects/p/locations/us-central1/repo": (403, {})}
    builds.check(URI, "b")
