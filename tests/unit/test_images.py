"""Images of pods: which image a plan gets, and what the images built by kinetic contain."""

from __future__ import annotations

import dataclasses
import io
import tarfile

import pytest
from laptop_fakes import plan

from kinetic._backends.kubernetes import images
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Versions
from kinetic.errors import UsageError

CLUSTER = {"cluster": "c", "project": "p", "zone": "us-central1-a"}


def made(accelerator="tpu-v6e-8", digest="a" * 64, python="3.12", **place):
    return plan(
        place=Place("gke", **place),
        accelerator=accelerator,
        versions=Versions(python, "3.1.2", "0.2.0"),
        runtime=Blob("b" * 64, 1),
        requirements=Blob(digest, 1),
    )


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ({}, "python:3.12-slim"),
        ({"image": "ghcr.io/me/it:1"}, "ghcr.io/me/it:1"),
        ({"image": "prebuilt", "image_repo": "ghcr.io/me/"}, "ghcr.io/me/base-tpu:0.2.0"),
    ],
)
def test_which_image(place, uri):
    assert images.image_of(made(**place)) == uri


def test_a_bundled_image_is_named_for_its_content():
    image = images.image_of(made(image="bundled", **CLUSTER))
    registry, _, tag = image.partition(":")
    assert registry == "us-central1-docker.pkg.dev/p/kn-c/base"
    assert tag.startswith("tpu-")
    assert len(tag) == len("tpu-") + 12
    other_job = dataclasses.replace(made(image="bundled", **CLUSTER), job_id="job-00000009")
    assert images.image_of(other_job) == image
    tags = {
        images.tag(each)
        for each in (made(), made(digest="c" * 64), made("gpu-l4"), made(python="3.11"))
    }
    assert len(tags) == 4


@pytest.mark.parametrize("missing", CLUSTER)
def test_a_bundled_image_needs_a_registry(missing):
    rest = {name: value for name, value in CLUSTER.items() if name != missing}
    with pytest.raises(UsageError, match=f"needs {missing}="):
        images.image_of(made(image="bundled", **rest))


def test_prebuilt_images_lie_nowhere_by_default():
    with pytest.raises(UsageError, match="KINETIC_BASE_IMAGE_REPO"):
        images.image_of(made(image="prebuilt"))


def test_the_bootstrap_is_told_what_to_fetch():
    variables = {"KINETIC_RUNTIME": "b" * 64, "KINETIC_REQUIREMENTS": "a" * 64}
    assert images.variables(made()) == variables
    assert images.variables(plan()) == {}


def test_a_dockerfile():
    text = images.dockerfile("python:3.12-slim", requirements="a" * 64, runtime="b" * 64)
    assert text.splitlines() == [
        "FROM python:3.12-slim",
        'RUN pip install --no-cache-dir "uv>=0.5"',
        "COPY requirements.txt /opt/kinetic/requirements.txt",
        "RUN uv pip install --system --no-cache -r /opt/kinetic/requirements.txt",
        f"ENV KINETIC_IMAGE_REQUIREMENTS={'a' * 64}",
        "COPY kinetic.zip /opt/kinetic/kinetic.zip",
        "RUN python -m zipfile -e /opt/kinetic/kinetic.zip /opt/kinetic/runtime \\",
        " && python -c \"import site; open(site.getsitepackages()[0] + '/kinetic.pth', 'w')"
        ".write('/opt/kinetic/runtime')\"",
        f"ENV KINETIC_IMAGE_RUNTIME={'b' * 64}",
    ]
    assert "kinetic.zip" not in images.dockerfile("x", requirements="a" * 64)


def test_a_dockerfile_gives_uv_the_options_that_it_does_not_read_in_a_list():
    listed = b"--pre\n--prefer-binary\n--trusted-host one.example\nnumpy\n"
    text = images.files("x", requirements=listed)["Dockerfile"].decode()
    options = "--prerelease=allow --allow-insecure-host=one.example"
    assert f"RUN uv pip install --system --no-cache {options} -r /opt" in text


def test_the_files_of_a_build_are_the_same_bytes_each_time():
    files = {"b": b"2", "a": b"1"}
    packed = images.context(files)
    assert packed == images.context(dict(sorted(files.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["a", "b"]
        assert archive.extractfile("b").read() == b"2"


def test_what_cloud_build_is_asked_for():
    assert images.build_request("host/p/r/base:tpu-1", "builds", "source-1.tar.gz") == {
        "source": {"storageSource": {"bucket": "builds", "object": "source-1.tar.gz"}},
        "steps": [
            {
                "name": "gcr.io/cloud-builders/docker",
                "args": ["build", "--tag", "host/p/r/base:tpu-1", "."],
            }
        ],
        "images": ["host/p/r/base:tpu-1"],
        "timeout": "1200s",
        "options": {"logging": "CLOUD_LOGGING_ONLY"},
        "tags": ["kinetic", images.build_tag("host/p/r/base:tpu-1")],
    }


@pytest.mark.parametrize(
    ("zone", "region"), [("us-central1-a", "us-central1"), ("europe-west4", "europe-west4")]
)
def test_the_region_of_a_zone(zone, region):
    assert images.region(zone) == region
