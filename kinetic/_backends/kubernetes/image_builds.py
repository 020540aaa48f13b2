"""Bundled images: with what a job's pods install, built once and found by their content.

In: plans, what they install. Out: plans whose image exists; builds, lines for the caller.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from kinetic._backends.kubernetes import images
from kinetic._backends.kubernetes.cloud_build import Build, CloudBuild
from kinetic._backends.kubernetes.google_calls import GoogleLogin, ServicePatience
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic.errors import BackendUnavailable, KineticError, PreflightError

LOOK_AGAIN_S = 60.0
"""After this time a missing image is looked for again."""
BRIEF = ServicePatience(tries=1, request_s=5.0)
"""For calls that the caller has not asked for."""

_log = logging.getLogger("kinetic.images")

Tell = Callable[[str], object]
Open = Callable[[str, str, ServicePatience | None], CloudBuild]


class BundledImages:
    """The images that the jobs of this process use. Threads may share it."""

    def __init__(
        self,
        open_builds: Open | None = None,
        *,
        builds_behind: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Call nothing yet.

        Args:
            open_builds: returns the builds of a project and a region; for tests.
            builds_behind: whether to look for and build images that were not requested.
            clock, wall_clock: for tests.
        """
        login = GoogleLogin()
        self._open = open_builds or (
            lambda project, region, patience: CloudBuild(
                project, region, login=login, patience=patience
            )
        )
        self._builds_behind = builds_behind
        self._clock, self._wall_clock = clock, wall_clock
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._there: set[str] = set()
        self._absent: dict[str, float] = {}
        self._seen_to: set[str] = set()

    def choose(self, plan: Plan, installed: Mapping[str, bytes], tell: Tell) -> Plan:
        """Return the plan with its image. A requested bundled image is built unless it exists; a
        plan that leaves the image open gets the bundled one if it exists.

        Raises:
            PreflightError: the image cannot be built.
            BackendUnavailable: Google does not answer.
        """
        if plan.place.image == "bundled" and plan.requirements is not None:
            if self._ensure(plan, installed, tell):  # The start timeout counts from now on.
                return dataclasses.replace(plan, created_at=self._wall_clock())
        elif self._is_open(plan) and self._is_there(plan):
            return dataclasses.replace(plan, place=_mark_bundled(plan).place)
        return plan

    def build_behind(self, plan: Plan, installed: Mapping[str, bytes], tell: Tell) -> None:
        """Start a build of the image of a plan that leaves it open, and return. Each image is built
        once, even if its build fails."""
        if not self._is_open(plan) or plan.options.debug:
            return
        uri = images.of(_mark_bundled(plan))
        with self._locks[uri]:
            if uri in self._seen_to or uri in self._there or uri not in self._absent:
                return
            self._seen_to.add(uri)
        try:
            self._begin_behind(uri, plan, installed, tell)
        except Exception as error:  # noqa: BLE001 - the job that it is built beside was submitted
            _log.info("no image is built in the background: %s", error)

    # -- not requested -------------------------------------------------------------

    def _is_open(self, plan: Plan) -> bool:
        return (
            self._builds_behind
            and plan.place.image == ""
            and plan.requirements is not None
            and images.has_registry(plan.place)
        )

    def _is_there(self, plan: Plan) -> bool:
        uri = images.of(_mark_bundled(plan))
        with self._locks[uri]:
            if uri in self._there:
                return True
            if self._clock() - self._absent.get(uri, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
                return False
            try:
                found = self._builds(plan, BRIEF).has(uri)
            except KineticError as error:
                _log.info("the image %s was not looked for: %s", uri, error)
                self._seen_to.add(uri)
                self._absent[uri] = math.inf  # This process will not look for it again.
                return False
            if found:
                self._there.add(uri)
            else:
                self._absent[uri] = self._clock()
            return found

    def _begin_behind(
        self, uri: str, plan: Plan, installed: Mapping[str, bytes], tell: Tell
    ) -> None:
        builds, bucket = self._builds(plan, BRIEF), images.bucket(plan.place)
        last = builds.newest(uri)
        if last is not None and last.is_under_way:
            return
        if last is not None and last.status != "SUCCESS":
            tell(
                f"the image of these requirements could not be built in the background "
                f"({last.status}; {last.log}). Pods install them when they start; "
                'container_image="bundled" builds it again.'
            )
            return
        if last is not None and builds.has(uri):  # Its build has ended by now.
            return
        if builds.claim(uri, bucket):
            begun = builds.begin(uri, _files(plan, installed), bucket)
            tell(
                "an image of these requirements is built in the background, from which later jobs "
                f"start; log: {begun.log}"
            )

    # -- requested ---------------------------------------------------------------------

    def _ensure(self, plan: Plan, installed: Mapping[str, bytes], tell: Tell) -> bool:
        """Make sure that the image exists; return whether that took a build."""
        uri = images.of(plan)
        with self._locks[uri]:
            if uri in self._there:
                return False
            builds = self._builds(plan, None)
            has_it = builds.has(uri)
            if not has_it:
                self._build(builds, uri, plan, installed, tell)
            self._there.add(uri)
            return not has_it

    def _build(
        self,
        builds: CloudBuild,
        uri: str,
        plan: Plan,
        installed: Mapping[str, bytes],
        tell: Tell,
    ) -> None:
        """Wait for the build of an image: one that is in progress, or else a new one."""
        build = builds.newest(uri)
        if build is not None and build.is_under_way:
            tell(f"waiting for the image {uri}, which is being built; log: {build.log}")
            ended = _wait_for_build(builds, build, tell)
            if ended.status == "SUCCESS":
                return
            if ended.status != "CANCELLED":  # Not because of the image.
                raise builds.failure(uri, ended)
        build_one(builds, uri, _files(plan, installed), images.bucket(plan.place), tell)

    def _builds(self, plan: Plan, patience: ServicePatience | None) -> CloudBuild:
        place = plan.place
        return self._open(place.project, images.region(place.zone), patience)


def why_none(place: Place, builds: CloudBuild | None = None) -> str:
    """Return what keeps images from being built and found in a place's registry; "" if nothing
    does.

    Args:
        place: one with a registry.
        builds: for tests.
    """
    builds = builds or CloudBuild(place.project, images.region(place.zone), patience=BRIEF)
    uri = f"{images.registry(place)}/base:kinetic-doctor"
    try:
        builds.check(uri, images.bucket(place))
        builds.has(uri)
    except KineticError as error:
        return str(error)
    return ""


def _mark_bundled(plan: Plan) -> Plan:
    return dataclasses.replace(plan, place=dataclasses.replace(plan.place, image="bundled"))


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
    """Build an image, and wait for it; Ctrl-C cancels the build.

    Raises:
        PreflightError: it may not be built, or its build has failed.
        BackendUnavailable: Google does not answer.
    """
    builds.check(uri, bucket)
    build = builds.begin(uri, files, bucket)
    tell(f"building the image {uri}; it takes some minutes, once; log: {build.log}")
    try:
        ended = _wait_for_build(builds, build, tell)
    except KeyboardInterrupt:
        done = builds.cancel(build)
        tell("the build was cancelled" if done else f"the build goes on; log: {build.log}")
        raise
    if ended.status != "SUCCESS":
        raise builds.failure(uri, ended)


def _wait_for_build(builds: CloudBuild, build: Build, tell: Tell) -> Build:
    after = "The build may go on; then the next call waits for it."
    try:
        ended = builds.wait(
            build, lambda s: tell(f"the image is still being built ({s / 60:.0f} min)")
        )
    except PreflightError as error:
        raise PreflightError(f"{error} {after}") from error
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error} {after}") from error
    if ended.status == "SUCCESS":
        tell("the image is built")
    return ended
