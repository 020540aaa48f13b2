"""Packages that calls of a session require and its hosts lack: each host installs them once.

They go into a folder of the host, so nothing that is installed changes under a kept process or
another job of this machine. A call that needs another version of an installed package fails.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from kinetic._core import layout
from kinetic._core.plan import Blob, Plan
from kinetic._store.base import Store
from kinetic.errors import SetupFailed

_CHANGES = re.compile(r"(?m)^ ([-+]) (\S+?)==(\S+)")


class AddedPackages:
    """The packages that a host has installed for calls of its session.

    Attributes:
        folder: the folder that has them; it exists once there are any.
    """

    def __init__(self, folder: Path, requirements: Blob | None) -> None:
        """Make an empty set; the host's environment has the packages of `requirements`."""
        self.folder = folder
        self._met = {requirements, None}

    def add(self, plan: Plan, store: Store) -> str:
        """Install what a call requires and this host lacks. Return the names and versions of what
        was missing, as the end of a sentence; "" for none.

        Raises:
            SetupFailed: a package cannot be installed, or conflicts with an installed one.
        """
        if plan.requirements is None or plan.requirements in self._met:
            return ""
        from kinetic._host import bootstrap  # few calls add packages

        text = store.get(layout.blob(plan.requirements.digest)).decode()
        try:
            Path(bootstrap.HOME).mkdir(mode=0o700, exist_ok=True)
            added = self._install(text, plan.job_id)
        except bootstrap.Failed as error:
            raise SetupFailed(
                "The packages that this call requires and its session lacks were not installed: "
                f"{error.args[1]}",
                job_id=plan.job_id,
            ) from error
        self._met.add(plan.requirements)
        return ", ".join(added)

    def _install(self, text: str, job_id: str) -> list[str]:
        from kinetic._host import bootstrap

        environment = self.folder.with_name(f"{self.folder.name}-described")
        self._describe(environment)
        listed = bootstrap.write(f"{environment}/requirements.txt", text)
        command = [bootstrap.find_uv(), "pip", "install", "--no-progress", "--color=never"]
        command += [*bootstrap.uv_options(text), "-r", listed]
        output = bootstrap.run([*command, "--dry-run", "-p", f"{environment}/bin/python"])
        changes = _CHANGES.findall(output)
        installed = {name: version for sign, name, version in changes if sign == "-"}
        added = {name: version for sign, name, version in changes if sign == "+"}
        for name in installed.keys() & added.keys():
            raise SetupFailed(
                f"This call needs {name} {added[name]}, and the hosts of its session have {name} "
                f"{installed[name]}. Require that version, or stop the session and start it again.",
                job_id=job_id,
            )
        if added:
            bootstrap.write(listed, bootstrap.pin_missing(text, output))
            where = ["--target", str(self.folder), "-p", sys.executable]
            bootstrap.run([*command, "--no-deps", *where])
        return [f"{name} {version}" for name, version in added.items()]

    def _describe(self, environment: Path) -> None:
        """Make an environment with the metadata of all installed packages and no files: uv reads
        one folder only, and this host imports from several."""
        import venv

        venv.create(environment, symlinks=True, clear=True)
        root = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
        for package in metadata.distributions(path=[*sys.path, str(self.folder)]):
            about = root / f"{package.name.replace('-', '_')}-{package.version}.dist-info"
            about.mkdir(exist_ok=True)
            for file in ("METADATA", "direct_url.json"):
                if content := package.read_text(file):
                    (about / file).write_text(content)
