"""Volumes of pods as folders of this machine, and the environment variables that name them."""

from __future__ import annotations

import base64
from pathlib import Path

from doubles.cluster.environ import expanded
from doubles.cluster.kinds import SECRETS
from doubles.cluster.objects import Object
from doubles.cluster.store import Store


def make_volumes(
    obj: Object, container: Object, env: dict[str, str], folder: Path, store: Store
) -> dict[str, str]:
    """Create a folder for each emptyDir and Secret of a pod. Return the container's variables that
    name mount paths, with the folders in their place: pods share this machine's file system."""
    volumes = {v["name"]: v for v in obj["spec"].get("volumes") or ()}
    led = {}
    own_names = {entry["name"] for entry in container.get("env") or ()}
    for mount in container.get("volumeMounts") or ():
        volume, own = volumes[mount["name"]], folder / "volumes" / mount["name"]
        for name in own_names & env.keys():
            hidden = f"{mount['mountPath']}/" in env[name]
            assert not hidden, f"the pod mounts a volume over {name}={env[name]}"
        if "secret" in volume:
            _fill(own, volume["secret"], obj["metadata"]["namespace"], store)
        elif "emptyDir" not in volume:
            continue
        own /= expanded(mount.get("subPathExpr", ""), env)
        own.mkdir(parents=True, exist_ok=True)
        led |= {name: str(own) for name, value in env.items() if value == mount["mountPath"]}
    return led


def _fill(folder: Path, source: Object, namespace: str, store: Store) -> None:
    held = store.get(SECRETS, namespace, source["secretName"])
    assert held is not None
    for item in source["items"]:
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(held["data"][item["key"]]))
