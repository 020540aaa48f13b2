"""Packages that pods of a cluster install: kinetic itself, and a list of requirements.

In: the plan, the folder of the function's file, the caller's packages. Out: `Installation`, and its
content for the store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from importlib import metadata
from pathlib import Path

from kinetic._core.plan import Blob, Plan
from kinetic._core.values import dataclass
from kinetic._source import dependencies, editable, runtime
from kinetic._source.dependencies import Requirements

_PINNED = ("cloudpickle", "jax", "keras", "pathwaysutils")
"""Packages that hosts install in the caller's version."""
_DEBUGGER = ("debugpy>=1.8.1",)


@dataclass(frozen=True)
class Installation:
    """Packages that pods install before they start.

    Attributes:
        runtime: kinetic's archive.
        requirements: the list, as a requirements.txt.
        contents: the bytes of both, by digest.
    """

    runtime: Blob
    requirements: Blob
    contents: Mapping[str, bytes] = field(repr=False)


def of(
    plan: Plan, start: Path, *, imported: Collection[str], cache_dir: Path, bucket: bool
) -> Installation:
    """Return the packages that pods install for a function. In a custom image, the project's
    requirements are installed already, and only kinetic's own may be missing.

    Args:
        plan: the job's plan, with its place, platform and options decided.
        start: the folder of the function's file.
        imported: real paths of the tree's folders that the caller imports from.
        cache_dir: the user's cache folder.
        bucket: whether the store is a bucket.

    Raises:
        UsageError: the project requires what hosts cannot install.
    """
    installed, also = _find_versions(), _DEBUGGER if plan.options.debug else ()
    if plan.place.has_complete_image:
        requirements = dependencies.of_kinetic(installed, bucket=bucket, also=also)
    else:
        # The function's own project is installed by its requirements file, not as a package.
        packages = [
            package
            for package in editable.packages(imported)
            if not f"{start}/".startswith(f"{package.folder}/")
        ]
        declared = dependencies.find(start, home=Path("~").expanduser(), editable=packages)
        requirements = dependencies.for_hosts(
            declared, plan.platform, installed, bucket=bucket, also=also
        )
    return _make_installation(requirements, cache_dir)


def of_base(kind: str, *, cache_dir: Path) -> Installation:
    """Return the packages for an image without a project. `kind`: "tpu", "gpu" or "cpu"."""
    requirements = dependencies.for_hosts(dependencies.Declared(), kind, _find_versions())
    return _make_installation(requirements, cache_dir)


def _make_installation(requirements: Requirements, cache_dir: Path) -> Installation:
    archive, text = runtime.archive(cache_dir), requirements.text.encode()
    contents = {archive.blob.digest: archive.data, requirements.sha: text}
    return Installation(archive.blob, Blob(requirements.sha, len(text)), contents)


def _find_versions() -> dict[str, str]:
    versions = {}
    for name in _PINNED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
