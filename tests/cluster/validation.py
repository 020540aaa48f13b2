"""Whether the API takes an object: its schema, and what a schema cannot say.

In: a resource and an object that a client sent. Out: the unknown fields (which are removed), or
`Refused`. Core objects are checked against Kubernetes' own schemas (kubernetes-validate), JobSets
against the rules of their definition and their webhook.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from cluster.kinds import JOB_SETS, JOBS, PODS, Resource
from cluster.objects import QUANTITY, Object, clone, dig
from cluster.problems import Cause, bad_request, invalid

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.',"
    " and must start and end with an alphanumeric character (e.g. 'example.com', regex used for"
    " validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
RULE_NAME = re.compile(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded")
REASONS += ("PodFailurePolicy",)
ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
GATED = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
LONGEST_ANNOTATIONS, LONGEST_OBJECT = 262_144, 1_500_000
JOB_SET_FIELDS = {
    "replicatedJobs",
    "network",
    "successPolicy",
    "failurePolicy",
    "startupPolicy",
    "suspend",
    "coordinator",
    "managedBy",
    "ttlSecondsAfterFinished",
    "volumeClaimPolicies",
}
REPLICATED_FIELDS = {"name", "groupName", "template", "replicas", "dependsOn"}
UNCHECKED = (
    "some validation rules were not checked because the object was invalid; correct the existing"
    " errors to complete validation"
)
WEBHOOK = 'admission webhook "vjobset.kb.io" denied the request: '


def unknown_fields(resource: Resource, obj: Object) -> list[str]:
    """Remove fields that the API does not know. Their paths. Raises for values of a wrong type."""
    if resource is JOB_SETS:
        return _job_set_fields(obj)
    validator = _validator(resource)
    return _prune(validator, resource, obj, "") if validator else []


@functools.cache
def _folder() -> str:
    from kubernetes_validate import utils

    return f"kubernetes-json-schema/v{utils.latest_version()}-local-strict"


@functools.cache
def _schema(resource: Resource) -> Any:
    from kubernetes_validate import utils

    api = resource.version
    if resource.group:
        api = f"{resource.group.partition('.')[0]}-{resource.version}"
    try:
        return utils.schema_contents(f"{_folder()}/{resource.kind.lower()}-{api}.json", "")
    except FileNotFoundError:
        return None


@functools.cache
def _validator(resource: Resource) -> Any:
    schema = _schema(resource)
    return None if schema is None else _checking(schema)


def _checking(schema: Any) -> Any:
    import jsonschema
    from referencing import Registry
    from referencing import Resource as Document

    draft = Document.from_contents(schema, default_specification=_draft())
    registry = _definitions() @ (draft @ Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


def _draft() -> Any:
    import referencing.jsonschema

    return referencing.jsonschema.DRAFT202012


@functools.cache
def _definitions() -> Any:
    from kubernetes_validate import utils
    from referencing import Resource as Document

    return Document.from_contents(utils.schema_contents(f"{_folder()}/_definitions.json", ""))


def _prune(validator: Any, resource: Resource, obj: Object, prefix: str) -> list[str]:
    unknown: list[str] = []
    for error in sorted(validator.iter_errors(obj), key=lambda e: list(map(str, e.path))):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.path)
        path = (prefix + path).strip(".")
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for name in [n for n in error.instance if n not in known]:
                del error.instance[name]
                unknown.append(f"{path}.{name}".strip("."))
        elif error.validator in ("type", "oneOf", "anyOf", "format"):
            kind = resource.kind
            word = {str: "string", bool: "bool", int: "number", dict: "object", list: "array"}
            got = word.get(type(error.instance), "value")
            raise bad_request(
                f'{kind} in version "{resource.version}" cannot be handled as a {kind}: json:'
                f" cannot unmarshal {got} into Go struct field {path} of type"
                f" {error.schema.get('type', ['?'])[0]}"
            )
    return unknown


def _job_set_fields(obj: Object) -> list[str]:
    unknown = _drop(obj, {"apiVersion", "kind", "metadata", "spec", "status"}, "")
    spec = obj.get("spec") or {}
    unknown += _drop(spec, JOB_SET_FIELDS, "spec.")
    for index, replicated in enumerate(spec.get("replicatedJobs") or ()):
        at = f"spec.replicatedJobs[{index}]"
        unknown += _drop(replicated, REPLICATED_FIELDS, f"{at}.")
        template = replicated.get("template")
        if isinstance(template, dict):
            unknown += _prune(_template_validator(), JOB_SETS, template, f"{at}.template")
    return unknown


@functools.cache
def _template_validator() -> Any:
    """The schema of a Job's spec, which a JobSet's template has too."""
    job = _schema(JOBS)
    properties = {k: v for k, v in job["properties"].items() if k in ("metadata", "spec")}
    schema = {k: v for k, v in job.items() if k.startswith("$")} | {"type": "object"}
    return _checking(schema | {"properties": properties, "additionalProperties": False})


def _drop(obj: Object, known: set[str], prefix: str) -> list[str]:
    unknown = [name for name in obj if name not in known]
    for name in unknown:
        del obj[name]
    return [prefix + name for name in unknown]


def check(resource: Resource, obj: Object) -> None:
    """Refuse what is invalid. Called before defaults are filled in."""
    meta = obj["metadata"]
    name = meta.get("name") or meta.get("generateName") or ""
    causes: list[Cause] = []
    if not name:
        causes.append(_required("metadata.name", "name or generateName is required"))
    elif meta.get("name") and (not NAME.match(name) or len(name) > 253):
        causes.append(Cause("metadata.name", f'Invalid value: "{name}": {NAME_RULE}'))
    annotations = sum(len(k) + len(v) for k, v in (meta.get("annotations") or {}).items())
    if annotations > LONGEST_ANNOTATIONS:
        said = f"Too long: may not be more than {LONGEST_ANNOTATIONS} bytes"
        causes.append(Cause("metadata.annotations", said, "FieldValueTooLong"))
    for key, value in (meta.get("labels") or {}).items():
        if len(value) > 63 or (
            value and not re.match(r"^[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?$", value)
        ):
            said = f'Invalid value: "{value}": a valid label must be at most 63 characters'
            causes.append(Cause(f"metadata.labels[{key}]", said))
    if resource is JOBS:
        causes += _job(name, obj.get("spec") or {})
    elif resource is PODS:
        causes += _pod_spec("spec", obj.get("spec") or {}, resource)
    elif resource is JOB_SETS:
        _job_set(name, obj)
    if causes:
        raise invalid(resource, name, causes)


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, f"Required value: {why}" if why else "Required value", "FieldValueRequired")


def _job(name: str, spec: Object) -> list[Cause]:
    causes: list[Cause] = []
    if len(name) > 63:
        said = f'Invalid value: "{name}": must be no more than 63 bytes'
        causes += [Cause("spec.template.labels", said)] * 2
    if spec.get("completionMode") == "Indexed":
        if spec.get("completions") is None:
            why = "when completion mode is Indexed"
            causes.append(_required("spec.completions", why))
        elif len(f"{name}-{spec['completions'] - 1}") > 63:
            said = f'Invalid value: "{name}": will not able to create pod with invalid DNS label'
            causes.append(Cause("metadata.name", f"{said}: {name}-{spec['completions'] - 1}"))
    for key in ("parallelism", "completions", "backoffLimit", "ttlSecondsAfterFinished"):
        if (value := spec.get(key)) is not None and value < 0:
            said = f"Invalid value: {value}: must be greater than or equal to 0"
            causes.append(Cause(f"spec.{key}", said))
    template = dig(spec, "template", "spec", default={})
    if template.get("restartPolicy") not in ("OnFailure", "Never"):
        why = 'valid values: "OnFailure", "Never"'
        causes.append(_required("spec.template.spec.restartPolicy", why))
    if spec.get("podFailurePolicy") and template.get("restartPolicy") != "Never":
        said = f'Invalid value: "{template.get("restartPolicy")}": only "Never" is supported when'
        causes.append(
            Cause("spec.template.spec.restartPolicy", f"{said} podFailurePolicy is specified")
        )
    names = {c.get("name") for c in template.get("containers") or ()}
    for index, rule in enumerate(dig(spec, "podFailurePolicy", "rules", default=[])):
        wanted = dig(rule, "onExitCodes", "containerName")
        if wanted is not None and wanted not in names:
            field = f"spec.podFailurePolicy.rules[{index}].onExitCodes.containerName"
            said = f'Invalid value: "{wanted}": must be one of the container or initContainer names'
            causes.append(Cause(field, f"{said} in the pod template"))
    return causes + _pod_spec("spec.template.spec", template, JOBS)


def _pod_spec(at: str, spec: Object, resource: Resource) -> list[Cause]:
    causes: list[Cause] = []
    if not spec.get("containers"):
        causes.append(_required(f"{at}.containers"))
    volumes = {v["name"] for v in spec.get("volumes") or ()}
    for index, container in enumerate(spec.get("containers") or ()):
        where = f"{at}.containers[{index}]"
        if not container.get("name"):
            causes.append(_required(f"{where}.name"))
        if not container.get("image"):
            causes.append(_required(f"{where}.image"))
        causes += _resources(where, container.get("resources") or {}, resource)
        for position, entry in enumerate(container.get("env") or ()):
            if "value" in entry and entry["value"] and "valueFrom" in entry:
                said = 'Invalid value: "": may not be specified when `value` is not empty'
                causes.append(Cause(f"{where}.env[{position}].valueFrom", said))
        for position, mount in enumerate(container.get("volumeMounts") or ()):
            if mount["name"] not in volumes:
                said = f'Not found: "{mount["name"]}"'
                field = f"{where}.volumeMounts[{position}].name"
                causes.append(Cause(field, said, "FieldValueNotFound"))
    return causes


def _resources(where: str, resources: Object, resource: Resource) -> list[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for amount in (*limits.values(), *requests.values()):
        if not QUANTITY.match(str(amount)):
            kind = resource.kind
            raise bad_request(
                f'{kind} in version "{resource.version}" cannot be handled as a {kind}: quantities'
                f" must match the regular expression '{QUANTITY.pattern}'"
            )
    return [
        Cause(
            f"{where}.resources.requests",
            f'Invalid value: "{amount}": must be equal to {name} limit of {limits.get(name)}',
        )
        for name, amount in requests.items()
        if "/" in name and limits.get(name) != amount
    ]


def _job_set(name: str, obj: Object) -> None:
    """The definition's schema first, then the webhook."""
    spec = obj.get("spec") or {}
    causes: list[Cause] = []
    if (ttl := spec.get("ttlSecondsAfterFinished")) is not None and ttl < 0:
        field = "spec.ttlSecondsAfterFinished"
        said = f"Invalid value: {ttl}: {field} in body should be greater than or equal to 0"
        causes.append(Cause(field, said))
    for field, value, known in (
        ("spec.successPolicy.operator", dig(spec, "successPolicy", "operator"), ("All", "Any")),
        (
            "spec.startupPolicy.startupPolicyOrder",
            dig(spec, "startupPolicy", "startupPolicyOrder"),
            ("AnyOrder", "InOrder"),
        ),
        *(
            (f"spec.failurePolicy.rules[{i}].action", rule.get("action"), ACTIONS + GATED)
            for i, rule in enumerate(dig(spec, "failurePolicy", "rules", default=[]))
        ),
    ):
        if value is not None and value not in known:
            options = ", ".join(f'"{k}"' for k in known)
            said = f'Unsupported value: "{value}": supported values: {options}'
            causes.append(Cause(field, said, "FieldValueNotSupported"))
            causes.append(Cause("<nil>", f"Invalid value: null: {UNCHECKED}"))
    groups = [r.get("name", "") for r in spec.get("replicatedJobs") or ()]
    for index, group in enumerate(groups):
        if group in groups[:index]:
            said = f'Duplicate value: {{"name":"{group}"}}'
            causes.append(Cause(f"spec.replicatedJobs[{index}]", said, "FieldValueDuplicate"))
        if not dig(spec, "replicatedJobs", index, "template", "spec"):
            causes.append(_required(f"spec.replicatedJobs[{index}].template"))
    if causes:
        raise invalid(JOB_SETS, name, causes)
    if causes := _names(name, spec) + _webhook(spec, groups):
        raise invalid(JOB_SETS, name, causes, WEBHOOK)


def _names(name: str, spec: Object) -> list[Cause]:
    causes: list[Cause] = []
    for index, replicated in enumerate(spec.get("replicatedJobs") or ()):
        field = f"spec.replicatedJobs[{index}].name"
        last = replicated.get("replicas", 1) - 1
        job = f"{name}-{replicated.get('name', '')}-{max(last, 0)}"
        pods = dig(replicated, "template", "spec", "completions", default=1)
        for length, what in ((len(job), "job"), (len(f"{job}-{pods - 1}-abcde"), "pod")):
            if length > 63:
                said = f'Invalid value: "{job}": JobSet name is too long, {what} names generated'
                causes.append(Cause(field, f"{said} for this JobSet will exceed 63 characters"))
    return causes


def _webhook(spec: Object, groups: list[str]) -> list[Cause]:
    said: list[str] = []
    for group in dig(spec, "successPolicy", "targetReplicatedJobs", default=[]):
        if group not in groups:
            said.append(
                f"invalid replicatedJob name '{group}' does not appear in .spec.ReplicatedJobs"
            )
    for index, rule in enumerate(dig(spec, "failurePolicy", "rules", default=[])):
        rule_name = rule.get("name") or f"failurePolicyRule{index}"
        if not RULE_NAME.match(rule_name):
            said.append(
                f"invalid failure policy rule name '{rule_name}', a failure policy rule name must"
                " start with an alphabetic character, optionally followed by a string of"
                " alphanumeric characters or '_,:', and must end with an alphanumeric character or"
                " '_'"
            )
        if rule.get("action") in GATED:
            said.append(
                "RestartJob and RestartJobAndIgnoreMaxRestarts failure policy actions are not"
                " allowed when RestartJob feature gate is disabled"
            )
        for reason in rule.get("onJobFailureReasons") or ():
            if reason not in REASONS:
                said.append(
                    f"invalid job failure reason '{reason}' in failure policy is not a recognized"
                    " job failure reason"
                )
    for replicated in spec.get("replicatedJobs") or ():
        for needed in replicated.get("dependsOn") or ():
            before = groups[: groups.index(replicated["name"])]
            if needed["name"] not in before:
                said.append(
                    f"replicatedJob: {replicated['name']} cannot depend on replicatedJob:"
                    f" {needed['name']}"
                )
    if held := spec.get("coordinator"):
        said += _coordinator(spec, groups, held)
    return [Cause("<nil>", f"Internal error: {text}", "InternalError") for text in said]


def _coordinator(spec: Object, groups: list[str], held: Object) -> list[str]:
    group, job, pod = held["replicatedJob"], held.get("jobIndex", 0), held.get("podIndex", 0)
    if group not in groups:
        return [f"coordinator replicatedJob {group} does not exist"]
    replicated = spec["replicatedJobs"][groups.index(group)]
    if job >= replicated.get("replicas", 1):
        return [f"coordinator job index {job} is invalid for replicatedJob {group}"]
    if pod >= dig(replicated, "template", "spec", "completions", default=1):
        return [f"coordinator pod index {pod} is invalid for replicatedJob {group} job index {job}"]
    return []


def check_update(resource: Resource, old: Object, new: Object) -> None:
    """Refuse changes of what cannot change."""
    name = old["metadata"]["name"]
    causes: list[Cause] = []
    before, after = old.get("spec") or {}, new.get("spec") or {}
    if resource is JOBS:
        for key in ("template", "selector", "completionMode", "podFailurePolicy"):
            first, second = clone(before.get(key)), clone(after.get(key))
            if key == "template" and before.get("suspend"):
                continue  # Kueue may set selectors then
            if first != second:
                text = json.dumps(second)
                causes.append(Cause(f"spec.{key}", f"Invalid value: {text}: field is immutable"))
        if causes:
            raise invalid(resource, name, causes)
    elif resource is JOB_SETS:
        if before.get("replicatedJobs") != after.get("replicatedJobs") and not before.get(
            "suspend"
        ):
            text = json.dumps(after.get("replicatedJobs"), separators=(",", ":"))
            cause = Cause("spec.replicatedJobs", f"Invalid value: {text}: field is immutable")
            raise invalid(resource, name, [cause], WEBHOOK)
        for key in ("failurePolicy", "successPolicy", "network", "coordinator", "managedBy"):
            if before.get(key) is not None and before.get(key) != after.get(key):
                cause = Cause(f"spec.{key}", "Invalid value: Value is immutable")
                raise invalid(resource, name, [cause])
