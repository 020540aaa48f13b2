"""Builds of images with Cloud Build, through Google's REST interfaces: without a local Docker."""

from __future__ import annotations

import gzip
import hashlib
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from kinetic._backends.kubernetes import images
from kinetic._backends.kubernetes.google_calls import GoogleCalls, ServiceRefused
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, KineticError, PreflightError

POLL_S = 5.0
NOTICE_EVERY_S = 60.0
QUEUE_S = 3600.0
"""Seconds after which Cloud Build drops a build that still waits."""
LAST_LINES = 15
_UNDER_WAY = ("STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING")
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
_NEEDED = ("storage.objects.create", "storage.objects.get")


@dataclass(frozen=True)
class Addresses:
    """The addresses of Google's services.

    Attributes:
        builds: Cloud Build.
        storage: Cloud Storage.
        logs: Cloud Logging.
        repositories: Artifact Registry's own interface.
        registry: the registry of images; "" for the host in an image's name.
    """

    builds: str = "https://cloudbuild.googleapis.com"
    storage: str = "https://storage.googleapis.com"
    logs: str = "https://logging.googleapis.com"
    repositories: str = "https://artifactregistry.googleapis.com"
    registry: str = ""


@dataclass(frozen=True)
class Build:
    """A build of an image.

    Attributes:
        build_id: the build's id in Cloud Build.
        status: the build's status, as Cloud Build names it.
        log_url: the page with the build's log.
        detail: why the build failed; "" if Cloud Build does not say.
    """

    build_id: str
    status: str
    log_url: str = ""
    detail: str = ""

    @property
    def is_under_way(self) -> bool:
        """True until the build has ended."""
        return self.status in _UNDER_WAY

    @property
    def log(self) -> str:
        """The address of the log, or the name of the build."""
        return self.log_url or f"build {self.build_id} in Cloud Build"


class CloudBuild:
    """Builds of one project, in one region."""

    def __init__(
        self,
        project: str,
        region: str,
        *,
        calls: GoogleCalls | None = None,
        addresses: Addresses | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create the object without calling Google.

        Args:
            project, region: the project and the region of the builds.
            calls: calls with a login; by default with the application's default credentials.
            addresses, sleep: replaced by tests.
        """
        self._project, self._region = project, region
        self._at = addresses or Addresses()
        self._sleep = sleep
        self._calls = calls or GoogleCalls()
        self._builds = f"{self._at.builds}/v1/projects/{project}/locations/{region}/builds"

    def has(self, uri: str) -> bool:
        """True if the registry has the image.

        Raises:
            PreflightError: the caller may not read the registry.
            BackendUnavailable: the registry does not answer.
        """
        host, _, rest = uri.partition("/")
        name, _, tag = rest.rpartition(":")
        url = f"{self._at.registry or f'https://{host}'}/v2/{name}/manifests/{tag}"
        return self._calls.call("HEAD", url, accept=_MANIFESTS, allowed=(404,))[0] != 404

    def check(self, uri: str, bucket: str) -> None:
        """Check that the image's repository and the bucket exist, and that the bucket is writable.

        Raises:
            PreflightError: something is missing.
            BackendUnavailable: Google does not answer.
        """
        host, project, repository = (*uri.split("/"), "", "")[:3]
        location = host.removesuffix(images.REGISTRIES)
        path = f"projects/{project}/locations/{location}/repositories/{repository}"
        if location != host and self._read_code(f"{self._at.repositories}/v1/{path}") == 404:
            raise PreflightError(
                f"The repository {repository!r}, which is to hold the image {uri}, does not exist. "
                f"Create it: `gcloud artifacts repositories create {repository} "
                f"--repository-format=docker --location={location} --project={project}`."
            )
        query = urllib.parse.urlencode([("permissions", each) for each in _NEEDED])
        url = f"{self._at.storage}/storage/v1/b/{bucket}/iam/testPermissions?{query}"
        code, answer = self._calls.call("GET", url, allowed=(404,))
        if code == 404:
            raise PreflightError(
                f"The bucket gs://{bucket}, to which files for image builds are uploaded, does not "
                f"exist. Create it: `gcloud storage buckets create gs://{bucket} "
                f"--location={self._region} --project={self._project}`."
            )
        missing = [each for each in _NEEDED if each not in answer.get("permissions", ())]
        if missing:
            raise PreflightError(
                f"You may not upload files for image builds to the bucket gs://{bucket}: you lack "
                f"{' and '.join(missing)}. Ask for roles/storage.objectUser on the bucket."
            )

    def _read_code(self, url: str) -> int:
        """Return the HTTP status of a GET request, also if the request is refused: a user who may
        not read a resource may still be allowed to build."""
        try:
            return self._calls.call("GET", url, allowed=(404,))[0]
        except ServiceRefused as error:
            return error.code

    # -- building ----------------------------------------------------------------------------------

    def newest(self, uri: str) -> Build | None:
        """Return the newest build of an image, by any user; None if there is none."""
        query = {"filter": f'tags="{images.build_tag(uri)}"', "pageSize": "20"}
        _, answer = self._calls.call("GET", f"{self._builds}?{urllib.parse.urlencode(query)}")
        builds = [build for build in answer.get("builds", ()) if uri in build.get("images", ())]
        builds.sort(key=lambda build: str(build.get("createTime", "")))
        return _build(builds[-1]) if builds else None

    def begin(self, uri: str, files: Mapping[str, bytes], bucket: str) -> Build:
        """Begin to build an image.

        Args:
            uri: the name of the image.
            files: the files of the build by path, including a Dockerfile.
            bucket: the bucket for the files.

        Raises:
            PreflightError: the caller may not build the image.
            BackendUnavailable: Google does not answer.
        """
        packed = gzip.compress(images.context(files), mtime=0)
        source = f"source-{hashlib.sha256(packed).hexdigest()[:12]}.tar.gz"
        query = {"uploadType": "media", "name": source, "ifGenerationMatch": "0"}
        url = f"{self._at.storage}/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
        self._calls.call("POST", url, packed, allowed=(412,))  # 412: the object exists already.
        request = images.build_request(uri, bucket, source)
        try:
            _, begun = self._calls.call("POST", self._builds, request, repeats=False)
        except BackendUnavailable:  # The build may have begun nevertheless.
            newest = self.newest(uri)
            if newest is None or not newest.is_under_way:
                raise
            return newest
        return _build(begun.get("metadata", {}).get("build", {}))

    def wait(self, build: Build, on_waiting: Callable[[float], object] = lambda _: None) -> Build:
        """Wait until a build has ended.

        Args:
            build: the build.
            on_waiting: called once a minute with the seconds since the start.

        Raises:
            PreflightError: the build has not ended within its time limit.
            BackendUnavailable: Google does not answer.
        """
        waited_s, noticed_s = 0.0, 0.0
        while build.is_under_way:
            if waited_s > QUEUE_S + images.BUILD_TIMEOUT_S:
                raise PreflightError(
                    f"The image build has not ended within its time limit of {waited_s / 60:.0f} "
                    f"min (log: {build.log})."
                )
            self._sleep(POLL_S)
            waited_s += POLL_S
            if waited_s - noticed_s >= NOTICE_EVERY_S:
                noticed_s = waited_s
                on_waiting(waited_s)
            build = _build(self._calls.call("GET", f"{self._builds}/{build.build_id}")[1])
        return build

    def cancel(self, build: Build) -> bool:
        """Cancel a build; return False if the request failed."""
        try:
            self._calls.call("POST", f"{self._builds}/{build.build_id}:cancel", {})
        except KineticError:
            return False
        return True

    def last_lines(self, build: Build) -> tuple[str, ...]:
        """Return the last lines of a build's log; () if they cannot be read."""
        wanted = f'resource.type="build" AND resource.labels.build_id="{build.build_id}"'
        request = {
            "resourceNames": [f"projects/{self._project}"],
            "filter": wanted,
            "orderBy": "timestamp desc",
            "pageSize": LAST_LINES,
        }
        try:
            _, answer = self._calls.call("POST", f"{self._at.logs}/v2/entries:list", request)
        except KineticError:
            return ()
        lines = [each.get("textPayload", "").rstrip() for each in answer.get("entries", ())]
        return tuple(line for line in reversed(lines) if line)

    def failure(self, uri: str, build: Build) -> PreflightError:
        """Return the error that explains why a build failed."""
        detail = f': "{build.detail}"' if build.detail else ""
        lines = "".join(f"\n  {line}" for line in self.last_lines(build))
        text = f" The last lines of the log:{lines}\nThe whole log" if lines else " The log"
        return PreflightError(
            f"The image {uri} could not be built: the build ended with status "
            f"{build.status}{detail}. {_advice(build.status)}{text}: {build.log}"
        )


def _build(about: Mapping[str, Any]) -> Build:
    detail = about.get("failureInfo", {}).get("detail") or about.get("statusDetail") or ""
    status = about.get("status") or _UNDER_WAY[0]
    return Build(str(about.get("id", "")), status, about.get("logUrl", ""), detail)


def _advice(status: str) -> str:
    return {
        "TIMEOUT": f"A build may take {images.BUILD_TIMEOUT_S // 60} min: require fewer packages, "
        "or packages that have wheels.",
        "EXPIRED": "Cloud Build had no machine for the build within an hour: try again later.",
        "CANCELLED": "Somebody cancelled the build.",
        "INTERNAL_ERROR": "Cloud Build itself failed: try again.",
    }.get(
        status,
        "Change the project's requirements, or remove container_image=: pods then install the "
        "requirements when they start.",
    )
