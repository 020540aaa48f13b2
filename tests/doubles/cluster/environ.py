"""The environment of a container, as in a real pod, and the addresses of pods.

There is no DNS: host names of pods in variables are replaced by addresses.
"""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable

from doubles.cluster.kinds import CONFIG_MAPS, SECRETS, Resource
from doubles.cluster.objects import Object, dig
from doubles.cluster.store import Store

REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
QUOTED = re.compile(r"^metadata\.(labels|annotations)\['(.*)'\]$")
ATTEMPT, JOB_SET = "jobset.sigs.k8s.io/restart-attempt", "jobset.sigs.k8s.io/jobset-uid"


Lead = Callable[[list[str]], str]


class NotReady(Exception):
    """Raised if a container cannot be created yet; the message is the reason."""


class Addresses:
    """The loopback address of each pod, by host name, assigned before the pod runs. Several pods
    may have one name: `lead` then chooses one of their addresses, which are sorted oldest first."""

    def __init__(self) -> None:
        self._next = [random.randrange(16, 250), random.randrange(256), 1]
        self._by_name: dict[tuple[str, ...], str] = {}

    def of_pod(self, pod: Object) -> str:
        """Return the address of a pod."""
        host, subdomain = pod["spec"].get("hostname"), pod["spec"].get("subdomain")
        if not host or not subdomain:
            return self.fresh()
        return self._named(pod, host, subdomain)

    def with_addresses(self, pod: Object, value: str, lead: Lead) -> str:
        """Replace host names of pods in the same subdomain by addresses, in a variable's value."""
        subdomain = pod["spec"].get("subdomain")
        if not subdomain or f".{subdomain}" not in value:
            return value
        namespace = re.escape(pod["metadata"]["namespace"])
        tail = rf"(?:\.{namespace}(?:\.svc(?:\.cluster\.local)?)?)?"
        pattern = (
            rf"(?<![-\w.])([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)\.{re.escape(subdomain)}{tail}(?![-\w.])"
        )
        return re.sub(pattern, lambda name: lead(self._all_named(pod, name[1], subdomain)), value)

    def _named(self, pod: Object, host: str, subdomain: str) -> str:
        labels = pod["metadata"].get("labels") or {}
        group = (labels.get(JOB_SET, pod["metadata"]["namespace"]), labels.get(ATTEMPT, "0"))
        key = (*group, subdomain, host)
        if key not in self._by_name:
            self._by_name[key] = self.fresh()
        return self._by_name[key]

    def _all_named(self, pod: Object, host: str, subdomain: str) -> list[str]:
        own = self._named(pod, host, subdomain)
        if host == pod["spec"].get("hostname"):
            return [own]
        group = (pod["metadata"].get("labels") or {}).get(JOB_SET, "")
        before = [
            address
            for (of, _, *name), address in self._by_name.items()
            if (of, name) == (group, [subdomain, host]) and address != own
        ]
        return [*before, own]

    def fresh(self) -> str:
        second, third, fourth = self._next
        self._next = [second, third, fourth + 1] if fourth < 254 else [second, (third + 1) % 256, 1]
        return f"127.{second}.{third}.{fourth}"


def command_of(container: Object, env: dict[str, str], image: list[str]) -> list[str]:
    """Return the argv: the command, or else the image's entrypoint, then the arguments."""
    words = [*(container.get("command") or image), *(container.get("args") or ())]
    return [expanded(word, env) for word in words]


def expanded(text: str, env: dict[str, str]) -> str:
    """Replace `$(NAME)` in a text if NAME is a variable, and `$$` by a dollar sign."""

    def one(matched: re.Match[str]) -> str:
        if matched[0] == "$$":
            return "$"
        return env.get(matched[1], matched[0])

    return REFERENCE.sub(one, text)


def container_environ(
    pod: Object, container: Object, store: Store, address: str, host_ip: str
) -> dict[str, str]:
    """Return the variables of a container."""
    env: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        for kind, resource in (("secretRef", SECRETS), ("configMapRef", CONFIG_MAPS)):
            if reference := source.get(kind):
                held = _held(pod, store, resource, reference)
                env |= {source.get("prefix", "") + k: v for k, v in (held or {}).items()}
    for entry in container.get("env") or ():
        value = _value(pod, container, entry, store, env, address, host_ip)
        if value is not None:
            env[entry["name"]] = value
    return env


def _value(
    pod: Object,
    container: Object,
    entry: Object,
    store: Store,
    env: dict[str, str],
    address: str,
    host_ip: str,
) -> str | None:
    if "valueFrom" not in entry:
        return expanded(entry.get("value", ""), env)
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"], address, host_ip)
    if "resourceFieldRef" in source:
        kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
        return str(dig(container, "resources", kind, name, default="0"))
    for kind, resource in (("secretKeyRef", SECRETS), ("configMapKeyRef", CONFIG_MAPS)):
        if reference := source.get(kind):
            held = _held(pod, store, resource, reference)
            if held is None:
                return None
            if reference["key"] not in held:
                if reference.get("optional"):
                    return None
                where = f"{resource.kind} {pod['metadata']['namespace']}/{reference['name']}"
                raise NotReady(f"couldn't find key {reference['key']} in {where}")
            return held[reference["key"]]
    raise NotReady(f"invalid valueFrom of {entry['name']}")


def _held(
    pod: Object, store: Store, resource: Resource, reference: Object
) -> dict[str, str] | None:
    obj = store.get(resource, pod["metadata"]["namespace"], reference["name"])
    if obj is None:
        if reference.get("optional"):
            return None
        raise NotReady(f'{resource.kind.lower()} "{reference["name"]}" not found')
    data = obj.get("data") or {}
    if resource is SECRETS:
        return {k: base64.b64decode(v).decode() for k, v in data.items()}
    return dict(data)


def field_value(pod: Object, path: str, address: str, host_ip: str) -> str:
    """Return the value of a fieldRef."""
    meta = pod["metadata"]
    if matched := QUOTED.match(path):
        return str((meta.get(matched[1]) or {}).get(matched[2], ""))
    plain: dict[str, Callable[[], str]] = {
        "metadata.name": lambda: meta["name"],
        "metadata.namespace": lambda: meta["namespace"],
        "metadata.uid": lambda: meta["uid"],
        "spec.nodeName": lambda: pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": lambda: pod["spec"].get("serviceAccountName", ""),
        "status.podIP": lambda: address,
        "status.podIPs": lambda: address,
        "status.hostIP": lambda: host_ip,
        "status.hostIPs": lambda: host_ip,
    }
    return plain[path]()
