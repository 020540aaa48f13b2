"""Google's other REST interfaces: APIs of a project, machine types, quotas and buckets; and the
download of manifests."""

from __future__ import annotations

import hashlib
import time
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from kinetic._backends.kubernetes.google_calls import GoogleCalls, ServiceRefused
from kinetic._clusters.observed import Document
from kinetic._clusters.refusals import NotEnabled, explain
from kinetic._clusters.releases import Release
from kinetic.errors import BackendUnavailable, PreflightError

POLL_S = 2.0
LONGEST_S = 600.0
ADDRESSES = {
    "container": "https://container.googleapis.com/",
    "compute": "https://compute.googleapis.com/compute/v1/",
    "serviceusage": "https://serviceusage.googleapis.com/",
    "storage": "https://storage.googleapis.com/storage/v1/",
}
_OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
ENABLE_PAUSE_S, LONGEST_ENABLE_S = 10.0, 300.0
"""For some minutes after an API was enabled, it may refuse requests as if it were not. In seconds:
the pause between two tries, and the longest wait."""


class Cloud:
    """Calls to Google Cloud for one project."""

    def __init__(self, project: str, variables: Mapping[str, str]) -> None:
        """Create the object without calling Google. gcloud's own environment variables may replace
        the URLs of services."""
        self.project = project
        self._addresses = {
            service: (variables.get(f"{_OVERRIDE}{service.upper()}") or url).rstrip("/") + "/"
            for service, url in ADDRESSES.items()
        }
        self._calls = GoogleCalls()
        self._waits_until = 0.0

    def ask(
        self,
        method: str,
        service: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        action: str,
        allowed: tuple[int, ...] = (),
        query: Mapping[str, object] | None = None,
    ) -> tuple[int, Document]:
        """Send a request to a service; return the HTTP status and the response.

        Args:
            method: the HTTP method.
            service: the name of the service.
            path: the path of the URL.
            body: the JSON body.
            action: the request in words, for error messages: "create the cluster dev".
            allowed: the HTTP codes of errors to return instead of raising.
            query: the parameters of the URL.
        """
        url = self._addresses[service] + path + (f"?{urlencode(query, True)}" if query else "")
        while True:
            try:
                code, answer = self._calls.call(method, url, body, allowed=allowed)
                return code, answer if isinstance(answer, dict) else {}
            except ServiceRefused as refused:
                error = explain(self.project, action, refused.code, refused.detail)
                if not isinstance(error, NotEnabled) or time.monotonic() > self._waits_until:
                    raise error from refused
            time.sleep(ENABLE_PAUSE_S)

    # --- the project

    def read_services(self, names: Iterable[str]) -> tuple[str, frozenset[str]]:
        """Return the project's number, and those of the APIs in `names` that are enabled."""
        wanted = [f"projects/{self.project}/services/{name}" for name in names]
        path = f"v1/projects/{self.project}/services:batchGet"
        _, answer = self.ask(
            "GET", "serviceusage", path, action="read the enabled APIs", query={"names": wanted}
        )
        rows = answer.get("services") or ()
        number = next((str(row["parent"]).rpartition("/")[2] for row in rows), "")
        enabled = (row["name"] for row in rows if row.get("state") == "ENABLED")
        return number, frozenset(str(name).rpartition("/")[2] for name in enabled)

    def enable(self, body: Document) -> None:
        """Enable APIs. Requests that follow are repeated until the APIs accept them."""
        action = "enable APIs"
        path = f"v1/projects/{self.project}/services:batchEnable"
        _, operation = self.ask("POST", "serviceusage", path, body, action=action)
        ends = time.monotonic() + LONGEST_S
        while not operation.get("done") and time.monotonic() < ends:
            time.sleep(POLL_S)
            path = f"v1/{operation['name']}"
            _, operation = self.ask("GET", "serviceusage", path, action=action)
        if error := operation.get("error"):
            raise explain(self.project, action, 403, error)
        self._waits_until = time.monotonic() + LONGEST_ENABLE_S

    # --- machines

    def list_machines(self, zone: str) -> frozenset[str]:
        """List the machine types that a zone has."""
        path = f"projects/{self.project}/zones/{zone}/machineTypes"
        action = f"list the machine types of {zone}"
        query: dict[str, object] = {"fields": "items/name,nextPageToken", "maxResults": 500}
        names: set[str] = set()
        while True:
            _, answer = self.ask("GET", "compute", path, action=action, query=query)
            names |= {str(item["name"]) for item in answer.get("items") or ()}
            if not answer.get("nextPageToken"):
                return frozenset(names)
            query["pageToken"] = answer["nextPageToken"]

    def read_quota(self, metric: str) -> list[Document]:
        """Return the limits of a quota of the Compute API, for each region and family; [] if the
        project has no such quota, or the caller may not read it."""
        name = quote(f"compute.googleapis.com/{metric}", safe="")
        path = f"v1beta1/projects/{self.project}/services/compute.googleapis.com"
        _, answer = self.ask(
            "GET",
            "serviceusage",
            f"{path}/consumerQuotaMetrics/{name}",
            action="read quotas",
            allowed=(400, 403, 404),
            query={"view": "FULL"},
        )
        limits = answer.get("consumerQuotaLimits") or ()
        return [bucket for limit in limits for bucket in limit.get("quotaBuckets") or ()]

    # --- buckets

    def read_bucket(self, name: str) -> Document | None:
        """Return a bucket's document; None if the bucket does not exist."""
        code, answer = self.ask(
            "GET", "storage", f"b/{name}", action=f"read the bucket {name}", allowed=(404,)
        )
        return None if code == 404 else answer

    def create_bucket(self, body: Document) -> None:
        """Create a bucket."""
        action = f"create the bucket {body['name']}"
        self.ask("POST", "storage", "b", body, action=action, query={"project": self.project})

    def read_members(self, bucket: str, role: str) -> frozenset[str]:
        """Return the members that have this role on a bucket."""
        policy = self._read_policy(bucket)
        return frozenset(
            member
            for binding in policy.get("bindings") or ()
            if binding.get("role") == role and not binding.get("condition")
            for member in binding.get("members") or ()
        )

    def _read_policy(self, bucket: str) -> Document:
        path, action = f"b/{bucket}/iam", f"read the policy of the bucket {bucket}"
        query = {"optionsRequestedPolicyVersion": 3}
        return self.ask("GET", "storage", path, action=action, query=query)[1]

    def grant(self, bucket: str, role: str, member: str) -> None:
        """Give a role on a bucket to a member; the rest of the policy stays.

        Raises:
            NameTaken: another process has changed the policy at the same moment.
        """
        policy = self._read_policy(bucket)
        bindings = [*(policy.get("bindings") or ()), {"role": role, "members": [member]}]
        body = policy | {"bindings": bindings, "version": 3}
        action = f"grant {role} on the bucket {bucket}"
        self.ask("PUT", "storage", f"b/{bucket}/iam", body, action=action)

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with everything in it."""
        action = f"remove the bucket {name}"

        def remove(path: str) -> None:
            self.ask("DELETE", "storage", path, action=action, allowed=(404,))

        with ThreadPoolExecutor(16) as pool:
            while names := self._list_names(name, "o", action):
                list(pool.map(remove, [f"b/{name}/o/{quote(n, safe='')}" for n in names]))
        # Folders of a bucket with a hierarchy remain when their objects are gone: deepest first.
        while folders := self._list_names(name, "folders", action):
            for folder in sorted(folders, reverse=True):
                remove(f"b/{name}/folders/{quote(folder, safe='')}")
        remove(f"b/{name}")

    def _list_names(self, bucket: str, kind: str, action: str) -> list[str]:
        _, answer = self.ask(
            "GET", "storage", f"b/{bucket}/{kind}", action=action, allowed=(400, 404, 409)
        )
        return [str(item["name"]) for item in answer.get("items") or ()]


def download(url: str) -> bytes:
    """Return the content of a public URL. No login is sent.

    Raises:
        BackendUnavailable: the server does not answer.
        PreflightError: there is no such file.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())
    except OSError as error:  # urllib's own errors are subclasses.
        kind = (
            PreflightError if getattr(error, "code", 0) in (403, 404, 410) else BackendUnavailable
        )
        raise kind(
            f'{url} cannot be fetched: "{error}". Fetch it where the network allows it, and name '
            "the file with --jobset-manifest or --kueue-manifest."
        ) from error


def read_manifest(release: Release) -> list[Document]:
    """Download or read a release's manifest, and return the objects in it.

    Raises:
        PreflightError: the manifest cannot be read, or its digest is not the pinned one.
    """
    option = f"--{release.name.lower()}-manifest"
    if urlsplit(release.source).scheme in ("http", "https"):
        text = download(release.source)
    else:
        try:
            text = Path(release.source).expanduser().read_bytes()
        except OSError as error:
            raise PreflightError(
                f"The manifest of {release.name} cannot be read: {release.source}: "
                f"{error.strerror}. Name a file or a URL with {option}."
            ) from error
    digest = hashlib.sha256(text).hexdigest()
    if release.sha256 and digest != release.sha256:
        raise PreflightError(
            f"The manifest of {release.name} {release.version} is not the released one: its "
            f"SHA-256 is {digest}, not {release.sha256} ({release.source}). Compare it with the "
            f"project's page, and pass it with {option} if you trust it."
        )
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(text) if document]
        kinds = [(d["apiVersion"], d["kind"], d["metadata"]["name"]) for d in documents]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise PreflightError(
            f"The manifest of {release.name} ({release.source}) is not a list of Kubernetes "
            f"objects: {type(error).__name__}. Name the released file with {option}."
        ) from error
    if not any(f"{kind} {name}" == release.definition for _, kind, name in kinds):
        raise PreflightError(
            f"The manifest {release.source} is not that of {release.name}: it does not define "
            f"{release.definition.split()[1]}. Name the released file with {option}."
        )
    return documents
