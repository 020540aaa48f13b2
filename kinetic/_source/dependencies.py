"""Requirements that hosts must install: the project's, those of its accelerator, kinetic's own.

In: the folder of the function's file, the versions that the caller has. Out: `Requirements`.

The project's requirements are in the nearest requirements.txt, or pyproject.toml that declares
dependencies. A pyproject.toml with a `[tool.kinetic]` table wins over a requirements.txt next to
it. JAX's packages depend on the host's accelerator, so both files' lines for them are ignored;
hosts install them in the caller's version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._source import pyproject, requirements_txt, uv_lock
from kinetic._source.editable import Package
from kinetic._source.pyproject import Pyproject, find_table
from kinetic._source.requirements_txt import KEEP_MARK, find_name

ACCELERATOR_PACKAGES = ("jax", "jaxlib", "libtpu", "libtpu-nightly")
_EXTRA = {"tpu": "[tpu]", "gpu": "[cuda12]", "cpu": "", "proxy": ""}
OWN = ("cryptography>=42", "grpcio>=1.80", "setproctitle>=1.3.3", "xxhash>=3.5")
"""Requirements of kinetic itself on a host, besides cloudpickle, which must match the caller's."""
OWN_FOR_BUCKETS = ("google-cloud-storage>=3.0",)
ORBAX, ORBAX_FOR_BUCKETS = ("orbax-checkpoint", "orbax"), "gcsfs"
"""Names of Orbax's package, and a package that it needs for buckets but does not install."""

_PIN = re.compile(r"[\w.-]+(?:\[.*\])?\s*==\s*([^\s,;*]+)\s*(?:;.*)?")
"""A requirement of exactly one version."""


@dataclass(frozen=True)
class Requirements:
    """A list of requirements for pip or uv.

    Attributes:
        lines: options, then requirements.
        source: the file with the project's requirements; "" if there is none.
    """

    lines: tuple[str, ...]
    source: str = ""

    @property
    def text(self) -> str:
        """The content of a requirements.txt."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def sha(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Declared:
    """A project's requirements as lines of a requirements.txt, the file they come from, and the
    editable packages, whose files are sent with the job."""

    lines: tuple[str, ...] = ()
    source: str = ""
    editable: tuple[Package, ...] = ()


def find(start: Path, *, home: Path, editable: Collection[Package] = ()) -> Declared:
    """Find the project's requirements.

    The search goes up from the function's folder to the first folder with a `.git`; home and `/`
    are searched only if the search begins in them. The files of editable packages are sent with the
    job, so hosts install only these packages' requirements.

    Raises:
        UsageError: a file cannot be read, or requires something that hosts cannot install.
    """
    packages = tuple(editable)
    for folder in _upward(start, home):
        listed = folder / "requirements.txt"
        project = pyproject.read_project(folder / "pyproject.toml")
        if listed.is_file() and not project.is_chosen:
            lines = requirements_txt.read_lines(listed, packages)
            return Declared(tuple(lines), str(listed), packages)
        if project.has_dependencies:
            lines = _read_project(project, packages, home)
            return Declared(tuple(lines), str(project.file), packages)
    return Declared(editable=packages)


def _read_project(project: Pyproject, editable: Collection[Package], home: Path) -> Iterator[str]:
    """Yield the requirements of a pyproject.toml with its indexes. If the project or its workspace
    has a uv.lock, use the versions in that."""
    locks = (folder / "uv.lock" for folder in _upward(project.file.parent, home))
    lock = next((file for file in locks if file.is_file()), None)
    lines, workspace = list(project.read_lines(editable)), project
    if lock and uv_lock.has_project(lock, project.name):
        # Keep the lines of accelerator packages: `for_hosts` reads JAX's version from them.
        lines = [
            line
            for line in lines
            if line.startswith("-") or find_name(line) in ACCELERATOR_PACKAGES
        ]
        lines += uv_lock.read_lines(
            lock, project, without=ACCELERATOR_PACKAGES, editable=editable, uv=uv_lock.find_uv()
        )
        if lock.parent != project.file.parent:
            workspace = pyproject.read_project(lock.parent / "pyproject.toml")
    yield from _list_index_options(project, workspace, set(map(find_name, lines)))
    yield from lines


def for_hosts(
    declared: Declared,
    kind: str,
    installed: Mapping[str, str],
    *,
    bucket: bool = True,
    also: Collection[str] = (),
) -> Requirements:
    """Return the packages that hosts must install in an image with Python alone.

    Args:
        declared: the project's requirements.
        kind: accelerator: "tpu", "gpu" or "cpu"; "proxy" for Pathways.
        installed: versions of packages that the caller has, by normalized name.
        bucket: whether the store is a bucket.
        also: more requirements of this job, such as a debugger.
    """
    travelling = {package.name for package in declared.editable}
    own = {"cloudpickle"} & installed.keys()
    options = [line for line in declared.lines if line.startswith("-")]
    dropped = [
        line
        for line in declared.lines
        if find_name(line) in ACCELERATOR_PACKAGES and not line.endswith(KEEP_MARK)
    ]
    lines = [
        line.removesuffix(KEEP_MARK)
        for line in declared.lines
        if line not in {*options, *dropped} and find_name(line) not in own
    ]
    required = _list_met(lines)
    others = required.union(travelling, ACCELERATOR_PACKAGES, ["cloudpickle"])
    more = [text for package in declared.editable for text in package.requires]
    more = [text for text in more if find_name(text) not in others]
    lines += more
    required |= _list_met(more)
    if "jax" not in required:
        lines.append(f"jax{_EXTRA[kind]}{_jax_version(dropped, installed)}")
    if kind == "proxy" and "pathwaysutils" not in required:
        lines.append(_pin_version("pathwaysutils", installed))
    if "keras" in installed and "keras" not in required:
        lines.append(f"keras=={installed['keras']}")
    if not required.isdisjoint(ORBAX) and ORBAX_FOR_BUCKETS not in required:
        lines.append(ORBAX_FOR_BUCKETS)
    unique = dict.fromkeys((*options, *lines, *_own(installed, bucket), *also))
    return Requirements(tuple(unique), declared.source)


def of_kinetic(
    installed: Mapping[str, str], *, bucket: bool = True, also: Collection[str] = ()
) -> Requirements:
    """Return the packages that kinetic itself needs in an image with the project's requirements.
    For the arguments, see `for_hosts`."""
    return Requirements((*_own(installed, bucket), *also))


def find_conflict(lines: Collection[str], held: Collection[str]) -> tuple[str, str] | None:
    """Return the first requirement that excludes a version pinned in `held`, with that pin; None if
    there is no conflict."""
    pins = {find_name(line): line for line in held if _PIN.fullmatch(line) and _is_met(line)}
    for line in lines:
        pin = pins.get(find_name(line))
        if pin is None or "://" in line or not _is_met(line):
            continue
        wanted = requirements_txt.read_requirement(line, line).specifier
        if not wanted.contains(_PIN.sub(r"\1", pin), prereleases=True):
            return line, pin
    return None


def _list_met(lines: Collection[str]) -> set[str]:
    """Return the names of packages that these lines require on hosts, which run Linux."""
    return {find_name(line) for line in lines if _is_met(line)}


def _is_met(line: str) -> bool:
    return requirements_txt.is_for_hosts(line.partition(";")[2].removesuffix(KEEP_MARK).strip())


def _own(installed: Mapping[str, str], bucket: bool) -> tuple[str, ...]:
    pickle = _pin_version("cloudpickle", installed, otherwise=">=3.0")
    return (pickle, *OWN, *(OWN_FOR_BUCKETS if bucket else ()))


def _pin_version(name: str, installed: Mapping[str, str], *, otherwise: str = "") -> str:
    """Return the requirement `name==VERSION` of the caller, or `name` with `otherwise`."""
    return f"{name}=={installed[name]}" if name in installed else f"{name}{otherwise}"


def _jax_version(dropped: Collection[str], installed: Mapping[str, str]) -> str:
    """Return the caller's JAX version as a specifier, such as "==0.10.2". If the caller has no JAX,
    or a development version, return the one in the project's requirements, or ""."""
    version = installed.get("jax", "").partition("+")[0]
    if version and "dev" not in version:
        return f"=={version}"
    lines = (
        line for line in dropped if find_name(line) == "jax" and "://" not in line and _is_met(line)
    )
    requirement = next((requirements_txt.read_requirement("jax", line) for line in lines), None)
    return str(requirement.specifier) if requirement else ""


def _upward(start: Path, home: Path) -> Iterator[Path]:
    for folder in (start, *start.parents):
        if folder != start and folder in (home, Path(folder.anchor)):
            return
        yield folder
        if (folder / ".git").exists():
            return


def _list_index_options(
    project: Pyproject, workspace: Pyproject, names: Collection[str]
) -> Iterator[str]:
    """Yield an option for each index from which hosts may need a package.

    With an index marked `explicit`, uv takes only the packages that name it. pip has no such
    option: if a host needs one of these packages, the index is added last, for all packages.

    Args:
        project: the project with the sources of its packages.
        workspace: the project with the lock. For a member, uv reads only the indexes that the
            member's packages name.
        names: names of the packages that hosts install.

    Raises:
        UsageError: an index is on this machine, or its address holds a password.
    """
    pinned = {*workspace.list_pins(names), *project.list_pins(names)}
    options = [*_list_uv_options(find_table(workspace.content, "tool", "uv"), pinned)]
    if project.file != workspace.file:
        own = find_table(project.content, "tool", "uv").get("index", ())
        options += [_render_index(index) for index in own if index.get("name") in pinned]
    for option in dict.fromkeys(options):
        yield from requirements_txt.check_option(str(workspace.file), option)


def _list_uv_options(table: Mapping[str, Any], pinned: Collection[str]) -> Iterator[str]:
    """Yield options for the indexes in `[tool.uv]`. The first default index counts, as in uv."""
    indexes, tables = table.get("index", ()), (table, table.get("pip", {}))
    defaults = [index["url"] for index in indexes if index.get("default")]
    defaults += [section["index-url"] for section in tables if "index-url" in section]
    yield from (f"--index-url {url}" for url in defaults[:1])
    others = [index for index in indexes if not index.get("default")]
    yield from (_render_index(index) for index in others if not index.get("explicit"))
    for section in tables:
        yield from (f"--extra-index-url {url}" for url in section.get("extra-index-url", ()))
        # Skip folders of this machine, which only save downloads.
        links = (place for place in section.get("find-links", ()) if "://" in place)
        yield from (f"--find-links {place}" for place in links)
    explicit = [index for index in others if index.get("explicit")]
    yield from (_render_index(index) for index in explicit if index.get("name") in pinned)


def _render_index(index: Mapping[str, Any]) -> str:
    flag = "--find-links" if index.get("format") == "flat" else "--extra-index-url"
    return f"{flag} {index['url']}"
