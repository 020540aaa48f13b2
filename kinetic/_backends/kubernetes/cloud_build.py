"""Cloud Build: makes images where no Docker is, and says whether they are there already.

In: names of images, files of a build, a token. Out: nothing, once the image is in its registry; or
an error. Only Google's REST interfaces are used.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from kinetic._backends.kubernetes import images
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, PreflightError

POLL_S = 5.0
_TRIES = 5
_REQUEST_S = 60.0
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)


@dataclass(frozen=True)
class Addresses:
    """Where Google's services are.

    Attributes:
        builds: Cloud Build.
        storage: Cloud Storage.
        registry: of Artifact Registry; "" for the host in an image's name.
    """

    builds: str = "https://cloudbuild.googleapis.com"
    storage: str = "https://storage.googleapis.com"
    registry: str = ""


class CloudBuild:
    """Builds of one project, in one region."""

    def __init__(
        self,
        project: str,
        region: str,
        *,
        authorization: Callable[[], str],
        addresses: Addresses | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Call nothing yet.

        Args:
            project, region: where to build.
            authorization: returns the value of the header: "Bearer " and a token.
            addresses: for tests.
            sleep: for tests.
        """
        self._builds = f"v1/projects/{project}/locations/{region}/builds"
        self._authorization = authorization
        self._at = addresses or Addresses()
        self._sleep = sleep

    def has(self, uri: str) -> bool:
        """Return whether the registry has the image.

        Raises:
            PreflightError: it may not be read.
            BackendUnavailable: the registry does not answer.
        """
        host, _, rest = uri.partition("/")
        name, _, tag = rest.rpartition(":")
        url = f"{self._at.registry or f'https://{host}'}/v2/{name}/manifests/{tag}"
        token = self._authorization().removeprefix("Bearer ")
        basic = base64.b64encode(f"oauth2accesstoken:{token}".encode()).decode()
        headers = {"Authorization": f"Basic {basic}", "Accept": _MANIFESTS}
        code, _ = self._call("HEAD", url, headers=headers, allowed=(404,))
        return code != 404

    def build(
        self,
        uri: str,
        files: Mapping[str, bytes],
        bucket: str,
        *,
        on_log: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Build an image and put it into its registry; return when it is there.

        Args:
            uri: of the image.
            files: among them a Dockerfile.
            bucket: takes the files.
            on_log: gets the address of the build's log.

        Raises:
            PreflightError: it may not be built, or its build has failed.
            BackendUnavailable: Google does not answer.
        """
        source = self._upload(bucket, gzip.compress(images.context(files), mtime=0))
        request = images.build_request(uri, bucket, source)
        _, begun = self._call("POST", f"{self._at.builds}/{self._builds}", request)
        about = begun.get("metadata", {}).get("build", {})
        if about.get("logUrl"):
            on_log(about["logUrl"])
        while about.get("status") in (None, "PENDING", "QUEUED", "WORKING"):
            self._sleep(POLL_S)
            _, about = self._call("GET", f"{self._at.builds}/{self._builds}/{about['id']}")
        if about["status"] != "SUCCESS":
            detail = about.get("failureInfo", {}).get("detail") or about.get("statusDetail") or ""
            raise PreflightError(
                f"The image {uri} could not be built: {about['status']}"
                f"{f', {detail}' if detail else ''}. The log of the build says why: "
                f"{about.get('logUrl', 'see Cloud Build')}"
            )

    def _upload(self, bucket: str, packed: bytes) -> str:
        name = f"source-{hashlib.sha256(packed).hexdigest()[:12]}.tar.gz"
        asked = {"uploadType": "media", "name": name, "ifGenerationMatch": "0"}
        query = urllib.parse.urlencode(asked)
        url = f"{self._at.storage}/upload/storage/v1/b/{bucket}/o?{query}"
        self._call("POST", url, packed, allowed=(412,))  # 412: it is there.
        return name

    def _call(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        allowed: tuple[int, ...] = (),
    ) -> tuple[int, dict[str, Any]]:
        """Call, again and again while the server has trouble, and return code and answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        place = urllib.parse.urlsplit(url).netloc
        said: Exception | None = None
        for number in range(_TRIES):
            if number:
                self._sleep(2.0 ** (number - 1))
            sent = {"Authorization": self._authorization(), "Content-Type": kind, **(headers or {})}
            asked = urllib.request.Request(url, data, sent, method=method)
            try:
                with urllib.request.urlopen(asked, timeout=_REQUEST_S) as answer:
                    content = answer.read()
                    return answer.status, json.loads(content) if content else {}
            except urllib.error.HTTPError as error:
                said = error
                with error:  # It is the answer, too.
                    if error.code in allowed:
                        return error.code, {}
                    if error.code < 500 and error.code not in (408, 429):
                        raise PreflightError(_refused(place, error)) from error
                if method == "POST" and not isinstance(body, bytes):
                    break  # It may have been begun; another one would be a second build.
            except (OSError, HTTPException, ValueError) as error:
                said = error
                if method == "POST" and not isinstance(body, bytes):
                    break
        raise BackendUnavailable(f"{place} does not answer: {said}. Try again later.") from said


def _refused(place: str, error: urllib.error.HTTPError) -> str:
    try:
        reason = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = error.reason
    advice = {
        401: "Log in with `gcloud auth application-default login`.",
        403: "Ask for roles/cloudbuild.builds.editor and roles/storage.objectUser.",
        404: "Does it exist, and is the service enabled in the project?",
    }
    return f"{place} refused ({error.code}): {reason} {advice.get(error.code, '')}".rstrip()
