"""The examination of `kinetic doctor`: all checks, in the order of the report."""

from __future__ import annotations

import time
from typing import Any

from kinetic._backends import registry
from kinetic._backends.kubernetes import cluster
from kinetic._backends.local import simulation
from kinetic._client.doctor import leftovers, probes
from kinetic._config import environment, profiles, settings
from kinetic._config.settings import Settings
from kinetic._core.findings import Finding, Level
from kinetic._core.values import dataclass
from kinetic._store.local import LocalStore
from kinetic.errors import KineticError, UsageError


@dataclass(frozen=True)
class Report:
    """The findings of an examination."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.level is not Level.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"ok": self.ok, "findings": [f.to_json() for f in self.findings]}


def examine() -> Report:
    """Check the machine, the settings, the store, leftovers and the configured cluster."""
    plain, fault = _load_plain_settings()
    machine = probes.read_machine()
    simulates = simulation.can_simulate(machine.system)
    chosen = _load_settings()
    has_cluster = chosen is None or registry.has_cluster(chosen)
    findings = probes.versions(machine, has_cluster=has_cluster)
    if simulates:
        slices = probes.list_slices()
        findings += [probes.processors(machine, slices), probes.memory(machine, slices)]
        findings += [probes.namespaces(machine), probes.loopback(machine)]
    findings.append(probes.tpu_compiler(machine))
    findings += probes.configuration(fault, *_check_profiles())
    misspelt = environment.find_misspelt(settings.names().values(), settings.variables())
    findings += probes.variables(misspelt)
    if plain is None:
        return Report(tuple(findings))
    folder = probes.read_folder((chosen or plain).folder)
    uri = (chosen or plain).store
    findings += probes.store(folder, uri if "://" in uri and not uri.startswith("file://") else "")
    if folder.exists and folder.is_folder and folder.is_mine and not folder.refused:
        findings += leftovers.probe(LocalStore((chosen or plain).folder), time.time())
    if chosen is not None:
        findings += _check_remote(chosen, has_cluster=has_cluster)
    if simulates:
        is_on = plain.preload != "off"
        findings.append(probes.zygote(machine, settings.worker_environ(), enabled=is_on))
    return Report(tuple(findings))


def _load_plain_settings() -> tuple[Settings | None, str]:
    try:
        return settings.load(profile={}), ""
    except UsageError as fault:
        return None, str(fault)


def _check_profiles() -> tuple[str, str | None]:
    """Return the fault of the profiles ("" for none), and the name of the profile in use."""
    try:
        saved, chosen = profiles.read(settings.profiles_file()), settings.chosen_profile()
        if chosen is not None:
            saved.get(str(chosen.value))
        return "", str(chosen.value) if chosen else saved.current
    except KineticError as fault:
        return str(fault), None


def _load_settings() -> Settings | None:
    """Return the settings, including those of the profile. Return None if they are invalid:
    `_load_plain_settings` or `_check_profiles` reports the fault."""
    try:
        return settings.load()
    except KineticError:
        return None


def _check_remote(chosen: Settings, *, has_cluster: bool) -> list[Finding]:
    """Check the configured cluster and a remote store. No findings if both are on this machine."""
    findings = list(cluster.check(chosen)) if has_cluster else []
    if chosen.is_for_ray:
        from kinetic._backends.ray import checks as ray_checks

        findings += ray_checks.check(chosen)
        if chosen.store.startswith("ray+"):
            return findings  # Its store server may not have started yet.
    if has_cluster or "://" in chosen.store:
        findings += probes.access(
            chosen.store, has_cluster=has_cluster, pods_store=chosen.pod_store
        )
    return findings
