"""The released manifests of JobSet and Kueue, each pinned by its version and digest. Pure."""

from __future__ import annotations

from dataclasses import replace

from kinetic._clusters.observed import Document
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Release:
    """A released manifest of JobSet or Kueue.

    Attributes:
        name: the product's name.
        version: the version; "" for a manifest that the user gave.
        source: a URL, or the path of a file.
        sha256: the digest of the file; "" for a manifest that the user gave.
        definition: an object that every version of the product has: if it exists, the product is
            installed.
    """

    name: str
    version: str
    source: str
    sha256: str
    definition: str

    def replace_source(self, source: str | None) -> Release:
        """Return the release with the manifest that the user gave, whose digest is not checked; the
        release itself if `source` is empty."""
        return replace(self, version="", source=source, sha256="") if source else self

    @property
    def namespace(self) -> str:
        """The namespace of the product's controller."""
        return f"{self.name.lower()}-system"

    @property
    def controller(self) -> str:
        """The name of the Deployment that must be running before the product works."""
        return f"{self.name.lower()}-controller-manager"

    @property
    def marker(self) -> Document:
        """The object that is applied last: if it exists, the whole manifest was applied."""
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
"""The products that `up` installs, by the name of the option that replaces their manifest. The
digests are those of the files that the projects published."""
