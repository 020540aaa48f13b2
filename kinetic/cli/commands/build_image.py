"""`kinetic build-image`: images with JAX and kinetic for hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kinetic.cli import output
from kinetic.cli.options import confirm, yes_option
from kinetic.errors import PreflightError, UsageError
from kinetic.version import __version__

if TYPE_CHECKING:
    from kinetic._config.settings import Settings

_CATEGORIES = ("cpu", "gpu", "tpu")
_STDERR = 2

_HELP = """Build the container images for container_image="prebuilt", and push them to a repository.

Each image has JAX for one kind of accelerator and kinetic, in the versions installed on this
machine. Pods with such an image install only the project's own requirements. Docker builds the
images; without Docker, Cloud Build builds them for a repository in Artifact Registry.

\b
Examples:
  kinetic build-image --repo us-docker.pkg.dev/my/images --category tpu
  kinetic build-image --repo ghcr.io/me --dry-run
"""


@click.command(
    "build-image",
    help=_HELP,
    short_help='Build the container images for container_image="prebuilt".',
)
@click.option(
    "--repo", metavar="REPO", help="Repository to push to. [default: KINETIC_BASE_IMAGE_REPO]"
)
@click.option(
    "--category",
    "categories",
    multiple=True,
    type=click.Choice(_CATEGORIES),
    help="Build only for this kind of accelerator. Repeatable.",
)
@click.option(
    "--tag",
    metavar="TAG",
    default=__version__,
    show_default=True,
    help="Tag of the images. Jobs use kinetic's version as the tag.",
)
@click.option(
    "--dockerfile",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Build from this file, with requirements.txt and kinetic.zip in the same folder.",
)
@click.option(
    "--update-credentials",
    is_flag=True,
    help="Configure Docker's login to the repository with gcloud first.",
)
@click.option(
    "--project", metavar="NAME", help="Project for Cloud Build. [default: the repository's]"
)
@click.option("--zone", metavar="NAME", hidden=True)
@click.option(
    "--cluster", metavar="NAME", help="Cluster whose bucket takes the files for Cloud Build."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the Dockerfiles and requirements; build nothing."
)
@yes_option
def build_image(
    *,
    repo: str | None,
    categories: Sequence[str],
    tag: str,
    dockerfile: Path | None,
    update_credentials: bool,
    project: str | None,
    zone: str | None,
    cluster: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Build and push one image for each category."""
    from kinetic._backends.kubernetes import images
    from kinetic._config import settings as configuration

    flags = {"base_image_repo": repo, "project": project, "zone": zone, "cluster": cluster}
    settings = configuration.load(flags=flags)
    place = settings.base_image_repo
    if not place:
        raise UsageError(
            "No repository for the images is configured. Give --repo or set "
            "KINETIC_BASE_IMAGE_REPO, for example to us-docker.pkg.dev/my-project/images."
        )
    text = b"" if dockerfile is None else dockerfile.read_bytes()
    files_by_image = {
        images.prebuilt_image(place, category, tag): _files(category, settings, text)
        for category in dict.fromkeys(categories or _CATEGORIES)
    }
    if dry_run:
        return _show(files_by_image)
    confirm(f"build and push {', '.join(files_by_image)}", yes=yes)
    if update_credentials:
        _run_program("gcloud", "auth", "configure-docker", place.partition("/")[0], "--quiet")
    for uri, files in files_by_image.items():
        if shutil.which("docker"):
            _with_docker(uri, files)
        else:
            _with_cloud_build(uri, files, settings)
        output.line(uri)
    return None


def _files(category: str, settings: Settings, text: bytes) -> dict[str, bytes]:
    from kinetic._backends.kubernetes import images
    from kinetic._source import installation

    installed = installation.of_base(category, cache_dir=settings.cache_dir)
    return images.files(
        images.slim_image(f"{sys.version_info.major}.{sys.version_info.minor}"),
        requirements=installed.contents[installed.requirements.digest],
        runtime=installed.contents[installed.runtime.digest],
        text=text,
    )


def _show(files_by_image: Mapping[str, Mapping[str, bytes]]) -> None:
    for uri, files in files_by_image.items():
        output.line(f"# {uri}")
        output.line(files["Dockerfile"].decode(errors="replace").rstrip())
        output.line("# requirements.txt:")
        for line in files["requirements.txt"].decode().splitlines():
            output.line(f"#   {line}")
        output.line()


def _with_docker(uri: str, files: Mapping[str, bytes]) -> None:
    output.notice(f"kinetic: building {uri}")
    with tempfile.TemporaryDirectory(prefix="kinetic-image-") as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        _run_program("docker", "build", "--tag", uri, folder)
    _run_program("docker", "push", uri)


def _run_program(*command: str) -> None:
    """Run a program with its output on stderr, because it is not this command's result."""
    try:
        process = subprocess.run(command, stdout=_STDERR, check=False)
    except OSError as error:
        raise PreflightError(
            f"{command[0]} cannot be run: {error.strerror}. Install it."
        ) from error
    if process.returncode:
        raise PreflightError(
            f"`{' '.join(command)}` failed with exit code {process.returncode}. See its output "
            "above."
        )


def _with_cloud_build(uri: str, files: Mapping[str, bytes], settings: Settings) -> None:
    from kinetic._backends.kubernetes import image_builds, images
    from kinetic._backends.kubernetes.cloud_build import CloudBuild

    host, _, rest = uri.partition("/")
    location = host.removesuffix(images.REGISTRIES)
    if location == host or not settings.cluster:
        raise PreflightError(
            f"docker is not installed, so {uri} cannot be built on this machine. Install it; or, "
            "for Cloud Build, give --cluster and a repository in Artifact Registry "
            f"(REGION{images.REGISTRIES}/PROJECT/NAME)."
        )
    project = settings.project or rest.partition("/")[0]
    builds = CloudBuild(project, location if "-" in location else "global")
    bucket = f"{project}-kn-{settings.cluster}-builds"
    image_builds.build_one(builds, uri, files, bucket, lambda t: output.notice(f"kinetic: {t}"))
