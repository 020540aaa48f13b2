"""The whole examination: gather, check, and on request repair.

In: whether to repair. Out: `Report`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kinetic._backends import registry
from kinetic._backends.kubernetes import cluster
from kinetic._backends.local import simulation
from kinetic._client.board.reader import JobBoard
from kinetic._client.doctor import checks, facts, leftovers
from kinetic._client.doctor.facts import HERE
from kinetic._client.doctor.leftovers import Traces
from kinetic._config import environment, profiles, settings
from kinetic._config.settings import Settings
from kinetic._core import layout
from kinetic._core.findings import Finding, Level
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store import index
from kinetic._store.local import LocalStore
from kinetic._system import locks
from kinetic.errors import KineticError, UsageError


@dataclass(frozen=True)
class Report:
    """What was repaired, and what was found after that."""

    findings: tuple[Finding, ...]
    done: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing will go wrong."""
        return all(finding.level is not Level.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "ok": self.ok,
            "findings": [f.to_json() for f in self.findings],
            "done": list(self.done),
        }


def examine(*, fix: bool = False) -> Report:
    """Check everything; with `fix`, tidy up first."""
    known, fault = _settings()
    machine = facts.machine()
    simulates = simulation.can_simulate(machine.system)
    chosen = _load_settings()
    has_cluster = chosen is None or registry.has_cluster(chosen)
    found = checks.versions(machine, has_cluster=has_cluster)
    if simulates:
        slices = facts.slices()
        found += [checks.processors(machine, slices), checks.memory(machine, slices)]
        found += [checks.namespaces(machine), checks.loopback(machine)]
    found.append(checks.tpu_compiler(machine, facts.tpu_compiler()))
    found += checks.configuration(fault, *_profiles())
    misspelt = environment.find_misspelt(settings.names().values(), settings.variables())
    found += checks.variables(misspelt)
    if known is None:
        return Report(tuple(found))
    place = facts.folder((chosen or known).folder)
    uri = (chosen or known).store
    found += checks.store(place, uri if "://" in uri and not uri.startswith("file://") else "")
    done: list[str] = []
    if place.exists and place.is_folder and place.is_mine and not place.refused:
        left, done = _leftovers(LocalStore((chosen or known).folder), fix=fix)
        found += left
    if chosen is not None:
        found += _check_remote(chosen, has_cluster=has_cluster)
    if simulates:
        tried = facts.zygote(machine, settings.worker_environ(), enabled=known.preload != "off")
        found.append(checks.zygote(tried))
    return Report(tuple(found), tuple(done))


def _settings() -> tuple[Settings | None, str]:
    try:
        return settings.load(profile={}), ""
    except UsageError as fault:
        return None, str(fault)


def _profiles() -> tuple[str, str | None]:
    """What is wrong with the profiles, and which one is in use."""
    try:
        kept, chosen = profiles.read(settings.profiles_file()), settings.chosen_profile()
        if chosen is not None:
            kept.get(str(chosen.value))
        return "", str(chosen.value) if chosen else kept.current
    except KineticError as fault:
        return str(fault), None


def _load_settings() -> Settings | None:
    """The settings, with those of the profile; None if one of them has a fault, which is reported
    as the settings' or the profiles'."""
    try:
        return settings.load()
    except KineticError:
        return None


def _check_remote(chosen: Settings, *, has_cluster: bool) -> list[Finding]:
    """Findings about the configured cluster and store; none if jobs run and are kept on this
    machine."""
    found = list(cluster.check(chosen)) if has_cluster else []
    if chosen.is_for_ray:
        from kinetic._backends.ray import checks as ray_checks

        found += ray_checks.check(chosen)
        if chosen.store.startswith("ray+"):
            return found  # Its keeper may not have started yet.
    if has_cluster or "://" in chosen.store:
        tried = facts.access(chosen.store)
        found += checks.access(tried, has_cluster=has_cluster, pods_store=chosen.pod_store)
    return found


def _leftovers(store: LocalStore, *, fix: bool) -> tuple[list[Finding], list[str]]:
    traces = facts.traces(store, time.time())
    if not fix:
        return leftovers.check(traces), []
    done = repair(store, traces)
    return leftovers.check(facts.traces(store, time.time()) if done else traces), done


def repair(store: LocalStore, traces: Traces, now: Callable[[], float] = time.time) -> list[str]:
    """Judge orphaned jobs, and remove what is no longer needed; return what was done. A job's files
    are removed while its lock is held, because they may be needed again by now."""
    return _judge_orphans(store, leftovers.orphans(traces), now()) + [
        done
        for job_id, path in leftovers.removable(traces)
        if (done := _remove(store, job_id, Path(path)))
    ]


def _judge_orphans(store: LocalStore, job_ids: Sequence[str], now: float) -> list[str]:
    refs, done = list[JobRef](), list[str]()
    for job_id in job_ids:
        try:
            refs.append(index.find(store, job_id))
        except KineticError as error:
            done.append(_explain_unjudged(job_id, error))
    here = [ref for ref in refs if ref.backend == HERE.backend]
    found = JobBoard(store, lambda _: registry.make(HERE, store), lambda: now).settle(here)
    for job_id, outcome in found.items():
        if isinstance(outcome, KineticError):
            done.append(_explain_unjudged(job_id, outcome))
        elif outcome is not None:
            done.append(f"{job_id} is judged: {outcome.verdict}.")
    return done


def _explain_unjudged(job_id: str, why: KineticError) -> str:
    return (
        f"{job_id} could not be judged: {why} `kinetic jobs cleanup {job_id}` removes what is left "
        "of it."
    )


def _remove(store: LocalStore, job_id: str, path: Path) -> str:
    with contextlib.ExitStack() as held:
        if job_id and not held.enter_context(_try_lock(store, job_id)):
            return ""  # it has a supervisor after all
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{path} could not be removed: {error.strerror}."
    return f"{path} is removed."


@contextlib.contextmanager
def _try_lock(store: LocalStore, job_id: str) -> Iterator[bool]:
    """Hold the lock that a job's supervisor would hold; False when one does."""
    lock = store.path(f"{layout.JobKeys(job_id).prefix}/local/lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # there never was a supervisor
        return
    except OSError:
        yield False
        return
    try:
        yield locks.try_hold_record(descriptor)
    finally:
        os.close(descriptor)
