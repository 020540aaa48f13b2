"""The whole examination: gather, check, and on request repair.

In: whether to repair. Out: `Report`.
"""

from __future__ import annotations

import time
from typing import Any

from kinetic._backends import registry
from kinetic._backends.kubernetes import cluster
from kinetic._backends.local import simulation
from kinetic._client.doctor import checks, facts, leftovers
from kinetic._config import profiles, settings
from kinetic._config.settings import Settings
from kinetic._core.findings import Finding, Level
from kinetic._core.values import dataclass
from kinetic._store.local import LocalStore
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
    compiler = facts.tpu_compiler(chosen.compile_python if chosen else "")
    found.append(checks.tpu_compiler(machine, compiler))
    found += checks.configuration(fault, *_profiles())
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
    from kinetic._client.doctor.repair import repair

    done = repair(store, traces)
    return leftovers.check(facts.traces(store, time.time()) if done else traces), done
