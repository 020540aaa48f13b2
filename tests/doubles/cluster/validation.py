"""Validation of objects: schemas, and rules that schemas cannot express.

Unknown fields are removed, and their paths returned. Core objects are checked with Kubernetes' own
schemas (kubernetes-validate), JobSets in `jobset_rules`.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from doubles.cluster import jobset_rules
from doubles.cluster.kinds import JOB_SETS, JOBS, PODS, Resource
from doubles.cluster.objects import QUANTITY, Object, clone, dig
from doubles.cluster.problems import Cause, bad_request, invalid

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.',"
    " and must start and end with an alphanumeric character (e.g. 'example.com', regex used for"
    " validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LONGEST_ANNOTATIONS, LONGEST_OBJECT = 262_144, 1_500_000


def unknown_fields(resource: Resource, obj: Object) -> list[str]:
    """Remove fields that the API does not know, and return their paths; refuse wrong types."""
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
            allowed = error.schema.get("properties", {})
            for name in [n for n in error.instance if n not in allowed]:
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
    unknown = jobset_rules.unknown_fields(obj)
    for index, replicated in enumerate((obj.get("spec") or {}).get("replicatedJobs") or ()):
        template = replicated.get("template")
        if isinstance(template, dict):
            at = f"spec.replicatedJobs[{index}].template"
            unknown += _prune(_template_validator(), JOB_SETS, template, at)
    return unknown


@functools.cache
def _template_validator() -> Any:
    """Return the schema validator of a Job's spec, which a JobSet's template also has."""
    job = _schema(JOBS)
    properties = {k: v for k, v in job["properties"].items() if k in ("metadata", "spec")}
    schema = {k: v for k, v in job.items() if k.startswith("$")} | {"type": "object"}
    return _checking(schema | {"properties": properties, "additionalProperties": False})


def check(resource: Resource, obj: Object) -> None:
    """Refuse an invalid object; call this before defaults are filled in."""
    meta = obj["metadata"]
    name = meta.get("name") or meta.get("generateName") or ""
    causes: list[Cause] = []
    if not name:
        causes.append(_required("metadata.name", "name or generateName is required"))
    elif meta.get("name") and (not NAME.match(name) or len(name) > 253):
        causes.append(Cause("metadata.name", f'Invalid value: "{name}": {NAME_RULE}'))
    annotations = sum(len(k) + len(v) for k, v in (meta.get("annotations") or {}).items())
    if annotations > LONGEST_ANNOTATIONS:
        message = f"Too long: may not be more than {LONGEST_ANNOTATIONS} bytes"
        causes.append(Cause("metadata.annotations", message, "FieldValueTooLong"))
    for key, value in (meta.get("labels") or {}).items():
        if len(value) > 63 or (
            value and not re.match(r"^[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?$", value)
        ):
            message = f'Invalid value: "{value}": a valid label must be at most 63 characters'
            causes.append(Cause(f"metadata.labels[{key}]", message))
    if resource is JOBS:
        causes += _job(name, obj.get("spec") or {})
    elif resource is PODS:
        causes += _pod_spec("spec", obj.get("spec") or {}, resource)
    elif resource is JOB_SETS:
        jobset_rules.check(name, obj)
    if causes:
        raise invalid(resource, name, causes)


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, f"Required value: {why}" if why else "Required value", "FieldValueRequired")


def _job(name: str, spec: Object) -> list[Cause]:
    causes: list[Cause] = []
    if len(name) > 63:
        message = f'Invalid value: "{name}": must be no more than 63 bytes'
        causes += [Cause("spec.template.labels", message)] * 2
    if spec.get("completionMode") == "Indexed":
        if spec.get("completions") is None:
            why = "when completion mode is Indexed"
            causes.append(_required("spec.completions", why))
        elif len(f"{name}-{spec['completions'] - 1}") > 63:
            message = f'Invalid value: "{name}": will not able to create pod with invalid DNS label'
            causes.append(Cause("metadata.name", f"{message}: {name}-{spec['completions'] - 1}"))
    for key in ("parallelism", "completions", "backoffLimit", "ttlSecondsAfterFinished"):
        if (value := spec.get(key)) is not None and value < 0:
            message = f"Invalid value: {value}: must be greater than or equal to 0"
            causes.append(Cause(f"spec.{key}", message))
    template = dig(spec, "template", "spec", default={})
    if template.get("restartPolicy") not in ("OnFailure", "Never"):
        why = 'valid values: "OnFailure", "Never"'
        causes.append(_required("spec.template.spec.restartPolicy", why))
    if spec.get("podFailurePolicy") and template.get("restartPolicy") != "Never":
        message = (
            f'Invalid value: "{template.get("restartPolicy")}": only "Never" is supported when'
        )
        causes.append(
            Cause("spec.template.spec.restartPolicy", f"{message} podFailurePolicy is specified")
        )
    names = {c.get("name") for c in template.get("containers") or ()}
    for index, rule in enumerate(dig(spec, "podFailurePolicy", "rules", default=[])):
        wanted = dig(rule, "onExitCodes", "containerName")
        if wanted is not None and wanted not in names:
            field = f"spec.podFailurePolicy.rules[{index}].onExitCodes.containerName"
            message = (
                f'Invalid value: "{wanted}": must be one of the container or initContainer names'
            )
            causes.append(Cause(field, f"{message} in the pod template"))
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
                message = 'Invalid value: "": may not be specified when `value` is not empty'
                causes.append(Cause(f"{where}.env[{position}].valueFrom", message))
        for position, mount in enumerate(container.get("volumeMounts") or ()):
            if mount["name"] not in volumes:
                message = f'Not found: "{mount["name"]}"'
                field = f"{where}.volumeMounts[{position}].name"
                causes.append(Cause(field, message, "FieldValueNotFound"))
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


def check_update(resource: Resource, old: Object, new: Object) -> None:
    """Refuse changes of immutable fields."""
    name = old["metadata"]["name"]
    causes: list[Cause] = []
    before, after = old.get("spec") or {}, new.get("spec") or {}
    if resource is JOBS:
        for key in ("template", "selector", "completionMode", "podFailurePolicy"):
            first, second = clone(before.get(key)), clone(after.get(key))
            if key == "template" and before.get("suspend"):
                continue  # Kueue may change selectors of a suspended Job.
            if first != second:
                text = json.dumps(second)
                causes.append(Cause(f"spec.{key}", f"Invalid value: {text}: field is immutable"))
        if causes:
            raise invalid(resource, name, causes)
    elif resource is JOB_SETS:
        jobset_rules.check_update(name, before, after)
