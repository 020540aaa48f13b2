"""What hosts must install: the project's requirements, those of its accelerator, kinetic's own.

In: the folder of the function's file, the versions that the caller has. Out: `Requirements`.

The nearest file has the project's requirements: requirements.txt, or a pyproject.toml that names
dependencies. A pyproject.toml with a `[tool.kinetic]` table comes before a requirements.txt beside
it. Packages for the accelerator (JAX's) depend on the host's accelerator and not on the caller's,
so they are taken from neither, but in the caller's version.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._source import pyproject, requirements_txt
from kinetic._source.editable import Package
from kinetic._source.requirements_txt import Here, Line, Lines, normalize_name
from kinetic.errors import UsageError

OF_THE_ACCELERATOR = ("jax", "jaxlib", "libtpu", "libtpu-nightly")
_EXTRA = {"tpu": "[tpu]", "gpu": "[cuda12]", "cpu": "", "proxy": ""}
OWN = ("cryptography>=42", "grpcio>=1.71", "msgspec>=0.20", "setproctitle>=1.3.3", "xxhash>=3.5")
"""What kinetic itself needs on a host, besides cloudpickle, which must match the caller's."""
OWN_FOR_BUCKETS = ("google-cloud-storage>=3.0",)
ORBAX, ORBAX_FOR_BUCKETS = ("orbax-checkpoint", "orbax"), "gcsfs"
"""What Orbax needs to read and write a bucket, which none of its packages brings along."""
_NAMED = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True)
class Requirements:
    """A list for an installer.

    Attributes:
        lines: options, then requirements.
        source: the file with the project's requirements; "" if there is none.
        sha: SHA-256 of `text`.
    """

    lines: tuple[str, ...]
    source: str
    sha: str

    @property
    def text(self) -> str:
        """The content of a requirements.txt."""
        return _text(self.lines)


@dataclass(frozen=True)
class Declared:
    """The requirements of a project, their file, and the packages that travel with the job."""

    lines: Lines = Lines()
    source: str = ""
    editable: tuple[Package, ...] = ()


def find(start: Path, *, home: Path, editable: Collection[Package] = ()) -> Declared:
    """Find the project's requirements.

    The search goes up from the function's folder and ends at the first folder with a `.git`; home
    and `/` are searched only if it begins there. What is installed editable travels with the job,
    so hosts install only what it requires.

    Raises:
        UsageError: a file cannot be read, or names what hosts cannot install.
    """
    packages = tuple(editable)
    here = Here(
        frozenset(each.name for each in packages), frozenset(each.folder for each in packages)
    )
    for folder in _upward(start, home):
        listed, project = folder / "requirements.txt", folder / "pyproject.toml"
        content = _toml(project) if project.is_file() else {}
        chooses = "kinetic" in content.get("tool", {})
        if listed.is_file() and not chooses:
            return Declared(requirements_txt.parse(listed, _read_file, here), str(listed), packages)
        if content:
            lock = _lock(folder, home)
            parsed = pyproject.parse(
                project, content, lock, _read_file, unlocked=OF_THE_ACCELERATOR, here=here
            )
            if parsed is not None:
                return Declared(parsed, str(project), packages)
    return Declared(editable=packages)


def for_hosts(
    declared: Declared,
    kind: str,
    installed: Mapping[str, str],
    *,
    bucket: bool = True,
    also: Collection[str] = (),
) -> Requirements:
    """Return what hosts that start from a bare image must install.

    Args:
        declared: the project's requirements.
        kind: of accelerator: "tpu", "gpu" or "cpu"; "proxy" for Pathways.
        installed: versions of packages that the caller has, by normalized name.
        bucket: whether the store is a bucket.
        also: requirements of this job, such as a debugger.
    """
    kept: list[Line] = []
    dropped: list[Line] = []
    for line in declared.lines.requirements:
        named = _name(line.text)
        if named == "cloudpickle" and "cloudpickle" in installed:
            continue
        (dropped if named in OF_THE_ACCELERATOR and not line.keep else kept).append(line)
    here = {each.name for each in declared.editable}
    kept = [line for line in kept if _name(line.text) not in here]
    there = {_name(line.text) for line in kept}
    kept += [
        Line(text)
        for each in declared.editable
        for text in each.requires
        if _name(text) not in {*there, *here, *OF_THE_ACCELERATOR, "cloudpickle"}
    ]
    there = {_name(line.text) for line in kept}
    lines = [line.text for line in kept]
    if "jax" not in there:
        lines.append(f"jax{_EXTRA[kind]}{_jax_version(dropped, installed)}")
    if kind == "proxy" and "pathwaysutils" not in there:
        lines.append(_as_here("pathwaysutils", installed))
    if "keras" in installed and "keras" not in there:
        lines.append(f"keras=={installed['keras']}")
    if bucket and not there.isdisjoint(ORBAX) and ORBAX_FOR_BUCKETS not in there:
        lines.append(ORBAX_FOR_BUCKETS)
    options = dict.fromkeys(declared.lines.options)
    return _make_requirements((*options, *lines, *_own(installed, bucket), *also), declared.source)


def of_kinetic(
    installed: Mapping[str, str], *, bucket: bool = True, also: Collection[str] = ()
) -> Requirements:
    """Return what kinetic needs in an image that has the project's requirements."""
    return _make_requirements((*_own(installed, bucket), *also), "")


def _own(installed: Mapping[str, str], bucket: bool) -> tuple[str, ...]:
    pickle = _as_here("cloudpickle", installed, otherwise=">=3.0")
    return (pickle, *OWN, *(OWN_FOR_BUCKETS if bucket else ()))


def _as_here(name: str, installed: Mapping[str, str], *, otherwise: str = "") -> str:
    """A requirement that pins the caller's version."""
    return f"{name}=={installed[name]}" if name in installed else f"{name}{otherwise}"


def _make_requirements(lines: Collection[str], source: str) -> Requirements:
    unique = tuple(dict.fromkeys(lines))
    return Requirements(unique, source, hashlib.sha256(_text(unique).encode()).hexdigest())


def _text(lines: Collection[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _jax_version(dropped: Collection[Line], installed: Mapping[str, str]) -> str:
    """The caller's version; "" if there is none, or no index has it: the project then decides."""
    version = installed.get("jax", "").partition("+")[0]
    if version and "dev" not in version:
        return f"=={version}"
    from packaging.requirements import Requirement

    asked = (line.text for line in dropped if _name(line.text) == "jax" and "://" not in line.text)
    return next((str(Requirement(text).specifier) for text in asked), "")


def _name(text: str) -> str:
    named = _NAMED.match(text)
    return normalize_name(named[1]) if named and "://" not in text.partition("@")[0] else ""


def _upward(start: Path, home: Path) -> Iterator[Path]:
    for folder in (start, *start.parents):
        if folder != start and folder in (home, Path(folder.anchor)):
            return
        yield folder
        if (folder / ".git").exists():
            return


def _lock(folder: Path, home: Path) -> Mapping[str, Any] | None:
    """The uv.lock of the project, or of the workspace that it is a member of."""
    for each in _upward(folder, home):
        if (each / "uv.lock").is_file():
            return _toml(each / "uv.lock")
    return None


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_file(file))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not valid TOML: {error}.") from error


def _read_file(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{file} cannot be read: {reason}. It lists what hosts must install."
        ) from error
