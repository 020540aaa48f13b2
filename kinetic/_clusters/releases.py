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
    """

    name: str
    version: str
    source: str
    sha256: str
    definition: str

    def replace_source(self, source: str | None) -> Release:
        """Return the release with a manifest of the user's, if one is named: its digest counts
        as verified by the user."""
        return replace(self, version="", source=source, sha256="") if source else self

    @property
    def namespace(self) -> str:
        """The namespace of its controller."""
        return f"{self.name.lower()}-system"

    @property
    def controller(self) -> str:
        """The Deployment that must run before the product works."""
        return f"{self.name.lower()}-controller-manager"

    @property
    def marker(self) -> Document:
        """The object that is applied last. Where it exists, the whole manifest was applied."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kinetic-applied", "namespace": self.namespace},
            "data": {"version": self.version or "of the user"},
        }


_PAGE = "https://github.com/kubernetes-sigs"
RELEASES = {
    "jobset": Release(
        "JobSet",
        "0.12.0",
        f"{_PAGE}/jobset/releases/download/v0.12.0/manifests.yaml",
        "a41aaf12dd0b7b0a3d626b8d6107f32c3dc889d7e7830adc46b8cdb77a8963bb",
        "CustomResourceDefinition jobsets.jobset.x-k8s.io",
    ),
    "kueue": Release(
        "Kueue",
        "0.19.2",
        f"{_PAGE}/kueue/releases/download/v0.19.2/manifests.yaml",
        "88881eb50734eb920b67486ebc2aa978ed325e1b12d99b22fc51a6d7e9e4d370",
        "CustomResourceDefinition clusterqueues.kueue.x-k8s.io",
    ),
}
"""What `up` installs, by the option that replaces it. The digests are of the files that the two
projects have published with these versions."""
