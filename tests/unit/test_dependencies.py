"""The packages that hosts must install, from each way in which projects declare them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib

import dependency_cases
import pytest
from dependency_cases import INSTALLED, OWN, ROOT, find_declared, options, texts, write

from kinetic._source import dependencies
from kinetic._source.dependencies import Declared, find, for_hosts, of_kinetic
from kinetic._source.editable import Package
from kinetic.errors import UsageError

project = dependency_cases.project

# -- which file ------------------------------------------------------------------------------------


def test_the_nearest_file_counts(project):
    listed = write(project, "requirements.txt", "numpy\n")
    write(project, "pyproject.toml", '[project]\nname = "p"\ndependencies = ["scipy"]\n')
    (project / "src" / "deep").mkdir(parents=True)
    assert find_declared(project / "src" / "deep").source == str(listed)
    nearer = write(project, "src/pyproject.toml", '[project]\ndependencies = ["pandas"]\n')
    assert find_declared(project / "src" / "deep").source == str(nearer)
    assert texts(project / "src" / "deep") == ["pandas"]


def test_a_pyproject_that_says_nothing_of_dependencies_is_passed_over(project):
    write(project, "requirements.txt", "numpy")
    write(project, "src/pyproject.toml", "[tool.ruff]\nline-length = 100\n")
    assert texts(project / "src") == ["numpy"]


def test_a_choice_comes_before_a_requirements_file(project):
    write(project, "requirements.txt", "numpy")
    table = "[project]\ndependencies = ['scipy']\n[tool.kinetic]\nextras = []\n"
    write(project, "pyproject.toml", table)
    assert texts(project) == ["scipy"]


def test_the_search_ends_at_the_repository_and_at_home(project, tmp_path):
    write(project.parent, "requirements.txt", "numpy")
    assert find_declared(project) == Declared()
    (project / ".git").rmdir()
    assert texts(project) == ["numpy"]
    assert find(project, home=project.parent) == Declared()
    assert find(project.parent, home=project.parent).source.endswith("requirements.txt")


def test_files_that_cannot_be_read(project):
    write(project, "pyproject.toml", "[project\n")
    with pytest.raises(UsageError, match=r"pyproject.toml is not valid TOML"):
        find_declared(project)
    (project / "requirements.txt").write_bytes(b"\xff\xfe\x00")
    (project / "pyproject.toml").unlink()
    with pytest.raises(UsageError, match=r"requirements.txt, which .* cannot be read"):
        find_declared(project)


# -- requirements.txt ------------------------------------------------------------------------------


def test_a_requirements_file(project):
    write(
        project,
        "requirements.txt",
        "\ufeff# what we need\n"
        "numpy>=1.26,<3   # arrays\n"
        "--extra-index-url https://download.pytorch.org/whl/cpu\n"
        "scipy ; python_version < '4'\n"
        "pandas==2.2.0 \\\n    --hash=sha256:0000 \\\n    --hash=sha256:1111\n"
        "-r more/base.txt\n"
        "lib @ git+https://github.com/a/lib@v1#subdirectory=x\n"
        "git+https://github.com/a/other.git#egg=other\n"
        "jax==0.4 # kn:keep because\n",
    )
    write(project, "more/base.txt", "-rdeeper.txt\nflax")
    write(project, "more/deeper.txt", "optax\n--pre\n")
    assert texts(project) == [
        "numpy>=1.26,<3",
        "scipy ; python_version < '4'",
        "pandas==2.2.0",
        "optax",
        "flax",
        "lib @ git+https://github.com/a/lib@v1#subdirectory=x",
        "git+https://github.com/a/other.git#egg=other",
        "jax==0.4  # kn:keep",
    ]
    assert options(project) == [
        "--extra-index-url https://download.pytorch.org/whl/cpu",
        "--pre",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-e .", "line 2: -e . names a folder of this machine"),
        ("--editable=./lib", "names a folder"),
        ("./lib", "list what the package requires in place of this line"),
        ("../lib[extra]", "is on this machine"),
        ("/opt/lib", "is on this machine"),
        ("file:///opt/lib", "is on this machine"),
        ("wheels/lib-1.0-py3-none-any.whl", "is on this machine"),
        ("lib @ ./lib", "is on this machine"),
        ("lib @ file:///opt/lib", "is on this machine"),
        ("-c constraints.txt", "do not support constraints"),
        ("-r requirements.txt", "includes itself"),
        ("-r gone.txt", "gone.txt, which lists the packages"),
        ("-r https://one/requirements.txt", "not on this machine. Download the file"),
        ("--use-feature=fast", "do not support the option --use-feature"),
        ("--find-links ./wheels", "hosts cannot read ./wheels"),
        ("--index-url https://me:hunter2@one/simple", "contains a password"),
        ("numpy >=", "is not a requirement"),
        ("numpy --config-settings=a=b", "do not support the option"),
    ],
)
def test_what_hosts_cannot_install_is_refused_with_its_place(project, line, says):
    write(project, "requirements.txt", f"# first\n{line}\n")
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        find_declared(project)
    assert "hunter2" not in str(caught.value)


def test_a_password_may_come_from_the_environment(project):
    write(project, "requirements.txt", "-i https://me:${TOKEN}@one/simple\nnumpy")
    assert options(project) == ["-i https://me:${TOKEN}@one/simple"]


# -- pyproject.toml --------------------------------------------------------------------------------

PROJECT = """
[project]
name = "My_Project"
dependencies = ["numpy", "lib>=2 ; python_version < '4'", "tool[fast]"]
[project.optional-dependencies]
train = ["optax", "my-project[data,train]"]
data = ["grain"]
[dependency-groups]
base = ["rich"]
eval = ["tabulate", {include-group = "Base"}]
loop = [{include-group = "loop"}]
odd = [3]
[tool.uv.sources]
lib = {git = "https://github.com/a/lib", tag = "v2"}
tool = {index = "ours"}
[[tool.uv.index]]
name = "ours"
url = "https://ours/simple"
"""


def chosen(project, text):
    write(project, "pyproject.toml", f"{PROJECT}\n[tool.kinetic]\n{text}\n")
    return texts(project)


def test_a_project_with_extras_and_groups(project):
    base = ["numpy", "lib @ git+https://github.com/a/lib@v2 ; python_version < '4'", "tool[fast]"]
    assert chosen(project, "") == base
    assert options(project) == ["--extra-index-url https://ours/simple"]
    assert chosen(project, 'extras = ["train"]') == [*base, "optax", "grain"]
    assert chosen(project, 'groups = ["eval"]') == [*base, "tabulate", "rich"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ('extras = ["trian"]', "has no extra 'trian'. It has data, train"),
        ('groups = ["dev"]', "has no group 'dev'. It has base, eval, loop, odd"),
        ('groups = ["loop"]', "includes itself"),
        ('groups = ["odd"]', "contains 3"),
        ('extras = "train"', "must be a list of names"),
        ("extra = []", "unknown key 'extra'"),
    ],
)
def test_a_choice_that_cannot_be_met(project, choice, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        chosen(project, choice)


def test_groups_without_a_project(project):
    table = '[dependency-groups]\nrun = ["numpy"]\n[tool.kinetic]\ngroups = ["run"]\n'
    write(project, "pyproject.toml", table)
    assert texts(project) == ["numpy"]


def test_sources_on_this_machine_are_refused(project):
    for source in ("path = '../lib'", "workspace = true"):
        table = f"[project]\ndependencies = ['lib']\n[tool.uv.sources]\nlib = {{{source}}}\n"
        write(project, "pyproject.toml", table)
        with pytest.raises(UsageError, match=r"lib @ file:\S+, which is on this machine"):
            find_declared(project)


INDEXES = """
[project]
dependencies = ["numpy", "torch", "only-here"]
[tool.uv]
extra-index-url = ["https://extra/simple"]
find-links = ["https://links/all.html", "wheels"]
[tool.uv.pip]
index-url = "https://late/simple"
[[tool.uv.index]]
name = "cu"
url = "https://cu/simple"
explicit = true
[[tool.uv.index]]
name = "cpu"
url = "https://cpu/simple"
explicit = true
[[tool.uv.index]]
name = "main"
url = "https://main/simple"
default = true
[[tool.uv.index]]
url = "https://flat/all.html"
format = "flat"
[[tool.uv.index]]
name = "more"
url = "https://more/simple"
[tool.uv.sources]
Torch = [
  {index = "cpu", marker = "sys_platform == 'darwin'"},
  {index = "cu", marker = "sys_platform == 'linux'"},
]
unused = {index = "cpu"}
only_here = [{git = "https://git/x", extra = "dev"}, {index = "more"}]
"""


def test_every_index_of_uv_is_passed_on(project):
    write(project, "pyproject.toml", INDEXES)
    assert options(project) == [
        "--index-url https://main/simple",
        "--find-links https://flat/all.html",
        "--extra-index-url https://more/simple",
        "--extra-index-url https://extra/simple",
        "--find-links https://links/all.html",
        "--extra-index-url https://cu/simple",
    ]
    assert texts(project) == ["numpy", "torch", "only-here"]
    table = '[project]\ndependencies = []\n[tool.uv.pip]\nindex-url = "https://late/simple"\n'
    write(project, "pyproject.toml", table)
    assert options(project) == ["--index-url https://late/simple"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", '[project]\ndependencies = []\n[tool.uv]\nindex-url = "{}"\n'),
        ("requirements.txt", "-i{}\n"),
        ("requirements.txt", "numpy --index-url={}\n"),
    ],
)
def test_a_password_of_an_index_is_in_no_message(project, file, text):
    write(project, file, text.format("https://me:hunter2@one/simple"))
    with pytest.raises(UsageError) as caught:
        find_declared(project)
    assert "hunter2" not in str(caught.value)


def test_dynamic_dependencies(project):
    table = "[project]\nname = 'p'\ndynamic = ['dependencies']\n"
    write(project, "pyproject.toml", table)
    with pytest.raises(UsageError, match=r"Write a requirements.txt next to the file"):
        find_declared(project)
    table += "[tool.setuptools.dynamic]\ndependencies = {file = ['base.in']}\n"
    write(project, "pyproject.toml", table)
    write(project, "base.in", "numpy\n")
    assert texts(project) == ["numpy"]


# -- Poetry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        '[tool.poetry.dependencies]\npython = "^3.11"\nnumpy = "^1.26"\n',
        '[project]\ndependencies = ["numpy"]\n'
        '[[tool.poetry.source]]\nname = "corp"\nurl = "https://corp/simple"\n',
    ],
)
def test_tables_that_only_poetry_reads_are_refused(project, table):
    """kinetic refuses tables that only Poetry reads: hosts would lack packages or get others."""
    write(project, "pyproject.toml", table)
    with pytest.raises(UsageError, match=r"poetry export -o requirements\.txt"):
        find_declared(project)
    write(project, "requirements.txt", "numpy==1.26\n")
    assert texts(project) == ["numpy==1.26"]


def test_a_project_of_poetry_2(project):
    write(
        project,
        "pyproject.toml",
        '[project]\ndependencies = ["numpy (>=1.26,<2)"]\n'
        '[tool.poetry.dependencies]\npython = "^3.11"\nnumpy = {source = "PyPI"}\n'
        '[[tool.poetry.source]]\nname = "PyPI"\n',
    )
    assert texts(project) == ["numpy (>=1.26,<2)"]


# -- what hosts get --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "line"),
    [("tpu", "jax[tpu]==0.10.2"), ("gpu", "jax[cuda12]==0.10.2"), ("cpu", "jax==0.10.2")],
)
def test_the_accelerator_has_the_callers_jax(project, kind, line):
    write(project, "requirements.txt", "jax[cuda12]==0.4\njaxlib\nlibtpu\nnumpy\n--pre\n")
    requirements = for_hosts(find_declared(project), kind, INSTALLED)
    assert requirements.lines == ("--pre", "numpy", line, "keras==3.15.1", *OWN)
    assert requirements.source == str(project / "requirements.txt")
    assert requirements.text == "".join(f"{each}\n" for each in requirements.lines)
    assert requirements.sha == hashlib.sha256(requirements.text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ({}, "jax[tpu]<0.9,>=0.7"),
        ({"jax": "0.8.0.dev20260101"}, "jax[tpu]<0.9,>=0.7"),
        ({"jax": "0.8.1+local"}, "jax[tpu]==0.8.1"),
    ],
)
def test_without_a_version_that_can_be_had_the_project_says_which(project, installed, line):
    write(project, "requirements.txt", "jax>=0.7,<0.9\n")
    requirements = for_hosts(find_declared(project), "tpu", installed)
    assert requirements.lines[:2] == (line, "cloudpickle>=3.0")


def test_a_line_for_another_system_pins_nothing(project):
    write(
        project,
        "requirements.txt",
        "keras==3.1 ; sys_platform == 'win32'\njax==0.4; os_name == 'nt'  # kn:keep\n"
        "jax==0.5 ; platform_system == 'Darwin'\njax==0.6 ; platform_system == 'Linux'\n",
    )
    assert {"jax==0.10.2", "keras==3.15.1"} <= set(
        for_hosts(find_declared(project), "cpu", INSTALLED).lines
    )
    assert "jax==0.6" in for_hosts(find_declared(project), "cpu", {}).lines
    lib = Package("lib", "/lib", ("keras<4", "numpy"))
    declared = dataclasses.replace(find_declared(project), editable=(lib,))
    assert "keras<4" in for_hosts(declared, "cpu", INSTALLED).lines
    write(project, "requirements.txt", "keras==3.1 ; sys_platform == 'linux'\n")
    lines = for_hosts(find_declared(project), "cpu", INSTALLED).lines
    assert [line for line in lines if "keras" in line] == ["keras==3.1 ; sys_platform == 'linux'"]


def test_a_line_that_is_kept_is_all_there_is_of_it(project):
    write(project, "requirements.txt", "jax==0.4 # kn:keep\nkeras<3\ncloudpickle==2\n")
    requirements = for_hosts(find_declared(project), "tpu", INSTALLED, bucket=False)
    assert requirements.lines == ("jax==0.4", "keras<3", "cloudpickle==3.1.2", *dependencies.OWN)


def test_a_script_of_no_project_has_the_accelerators_and_ours():
    assert for_hosts(Declared(), "cpu", {"jax": "0.10.2"}).lines[0] == "jax==0.10.2"
    assert of_kinetic(INSTALLED).lines == OWN


@pytest.mark.parametrize(
    ("named", "bucket", "added"),
    [
        ("orbax-checkpoint==0.11\n", True, ["gcsfs"]),
        ("orbax\ngcsfs==2025.1\n", True, []),
        ("orbax-checkpoint\n", False, ["gcsfs"]),
        ("numpy\n", True, []),
    ],
)
def test_orbax_can_write_to_a_bucket_whatever_the_store_is(project, named, bucket, added):
    write(project, "requirements.txt", named)
    requirements = for_hosts(find_declared(project), "cpu", {}, bucket=bucket)
    assert [
        line for line in requirements.lines if line.startswith("gcsfs") and line not in named
    ] == added


def test_our_own_needs_are_those_of_the_package():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = about["optional-dependencies"]
    needed = {*about["dependencies"], *extras["tls"], *extras["gcp"]}
    assert {*dependencies.OWN, *dependencies.OWN_FOR_BUCKETS, "cloudpickle>=3.0"} <= needed


def test_where_pathways_has_the_chips_its_package_is_installed_and_not_libtpu(project):
    installed = {"jax": "0.10.2", "cloudpickle": "3.1.0"}
    both = for_hosts(Declared(), "proxy", installed | {"pathwaysutils": "0.1.13"})
    assert both.lines[:2] == ("jax==0.10.2", "pathwaysutils==0.1.13")
    assert for_hosts(Declared(), "proxy", installed).lines[1] == "pathwaysutils"
    (project / "requirements.txt").write_text("pathwaysutils>=0.1.12\n")
    lines = for_hosts(
        find_declared(project), "proxy", installed | {"pathwaysutils": "0.1.13"}
    ).lines
    assert [line for line in lines if "pathways" in line] == ["pathwaysutils>=0.1.12"]


HELD = ["--pre", "numpy==1.26.4", "jax[tpu]==0.10.2", "pear==1.0; python_version<'3'", "wild==2.*"]


@pytest.mark.parametrize(
    ("line", "pin"),
    [
        ("numpy==2.0", HELD[1]),
        ("NumPy>=2", HELD[1]),
        ("jax==0.9", HELD[2]),
        ("numpy<2,>=1.20", ""),
        ("numpy==1.26.4.0", ""),
        ("numpy==2; sys_platform=='win32'", ""),
        ("numpy @ https://example.com/numpy.whl", ""),
        ("pear==2", ""),
        ("wild==3", ""),
        ("quince==1", ""),
    ],
)
def test_a_version_that_a_session_excludes_is_a_conflict(line, pin):
    """Only pins count that apply to hosts; what else is installed, the hosts themselves know."""
    conflict = dependencies.find_conflict([line], HELD)
    assert conflict == ((line, pin) if pin else None)
