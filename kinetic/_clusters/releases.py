"""The released manifests of JobSet and Kueue, each pinned by its version and digest. Pure."""

from __future__ import annotations

from dataclasses import replace

from kinetic._clusters.observed import Document
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Release:
    """A released manifest.

    Attributes:
        name: the product's name.
        version: its version; "" for a manifest of the user's.
        source: a URL, or the path of a file.
        sha256: the digest of the text; "" for a manifest of the user's.
        definition: an object that every version has: the product is installed if it exists.
        namespace: the namespace of its controller.
        controller: the Deployment that must run before the product works.
    """

    name: str
    version: str
    source: str
    sha256: str
    definition: str
    namespace: str
    controller: str

    def replace_source(self, source: str | None) -> Release:
        """Return the release with a manifest of the user's, if one is named: its digest counts
        as verified by the user."""
        return replace(self, version="", source=source, sha256="") if source else self

    @property
    def marker(self) -> Document:
        """The object that is applied last. Where it exists, the whole manifest was applied."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kinetic-applied", "namespace": self.namespace},
            "data": {"version": self.version or "of the user"},
        }


_URL = "https://github.com/kubernetes-sigs/{0}/releases/download/v{1}/manifests.yaml"


def _make_release(name: str, version: str, sha256: str, definition: str) -> Release:
    return Release(
        name.replace("jobset", "JobSet").replace("kueue", "Kueue"),
        version,
        _URL.format(name, version),
        sha256,
        f"CustomResourceDefinition {definition}",
        f"{name}-system",
        f"{name}-controller-manager",
    )


RELEASES = {
    "jobset": _make_release(
        "jobset",
        "0.12.0",
        "a41aaf12dd0b7b0a3d626b8d6107f32c3dc889d7e7830adc46b8cdb77a8963bb",
        "jobsets.jobset.x-k8s.io",
    ),
    "kueue": _make_release(
        "kueue",
        "0.19.2",
        "88881eb50734eb920b67486ebc2aa978ed325e1b12d99b22fc51a6d7e9e4d370",
        "clusterqueues.kueue.x-k8s.io",
    ),
}
"""What `up` installs, by the option that replaces it. The digests are of the files that the two
projects have published with these versions."""
