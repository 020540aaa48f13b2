"""Requirements made from a uv.lock: hosts install the same versions as uv itself would."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import dependency_cases
import pytest
from dependency_cases import find_declared, texts, write
from packaging.markers import Marker
from packaging.requirements import Requirement

from kinetic._source import pyproject, uv_lock
from kinetic._source.dependencies import find
from kinetic._source.editable import Package
from kinetic.errors import UsageError

project = dependency_cases.project


def wheel(folder, name, version, *requires):
    info = f"{name}-{version}.dist-info"
    extras = sorted({m[1] for r in requires if (m := re.search(r"extra == '(\w+)'", r))})
    about = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    about += [f"Provides-Extra: {extra}" for extra in extras]
    about += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(about) + "\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


LOCKED = """
[project]
name = "locked"
version = "1"
requires-python = ">=3.11"
dependencies = ["apple", "cherry[red] ; sys_platform == 'linux'", "jax"]
[project.optional-dependencies]
more = ["pear>=1"]
[dependency-groups]
dev = ["fig"]
eval = [
  {include-group = "dev"},
  "plum<2 ; python_version < '3.12'",
  "plum>=2 ; python_version >= '3.12'",
]
[tool.uv]
no-index = true
find-links = ["wheels"]
"""


@pytest.fixture
def locked(project):
    wheels = project / "wheels"
    wheels.mkdir()
    wheel(wheels, "apple", "1.0", "seed ; python_version < '3.13'", "twig", "apple_tree")
    wheel(wheels, "apple_tree", "1.0", "apple")
    wheel(wheels, "twig", "3.0")
    for version in ("1.0", "2.0"):
        wheel(wheels, "seed", version)
        wheel(wheels, "plum", version)
    wheel(wheels, "cherry", "4.0", "dye ; extra == 'red'", "seed<2 ; os_name == 'posix'")
    for name in ("dye", "pear", "fig", "libtpu"):
        wheel(wheels, name, "1.0")
    wheel(wheels, "jax", "0.7.0", "jaxlib", "seed")
    wheel(wheels, "jaxlib", "0.7.0")
    write(project, "pyproject.toml", LOCKED)
    uv(project, "lock", "--quiet", "--offline")
    return project


def uv(folder, *arguments):
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert program, "the development extra installs uv"
    command = [program, *arguments, "--no-config" if arguments[0] != "lock" else "--no-cache"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


PLACES = [
    {"python_version": v, "python_full_version": f"{v}.0", "sys_platform": s, "os_name": o}
    for v in ("3.11", "3.12", "3.13")
    for s, o in (("linux", "posix"), ("darwin", "posix"), ("win32", "nt"))
]


def installed_in(lines, place):
    """Return those requirement lines ("name==version") that apply to a platform."""
    wanted = [Requirement(line) for line in lines]
    return {
        str(requirement).partition(";")[0].strip()
        for requirement in wanted
        if requirement.marker is None or Marker(str(requirement.marker)).evaluate(place)
    }


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("choice", "flags"),
    [
        ("", ["--no-dev"]),
        ('extras = ["more"]', ["--no-dev", "--extra", "more"]),
        ('groups = ["eval"]', ["--no-dev", "--group", "eval"]),
    ],
)
def test_a_lock_gives_what_uv_itself_would_install(locked, choice, flags):
    export = ["export", "--frozen", "--no-hashes", "--no-annotate", "--no-header", "--quiet"]
    theirs = uv(locked, *export, "--no-emit-project", "--prune", "jax", *flags).splitlines()
    theirs = [line for line in theirs if line and not line.startswith("-")]
    write(locked, "pyproject.toml", f"{LOCKED}[tool.kinetic]\n{choice}\n")
    ours = texts(locked)
    assert ours[0] == "jax"
    assert not any(line.startswith(("jaxlib", "locked")) for line in ours)
    for place in PLACES:
        assert installed_in(ours[1:], place) == installed_in(theirs, place), place


@pytest.mark.starts_processes
def test_a_lock_of_another_project_is_not_used(locked):
    write(locked, "pyproject.toml", LOCKED.replace('"locked"', '"other"'))
    assert "apple" in texts(locked)


MEMBER = '[project]\nname = "{}"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = {}\n'


@pytest.mark.starts_processes
def test_a_member_of_a_workspace_has_the_versions_of_its_lock(project):
    (project / "wheels").mkdir()
    for name in ("apple", "pear"):
        wheel(project / "wheels", name, "1.0")
    sources = "[tool.uv.sources]\na = {workspace = true}\nlib = {path = 'lib', editable = true}\n"
    index = "[tool.uv]\nno-index = true\nfind-links = ['wheels']\nworkspace.members = ['m/*']\n"
    write(project, "pyproject.toml", MEMBER.format("root", ["a", "lib"]) + index + sources)
    write(project, "m/a/pyproject.toml", MEMBER.format("a", ["pear"]))
    for name in ("lib", "apart"):
        write(project, f"{name}/pyproject.toml", MEMBER.format(name, ["apple"]))
    uv(project, "lock", "--quiet", "--offline")
    assert texts(project / "m" / "a") == ["pear==1.0"]
    member, other = (
        Package(name, str(project / at)) for name, at in (("a", "m/a"), ("lib", "lib"))
    )
    declared = find(project, home=project.parent, editable=[member, other])
    assert declared.lines == ("apple==1.0", "pear==1.0")
    assert texts(project / "apart") == texts(project / "lib") == ["apple"], "no members"


@pytest.mark.starts_processes
def test_locked_packages_come_from_the_indexes_of_the_workspace(project):
    (project / "wheels").mkdir()
    for name in ("pear", "plum"):
        wheel(project / "wheels", name, "1.0")
    index = "[tool.uv]\nno-index = true\nfind-links = ['wheels']\nworkspace.members = ['m']\n"
    write(project, "pyproject.toml", MEMBER.format("root", []) + index)
    write(project, "m/pyproject.toml", MEMBER.format("m", ["pear"]))
    uv(project, "lock", "--quiet", "--offline")
    named = "[[tool.uv.index]]\nname = '{0}'\nurl = 'https://{0}/simple'\n{1} = true\n"
    more = named.format("one", "default") + named.format("two", "explicit")
    write(project, "pyproject.toml", MEMBER.format("root", []) + index + more)
    pins = "[tool.uv.sources]\npear = {index = 'two'}\nplum = {index = 'of-member'}\n"
    own = named.format("of-member", "default")
    write(project, "m/pyproject.toml", MEMBER.format("m", ["pear"]) + pins + own)
    assert find_declared(project / "m").lines == (
        "--index-url https://one/simple",
        "--extra-index-url https://two/simple",
        "pear==1.0",
    )


@pytest.mark.starts_processes
def test_of_extras_that_exclude_each_other_the_chosen_one_counts(project):
    (project / "wheels").mkdir()
    for version in ("1.0", "2.0"):
        wheel(project / "wheels", "plum", version)
    extras = "[project.optional-dependencies]\nold = ['plum<2']\nnew = ['plum>=2']\n"
    conflicts = "[tool.uv]\nconflicts = [[{extra = 'old'}, {extra = 'new'}]]\n"
    index = "no-index = true\nfind-links = ['wheels']\n[tool.kinetic]\nextras = ['old']\n"
    about = MEMBER.format("p", ["plum"]) + extras + conflicts + index
    write(project, "pyproject.toml", about)
    uv(project, "lock", "--quiet", "--offline")
    assert texts(project) == ["plum==1.0"]


@pytest.mark.starts_processes
def test_a_lock_that_uv_cannot_read_or_that_has_no_uv(locked):
    lock = locked / "uv.lock"
    project = pyproject.read_project(locked / "pyproject.toml")
    with pytest.raises(UsageError, match=r"uv.lock, and uv, .* `pip install uv`"):
        list(uv_lock.read_lines(lock, project, without=(), editable=(), uv=""))
    lock.write_text(lock.read_text().replace("[[package]]", "<<<<<<< HEAD\n[[package]]", 1))
    with pytest.raises(UsageError, match=r"uv cannot read \S+uv.lock: .*parse"):
        find_declared(locked)


@pytest.mark.starts_processes
def test_other_sources_in_a_lock(project):
    write(project, "pyproject.toml", MEMBER.format("p", ["a", "b", "m"]))
    lock = """
version = 1
requires-python = ">=3.11"
[[package]]
name = "p"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "a" }, { name = "b" }, { name = "m" }]
[[package]]
name = "a"
version = "1"
source = { git = "https://github.com/x/a?tag=v1#0123012301230123012301230123012301230123" }
[[package]]
name = "b"
version = "1"
source = { url = "https://one/b-1-py3-none-any.whl" }
wheels = [{ url = "https://one/b-1-py3-none-any.whl", hash = "sha256:DIGEST" }]
[[package]]
name = "m"
version = "1"
source = { editable = "members/m" }
dependencies = [{ name = "d" }]
[[package]]
name = "d"
version = "2"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://one/d-2-py3-none-any.whl", hash = "sha256:DIGEST" }]
"""
    lock = lock.replace("DIGEST", "0" * 64)
    write(project, "uv.lock", lock)
    assert texts(project) == [
        "a @ git+https://github.com/x/a@0123012301230123012301230123012301230123",
        "b @ https://one/b-1-py3-none-any.whl",
        "d==2",
    ]
    filename = 'filename = "b-1-py3-none-any.whl"'
    lock = lock.replace('{ url = "https://one/b', '{ path = "../b', 1)
    write(project, "uv.lock", lock.replace('url = "https://one/b-1-py3-none-any.whl"', filename))
    with pytest.raises(
        UsageError,
        match=r"uv.lock: hosts cannot read ../b-1-py3-none-any.whl, which is on this machine",
    ):
        find_declared(project)
