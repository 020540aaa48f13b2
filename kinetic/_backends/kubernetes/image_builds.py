"""Bundled images: they contain the packages that a job's pods would install otherwise. An image is
named after its content, so it is built only once.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from kinetic._backends.kubernetes import images
from kinetic._backends.kubernetes.cloud_build import Build, CloudBuild
from kinetic._core.plan import Plan
from kinetic.errors import BackendUnavailable, PreflightError

Tell = Callable[[str], object]
Open = Callable[[str, str], CloudBuild]


class BundledImages:
    """The bundled images of this process's jobs. Threads may share an instance."""

    def __init__(
        self, open_builds: Open = CloudBuild, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Create the object without calling Google.

        Args:
            open_builds: returns the builds of a project and a region; replaced by tests.
            clock: replaced by tests.
        """
        self._open = open_builds
        self._clock = clock
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._existing: set[str] = set()

    def choose(self, plan: Plan, installed: Mapping[str, bytes], tell: Tell) -> Plan:
        """Return the plan after making sure that its bundled image exists.

        Raises:
            PreflightError: the image cannot be built.
            BackendUnavailable: Google does not answer.
        """
        is_bundled = plan.place.image == "bundled" and plan.requirements is not None
        if is_bundled and self._ensure(plan, installed, tell):
            # The start timeout must not include the build.
            return dataclasses.replace(plan, created_at=self._clock())
        return plan

    def _ensure(self, plan: Plan, installed: Mapping[str, bytes], tell: Tell) -> bool:
        """Make sure that the image exists; return True if it had to be built."""
        uri = images.image_of(plan)
        with self._locks[uri]:
            if uri in self._existing:
                return False
            place = plan.place
            builds = self._open(place.project, images.region(place.zone))
            exists = builds.has(uri)
            if not exists:
                self._build(builds, uri, plan, installed, tell)
            self._existing.add(uri)
            return not exists

    def _build(
        self,
        builds: CloudBuild,
        uri: str,
        plan: Plan,
        installed: Mapping[str, bytes],
        tell: Tell,
    ) -> None:
        """Wait for the running build of an image, or build the image if there is none."""
        build = builds.newest(uri)
        if build is not None and build.is_under_way:
            tell(f"the image {uri} is already being built: waiting for it; log: {build.log}")
            ended = _wait_for_build(builds, build, tell)
            if ended.status == "SUCCESS":
                return
            if ended.status != "CANCELLED":  # A cancelled build says nothing about the image.
                raise builds.failure(uri, ended)
        build_one(builds, uri, _files(plan, installed), images.bucket(plan.place), tell)


def _files(plan: Plan, installed: Mapping[str, bytes]) -> dict[str, bytes]:
    assert plan.requirements is not None
    return images.files(
        images.slim_image(plan.versions.python),
        requirements=installed[plan.requirements.digest],
        runtime=b"" if plan.runtime is None else installed[plan.runtime.digest],
    )


def build_one(
    builds: CloudBuild, uri: str, files: Mapping[str, bytes], bucket: str, tell: Tell
) -> None:
    """Build an image and wait for it; Ctrl-C cancels the build.

    Raises:
        PreflightError: the caller may not build the image, or its build failed.
        BackendUnavailable: Google does not answer.
    """
    builds.check(uri, bucket)
    build = builds.begin(uri, files, bucket)
    tell(f"building the image {uri}, which takes some minutes, once; log: {build.log}")
    try:
        ended = _wait_for_build(builds, build, tell)
    except KeyboardInterrupt:
        is_cancelled = builds.cancel(build)
        tell("the build was cancelled" if is_cancelled else f"the build goes on; log: {build.log}")
        raise
    if ended.status != "SUCCESS":
        raise builds.failure(uri, ended)


def _wait_for_build(builds: CloudBuild, build: Build, tell: Tell) -> Build:
    advice = "The build may go on; if so, the next call waits for it."
    try:
        ended = builds.wait(
            build, lambda s: tell(f"the image is still being built ({s / 60:.0f} min)")
        )
    except PreflightError as error:
        raise PreflightError(f"{error} {advice}") from error
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error} {advice}") from error
    if ended.status == "SUCCESS":
        tell("the image is built")
    return ended
