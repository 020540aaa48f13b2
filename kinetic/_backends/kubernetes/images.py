"""The images of pods: their names, the files of their builds, the variables of their bootstrap.

In: a plan. Out: names of images, the files of a build, the request to Cloud Build. Pure.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import tarfile
from collections.abc import Mapping

from kinetic._backends.base import Document
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic.errors import UsageError

BUILD_TIMEOUT_S = 1200
REGISTRIES = "-docker.pkg.dev"
"""The end of Artifact Registry's host names, which begin with a location."""
_BUILDER = "gcr.io/cloud-builders/docker"
_HOME = "/opt/kinetic"
_NAME = re.compile("[a-z][a-z0-9-]*")
_TEMPLATE = 1
"""The version of the generated Dockerfile; increase it with each change, so that tags change."""


def image_of(plan: Plan) -> str:
    """Return the image of a plan's pods.

    Raises:
        UsageError: a setting that the image's name needs is missing.
    """
    place = plan.place
    if place.image == "bundled":
        return f"{_registry(plan)}/base:{tag(plan)}"
    if place.image == "prebuilt":
        if not place.image_repo:
            raise UsageError(
                'container_image="prebuilt" needs the repository to which `kinetic build-image` '
                "pushed the images: set base_image_repo= or KINETIC_BASE_IMAGE_REPO."
            )
        return prebuilt_image(place.image_repo, plan.topology.kind, plan.versions.kinetic)
    return place.image or slim_image(plan.versions.python)


def slim_image(python: str) -> str:
    """Return the public image with a version of Python, such as "3.12", and nothing else."""
    return f"python:{python}-slim"


def prebuilt_image(repo: str, category: str, tag: str) -> str:
    """Return the name of the image that `kinetic build-image` pushes for a category."""
    return f"{repo.rstrip('/')}/base-{category}:{tag}"


def tag(plan: Plan) -> str:
    """Return the tag of a bundled image: the same for the same content."""
    assert plan.requirements is not None
    about = (str(_TEMPLATE), slim_image(plan.versions.python), plan.requirements.digest)
    return f"{plan.topology.kind}-{hashlib.sha256('/'.join(about).encode()).hexdigest()[:12]}"


def region(zone: str) -> str:
    """Return the region of a zone: "us-central1" of "us-central1-a"."""
    name, _, letter = zone.rpartition("-")
    return name if name and len(letter) == 1 else zone


def _registry(plan: Plan) -> str:
    place = plan.place
    missing = [name for name in ("project", "zone", "cluster") if not getattr(place, name)]
    advice = f"remove container_image: pods then start from {slim_image(plan.versions.python)}."
    if missing:
        raise UsageError(
            f'container_image="bundled" needs {missing[0]}=, a part of the address of the image '
            f"registry. Set {missing[0]}=, or {advice}"
        )
    if not _NAME.fullmatch(place.cluster):
        raise UsageError(
            f'container_image="bundled" needs an image registry named after the cluster, but '
            f"{place.cluster!r} cannot name one. Set cluster= to the name in GKE, or {advice}"
        )
    return registry(place)


def registry(place: Place) -> str:
    """Return the registry of built images."""
    return f"{region(place.zone)}{REGISTRIES}/{place.project}/kn-{place.cluster}"


def bucket(place: Place) -> str:
    """Return the Cloud Storage bucket that gets the files for builds."""
    return f"{place.project}-kn-{place.cluster}-builds"


def build_tag(uri: str) -> str:
    """Return the tag of an image's builds in Cloud Build, by which they are listed."""
    return f"kinetic-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def variables(plan: Plan) -> dict[str, str]:
    """Return the environment variables of a pod's bootstrap program, `_host.bootstrap`."""
    blobs = {"KINETIC_RUNTIME": plan.runtime, "KINETIC_REQUIREMENTS": plan.requirements}
    return {name: blob.digest for name, blob in blobs.items() if blob is not None}


# -- building --------------------------------------------------------------------------------------


def dockerfile(base: str, *, requirements: str, options: str = "", runtime: str = "") -> str:
    """Return the text of a Dockerfile.

    Args:
        base: the image to start from.
        requirements: the SHA-256 of requirements.txt.
        options: further options of uv.
        runtime: the SHA-256 of kinetic.zip; "" for none.
    """
    lines = [
        f"FROM {base}",
        'RUN pip install --no-cache-dir "uv>=0.5"',
        f"COPY requirements.txt {_HOME}/requirements.txt",
        f"RUN uv pip install --system --no-cache{options} -r {_HOME}/requirements.txt",
        f"ENV KINETIC_IMAGE_REQUIREMENTS={requirements}",
    ]
    if runtime:
        path = "import site; open(site.getsitepackages()[0] + '/kinetic.pth', 'w')"
        lines += [
            f"COPY kinetic.zip {_HOME}/kinetic.zip",
            f"RUN python -m zipfile -e {_HOME}/kinetic.zip {_HOME}/runtime \\",
            f" && python -c \"{path}.write('{_HOME}/runtime')\"",
            f"ENV KINETIC_IMAGE_RUNTIME={runtime}",
        ]
    return "\n".join(lines) + "\n"


def files(
    base: str, *, requirements: bytes, runtime: bytes = b"", text: bytes = b""
) -> dict[str, bytes]:
    """Return the files that an image is built from.

    Args:
        base: the image to start from.
        requirements: a requirements.txt.
        runtime: kinetic's archive; b"" for none.
        text: a Dockerfile to use instead of the generated one.
    """
    about = {
        "requirements": hashlib.sha256(requirements).hexdigest(),
        "options": _uv_options(requirements.decode()),
        "runtime": hashlib.sha256(runtime).hexdigest() if runtime else "",
    }
    build = {
        "Dockerfile": text or dockerfile(base, **about).encode(),
        "requirements.txt": requirements,
    }
    return build | ({"kinetic.zip": runtime} if runtime else {})


def _uv_options(requirements: str) -> str:
    """Return the options in a requirements.txt that uv accepts only on its command line."""
    options = " --prerelease=allow" if re.search(r"(?m)^--pre$", requirements) else ""
    hosts = re.findall(r"(?m)^--trusted-host (\S+)", requirements)
    return options + "".join(f" --allow-insecure-host={shlex.quote(host)}" for host in hosts)


def context(files: Mapping[str, bytes]) -> bytes:
    """Return the files of a build as a tar archive; the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(files[name]), 0o644
            archive.addfile(about, io.BytesIO(files[name]))
    return buffer.getvalue()


def build_request(uri: str, bucket: str, source: str) -> Document:
    """Return the request to build an image from a .tar.gz with a Dockerfile in a bucket; see
    https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds."""
    return {
        "source": {"storageSource": {"bucket": bucket, "object": source}},
        "steps": [{"name": _BUILDER, "args": ["build", "--tag", uri, "."]}],
        "images": [uri],
        "timeout": f"{BUILD_TIMEOUT_S}s",
        "options": {"logging": "CLOUD_LOGGING_ONLY"},
        "tags": ["kinetic", build_tag(uri)],
    }
