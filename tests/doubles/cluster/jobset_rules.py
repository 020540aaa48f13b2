"""Validation of JobSets: first by the schema of their definition, then by their webhook's rules.

Unknown fields are removed, and their paths returned. The fields and types are those in
tests/golden/kubernetes/jobset-fields.json, the rules those of JobSet 0.12 with default gates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doubles.cluster.kinds import JOB_SETS
from doubles.cluster.objects import Object, clone, dig
from doubles.cluster.problems import Cause, invalid

FIELDS = json.loads(
    (Path(__file__).parents[2] / "golden" / "kubernetes" / "jobset-fields.json").read_text()
)["spec"]
REQUIRED = {
    "spec.coordinator": ["replicatedJob"],
    "spec.failurePolicy.rules[]": ["action"],  # The webhook fills in the names.
    "spec.successPolicy": ["operator"],
    "spec.startupPolicy": ["startupPolicyOrder"],
    "spec.replicatedJobs[].dependsOn[]": ["name", "status"],
}
LARGEST, MOST_DEPENDENCIES = 2**31 - 1, 5
RULE_NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
LONGEST_RULE_NAME = 128
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded")
REASONS += ("PodFailurePolicy",)
GATED = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
LABEL_RULE = "must be a label of RFC 1035: lower case letters, digits and '-', a letter first"
LONGEST = 63
MANAGER = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-\w.~!$&'()*+,;=:@%/]+$")
UNCHECKED = (
    "some validation rules were not checked because the object was invalid; correct the existing"
    " errors to complete validation"
)
WEBHOOK = 'admission webhook "vjobset.kb.io" denied the request: '
FIXED = ("failurePolicy", "network", "startupPolicy", "successPolicy")
"""Fields that a client may add after the creation, but not change."""
FOR_QUEUES = (("metadata", "annotations"), ("metadata", "labels"))
FOR_QUEUES += (("spec", "nodeSelector"), ("spec", "tolerations"), ("spec", "schedulingGates"))
"""Fields of pods that may change while a JobSet is suspended."""


def unknown_fields(obj: Object) -> list[str]:
    """Remove fields that the definition does not have, except in pods; return their paths."""
    unknown = _drop(obj, {"apiVersion", "kind", "metadata", "spec", "status"}, "")
    return unknown + _unknown(obj.get("spec") or {}, FIELDS, "spec")


def _unknown(value: Any, kind: Any, at: str) -> list[str]:
    if not isinstance(kind, dict):
        return []
    if "[]" in kind:
        held = value if isinstance(value, list) else []
        return [u for n, v in enumerate(held) for u in _unknown(v, kind["[]"], f"{at}[{n}]")]
    if not isinstance(value, dict):
        return []
    dropped = _drop(value, set(kind), f"{at}.")
    return dropped + [u for n, v in value.items() for u in _unknown(v, kind[n], f"{at}.{n}")]


def _drop(obj: Object, fields: set[str], prefix: str) -> list[str]:
    unknown = [name for name in obj if name not in fields]
    for name in unknown:
        del obj[name]
    return [prefix + name for name in unknown]


def check(name: str, obj: Object) -> None:
    """Refuse an invalid JobSet."""
    spec = obj.get("spec") or {}
    causes = list(_misfits(spec, FIELDS, "spec"))
    if any(cause.reason in ("FieldValueNotSupported", "FieldValueTypeInvalid") for cause in causes):
        causes.append(Cause("<nil>", f"Invalid value: null: {UNCHECKED}"))
    causes += _definition(spec)
    if causes:
        raise invalid(JOB_SETS, name, causes)
    causes = [*_names(name, spec)]
    causes += [
        Cause("<nil>", f"Internal error: {text}", "InternalError") for text in _webhook(name, spec)
    ]
    if causes:
        raise invalid(JOB_SETS, name, causes, WEBHOOK)


def _misfits(value: Any, kind: Any, at: str) -> Iterator[Cause]:
    """Yield a cause for each value that does not have the type in the definition."""
    if isinstance(kind, list):
        if value not in kind:
            options = ", ".join(f'"{k}"' for k in kind)
            message = f'Unsupported value: "{value}": supported values: {options}'
            yield Cause(at, message, "FieldValueNotSupported")
        return
    wanted = (
        {"integer": int, "string": str, "boolean": bool}.get(kind, dict)
        if (isinstance(kind, str))
        else (list if "[]" in kind else dict)
    )
    if type(value) is not wanted:
        type_name = kind if isinstance(kind, str) else wanted.__name__
        message = f"Invalid value: {json.dumps(value)}: {at} in body must be of type {type_name}"
        yield Cause(at, message, "FieldValueTypeInvalid")
    elif wanted is int and abs(value) > LARGEST:
        yield Cause(at, f"Invalid value: {value}: {at} in body must be of 32 bits")
    elif isinstance(kind, dict) and "[]" in kind:
        for index, item in enumerate(value):
            yield from _misfits(item, kind["[]"], f"{at}[{index}]")
    elif isinstance(kind, dict):
        for needed in REQUIRED.get(re.sub(r"\d+", "", at), []):
            if needed not in value:
                yield Cause(f"{at}.{needed}", "Required value", "FieldValueRequired")
        for name in [n for n in value if n in kind]:
            yield from _misfits(value[name], kind[name], f"{at}.{name}")


def _definition(spec: Object) -> Iterator[Cause]:
    if (ttl := spec.get("ttlSecondsAfterFinished")) is not None and ttl < 0:
        field = "spec.ttlSecondsAfterFinished"
        message = f"Invalid value: {ttl}: {field} in body should be greater than or equal to 0"
        yield Cause(field, message)
    groups = _groups(spec)
    for index, group in enumerate(groups):
        at = f"spec.replicatedJobs[{index}]"
        if group in groups[:index]:
            message = f'Duplicate value: {{"name":"{group}"}}'
            yield Cause(at, message, "FieldValueDuplicate")
        if not dig(spec, "replicatedJobs", index, "template", "spec"):
            yield Cause(f"{at}.template", "Required value", "FieldValueRequired")
        needed = dig(spec, "replicatedJobs", index, "dependsOn", default=[])
        if len(needed) > MOST_DEPENDENCIES:
            message = f"Too many: {len(needed)}: must have at most {MOST_DEPENDENCIES} items"
            yield Cause(f"{at}.dependsOn", message, "FieldValueTooMany")
    in_order = dig(spec, "startupPolicy", "startupPolicyOrder") == "InOrder"
    if in_order and any("dependsOn" in r for r in spec.get("replicatedJobs") or ()):
        message = "Invalid value: StartupPolicy and DependsOn APIs are mutually exclusive"
        yield Cause("spec", message)


def _groups(spec: Object) -> list[str]:
    return [r.get("name", "") for r in spec.get("replicatedJobs") or ()]


def _names(name: str, spec: Object) -> Iterator[Cause]:
    """Yield a cause for each name of a Job, pod or Service that is not a valid DNS label."""
    subdomain = dig(spec, "network", "subdomain", default="")
    if subdomain and (why := _no_label(subdomain, ".spec.network.subdomain is too long")):
        yield Cause("spec.network.subdomain", f'Invalid value: "{subdomain}": {why}')
    for index, replicated in enumerate(spec.get("replicatedJobs") or ()):
        at = f"spec.replicatedJobs[{index}]"
        group = replicated.get("groupName", "default")
        if why := _no_label(group, ".spec.replicatedJob[].groupName is too long"):
            yield Cause(f"{at}.groupName", f'Invalid value: "{group}": {why}')
        job = f"{name}-{replicated.get('name', '')}-{max(replicated.get('replicas', 1) - 1, 0)}"
        template = replicated["template"]["spec"]
        longest = [(job, "job")]
        if template.get("completionMode", "Indexed") == "Indexed" and "completions" in template:
            longest.append((f"{job}-{template['completions'] - 1}-abcde", "pod"))
        for generated, what in longest:
            too_long = (
                f"JobSet name is too long, {what} names generated for this JobSet will exceed"
                f" {LONGEST} characters"
            )
            if why := _no_label(generated, too_long):
                yield Cause(f"{at}.name", f'Invalid value: "{job}": {why}')


def _no_label(text: str, too_long: str) -> str:
    if len(text) > LONGEST:
        return too_long
    return "" if LABEL.match(text) else LABEL_RULE


def _webhook(name: str, spec: Object) -> Iterator[str]:
    groups, replicated_jobs = _groups(spec), spec.get("replicatedJobs") or []
    if dig(spec, "failurePolicy", "restartStrategy") == "InPlaceRestart":
        yield "the restart strategy InPlaceRestart needs a feature gate that is disabled"
    if replicated_jobs and "dependsOn" in replicated_jobs[0]:
        yield "the first replicatedJob cannot depend on others"
    manager = spec.get("managedBy")
    if manager is not None and (not MANAGER.match(manager) or len(manager) > LONGEST):
        yield f"spec.managedBy {manager} is no path with a domain of at most {LONGEST} characters"
    for index, replicated in enumerate(replicated_jobs):
        pods = dig(replicated, "template", "spec", "parallelism", default=1)
        if pods * replicated.get("replicas", 1) > LARGEST:
            yield f"replicatedJob {groups[index]} has too many pods"
        for needed in replicated.get("dependsOn") or ():
            if needed["name"] not in groups[: index + 1]:
                yield (
                    f"replicatedJob: {replicated['name']} cannot depend on replicatedJob:"
                    f" {needed['name']}"
                )
    for group in dig(spec, "successPolicy", "targetReplicatedJobs", default=[]):
        if group not in groups:
            yield f"invalid replicatedJob name '{group}' does not appear in .spec.ReplicatedJobs"
    yield from _rules(dig(spec, "failurePolicy", "rules", default=[]), groups)
    if held := spec.get("coordinator"):
        yield from _coordinator(name, spec, groups, held)


def _rules(rules: list[Object], groups: list[str]) -> Iterator[str]:
    if any(rule["action"] in GATED for rule in rules):
        yield (
            "RestartJob and RestartJobAndIgnoreMaxRestarts failure policy actions are not"
            " allowed when RestartJob feature gate is disabled"
        )
        return
    names = [rule.get("name") or f"failurePolicyRule{index}" for index, rule in enumerate(rules)]
    for name, rule in zip(names, rules, strict=True):
        if len(name) > LONGEST_RULE_NAME:
            yield f"the name of a failure policy rule has more than {LONGEST_RULE_NAME} characters"
        if not RULE_NAME.match(name):
            yield (
                f"invalid failure policy rule name '{name}', a failure policy rule name must"
                " start with an alphabetic character, optionally followed by a string of"
                " alphanumeric characters or '_,:', and must end with an alphanumeric character or"
                " '_'"
            )
        for group in rule.get("targetReplicatedJobs") or ():
            if group not in groups:
                yield f"replicatedJob {group} of a failure policy rule is not in the JobSet"
        for reason in rule.get("onJobFailureReasons") or ():
            if reason not in REASONS:
                yield (
                    f"invalid job failure reason '{reason}' in failure policy is not a recognized"
                    " job failure reason"
                )
    for name in {n for n in names if names.count(n) > 1}:
        yield f"several failure policy rules have the name '{name}'"


def _coordinator(name: str, spec: Object, groups: list[str], held: Object) -> Iterator[str]:
    group, job, pod = held["replicatedJob"], held.get("jobIndex", 0), held.get("podIndex", 0)
    subdomain = dig(spec, "network", "subdomain", default="") or name
    address = f"{name}-{group}-{job}-{pod}.{subdomain}"
    if len(address) > LONGEST:
        yield f"the address of the coordinator, {address}, is too long for the value of a label"
    if group not in groups:
        yield f"coordinator replicatedJob {group} does not exist"
        return
    replicated = spec["replicatedJobs"][groups.index(group)]
    template = replicated["template"]["spec"]
    if not 0 <= job < replicated.get("replicas", 1):
        yield f"coordinator job index {job} is invalid for replicatedJob {group}"
    elif template.get("completionMode", "Indexed") != "Indexed" or "completions" not in template:
        yield "the coordinator's Job must be Indexed, with a number of completions"
    elif not 0 <= pod < template["completions"]:
        yield f"coordinator pod index {pod} is invalid for replicatedJob {group} job index {job}"


def check_update(name: str, before: Object, after: Object) -> None:
    """Refuse changes of immutable fields.

    Args:
        name: the name of the JobSet.
        before, after: its spec.
    """
    for key in FIXED:
        if key in before and key in after and before[key] != after[key]:
            cause = Cause(f"spec.{key}", "Invalid value: Value is immutable")
            raise invalid(JOB_SETS, name, [cause])
    jobs = clone(after.get("replicatedJobs") or [])
    if before.get("suspend") or after.get("suspend"):
        _as_before(jobs, before.get("replicatedJobs") or [])
    for key, value in (("replicatedJobs", jobs), ("managedBy", after.get("managedBy"))):
        if value != before.get(key):
            text = json.dumps(after.get(key), separators=(",", ":"))
            cause = Cause(f"spec.{key}", f"Invalid value: {text}: field is immutable")
            raise invalid(JOB_SETS, name, [cause], WEBHOOK)


def _as_before(jobs: list[Object], before: list[Object]) -> None:
    """Undo those changes in `jobs` that are allowed while a JobSet is suspended."""
    old = {job["name"]: job for job in before}
    for job in jobs:
        if job["name"] not in old:
            continue
        pod, held = (j["template"]["spec"]["template"] for j in (job, old[job["name"]]))
        for part, key in FOR_QUEUES:
            pod.get(part, {}).pop(key, None)
            if key in (held.get(part) or {}):
                pod.setdefault(part, {})[key] = clone(held[part][key])
            if not pod.get(part) and part not in held:
                pod.pop(part, None)
