"""Discovery: the groups, versions and resources of the API, and the resource that a path names."""

from __future__ import annotations

from doubles.cluster import problems
from doubles.cluster.kinds import ALWAYS, JOB_SETS, PODS, Resource
from doubles.cluster.objects import Object
from doubles.cluster.server import Answer

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"}
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


class Target:
    """The resource, namespace and object in a path."""

    def __init__(self, group: str, version: str, namespace: str, rest: list[str]) -> None:
        self.group, self.version, self.namespace = group, version, namespace
        self.plural, self.name, self.sub = ([*rest, "", "", ""])[:3]
        self.key = (group, version, self.plural)

    @property
    def noun(self) -> str:
        return self.plural + (f"/{self.sub}" if self.sub else "")

    def as_resource(self) -> Resource:
        return Resource(self.group, self.version, self.plural, self.plural)


def target_of(parts: list[str]) -> Target:
    match parts:
        case ["api", version, "namespaces", namespace, plural, *rest] if plural != "status":
            return Target("", version, namespace, [plural, *rest])
        case ["api", version, plural, *rest]:
            return Target("", version, "", [plural, *rest])
        case ["apis", group, version, "namespaces", namespace, plural, *rest]:
            return Target(group, version, namespace, [plural, *rest])
        case ["apis", group, version, plural, *rest]:
            return Target(group, version, "", [plural, *rest])
    return Target("", "", "", [])


class Discovery:
    """The resources that are installed at the moment."""

    def __init__(self) -> None:
        self.custom: set[Resource] = {JOB_SETS}
        """The custom resources whose definitions are installed."""

    def _resources(self) -> list[Resource]:
        return [*ALWAYS, *sorted(self.custom, key=lambda r: r.full)]

    def installed(self, resource: Resource) -> bool:
        return not resource.custom or resource in self.custom

    def resource(self, target: Target) -> Resource:
        for resource in self._resources():
            if (resource.group, resource.version, resource.plural) == target.key:
                return resource
        has_group = any((r.group, r.version) == target.key[:2] for r in self._resources())
        if not has_group or target.group not in ("", "batch"):
            raise problems.page_not_found()
        message = "the server could not find the requested resource"
        raise problems.refusal(404, "NotFound", message, details={})

    def answer(self, parts: list[str]) -> Answer:
        match parts:
            case ["version"]:
                return Answer(200, VERSION)
            case ["healthz" | "readyz" | "livez", *_]:
                return Answer(200, "ok")
            case ["api"]:
                return Answer(200, {"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                groups = sorted({r.group for r in self._resources() if r.group})
                listed = [self._group(name) for name in groups]
                return Answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
            case ["apis", group]:
                return Answer(200, {"kind": "APIGroup", "apiVersion": "v1"} | self._group(group))
            case ["api", version]:
                return self._list_resources("", version)
            case ["apis", group, version]:
                return self._list_resources(group, version)
        raise problems.page_not_found()

    def _group(self, name: str) -> Object:
        versions = sorted({r.version for r in self._resources() if r.group == name})
        if not versions:
            raise problems.page_not_found()
        entries = [{"groupVersion": f"{name}/{v}", "version": v} for v in versions]
        return {"name": name, "versions": entries, "preferredVersion": entries[0]}

    def _list_resources(self, group: str, version: str) -> Answer:
        resources = [r for r in self._resources() if (r.group, r.version) == (group, version)]
        if not resources:
            raise problems.page_not_found()
        listed: list[Object] = []
        for r in resources:
            entry = {"name": r.plural, "singularName": r.kind.lower(), "kind": r.kind}
            listed.append(entry | {"namespaced": r.namespaced, "verbs": VERBS})
            if r is PODS:
                log = {"name": "pods/log", "singularName": "", "kind": "Pod", "namespaced": True}
                listed.append(log | {"verbs": ["get"]})
        body = {"kind": "APIResourceList", "apiVersion": "v1"}
        group_version = f"{group}/{version}" if group else version
        return Answer(200, body | {"groupVersion": group_version, "resources": listed})
