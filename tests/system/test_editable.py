"""Packages that are installed in editable mode are sent to hosts like the project's own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

import kinetic

ROOT = Path(__file__).parents[2]
LIMIT_S = 300

FINDER = """\
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path

MAPPING = {mapping!r}


class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        place = MAPPING.get(fullname, "/nowhere")
        for candidate in (Path(place, "__init__.py"), Path(f"{{place}}.py")):
            if candidate.exists():
                return spec_from_file_location(fullname, candidate)


def install():
    sys.meta_path.append(_EditableFinder)
"""
"""The import finder of an editable installation, as setuptools writes it."""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory) -> Path:
    """A virtual environment that also finds the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (site_of(folder) / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return folder


def site_of(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


@pytest.fixture
def repository(tmp_path, interpreter):
    """A repository with an application. Packages that the test installs into the interpreter are
    removed afterwards."""
    before = set(site_of(interpreter).iterdir())
    write(tmp_path / "repo", "app/pyproject.toml", "[project]\nname = 'app'\n")
    (tmp_path / "repo" / ".git").mkdir()
    yield (tmp_path / "repo").resolve()
    for path in set(site_of(interpreter).iterdir()) - before:
        if path.is_file():
            path.unlink()


def write(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def link(interpreter: Path, name: str, *folders: Path) -> None:
    """Install a package by a `.pth` file, like hatchling, uv, Poetry, flit and `setup.py
    develop`."""
    (site_of(interpreter) / f"{name}.pth").write_text("".join(f"{each}\n" for each in folders))


def redirect(interpreter: Path, name: str, mapping: dict[str, Path]) -> None:
    """Install a package by an import finder, as setuptools does for a flat layout."""
    site, module = site_of(interpreter), f"__editable___{name}_finder"
    paths = {key: str(path) for key, path in mapping.items()}
    (site / f"{module}.py").write_text(FINDER.format(mapping=paths))
    (site / f"__editable__.{name}.pth").write_text(f"import {module}; {module}.install()\n")


def run(interpreter: Path, program: Path, **variables: str) -> str:
    environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | variables
    if "PYTHONPATH" not in variables:
        environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(interpreter / "bin" / "python"), program.name],
        cwd=program.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EDITED = """\
import pathlib, sys, time
import kinetic
{imports}

@kinetic.run(accelerator="cpu:2")
def values(gate):
    while not pathlib.Path(gate).exists():
        time.sleep(0.01)
    import alpha, beta
    return alpha.VALUE, beta.VALUE, alpha.__file__, beta.__file__

gate = pathlib.Path("gate").absolute()
job = values.run_async(str(gate))
for file in sys.argv[1:] or {files!r}:
    path = pathlib.Path(file)
    path.write_text(path.read_text().replace("VALUE = 2", "VALUE = 99"))
gate.write_text("")
a, b, *files = job.result()
print(a, b)
limit = time.monotonic() + 300
for file in files:
    while pathlib.Path(file).exists() and time.monotonic() < limit:
        time.sleep(0.1)
    print(pathlib.Path(file).exists(), file)
"""


def program(repository: Path, files: list[Path], imports: str) -> Path:
    script = repository / "app" / "train.py"
    script.write_text(EDITED.format(imports=imports, files=[str(each) for each in files]))
    return script


@pytest.mark.parametrize("imports", ["", "import alpha, beta"])
def test_an_edit_after_the_submission_does_not_reach_the_job(repository, interpreter, imports):
    alpha, beta = repository / "packages/alpha", repository / "packages/beta"
    write(alpha, "src/alpha/__init__.py", "VALUE = 2\n")
    write(beta, "beta/__init__.py", "VALUE = 2\n")
    write(alpha, "pyproject.toml")
    write(beta, "setup.py")
    link(interpreter, "alpha", alpha / "src")
    redirect(interpreter, "beta", {"beta": beta / "beta"})
    script = program(
        repository, [alpha / "src/alpha/__init__.py", beta / "beta/__init__.py"], imports
    )
    printed = run(interpreter, script).splitlines()
    assert printed[0] == "2 2", printed
    # In the host's folder of sources, which has been removed by now.
    assert re.fullmatch(r"False .*/tree/packages/alpha/src/alpha/__init__.py", printed[1])
    assert re.fullmatch(r"False .*/tree/packages/beta/beta/__init__.py", printed[2])


SHOWN = """\
import pathlib
import kinetic

@kinetic.run(accelerator="cpu")
def values():
    import importlib, os, subprocess, sys
    own = os.environ["KINETIC_OUTPUT_DIR"]
    found = []
    for name in {names!r}:
        module = importlib.import_module(name)
        found.append((name, module.VALUE, "/tree/" in module.__file__))
    code = "import {first}; print({first}.VALUE, '/tree/' in {first}.__file__)"
    program = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return found, program.stdout.split()

view = values.plan()
print("  editable " in str(view))
print(sorted(name for name, _ in view.files))
found, program = values()
print(found)
print(program)
"""


def show(repository: Path, interpreter: Path, *names: str, **variables: str) -> list[str]:
    script = repository / "app" / "show.py"
    script.write_text(SHOWN.format(names=names, first=names[0]))
    return run(interpreter, script, **variables).splitlines()


def test_a_namespace_over_two_packages(repository, interpreter):
    one, two = repository / "packages/one/src", repository / "packages/two/src"
    write(one, "company/one/__init__.py", "VALUE = 1\n")
    write(two, "company/two/__init__.py", "VALUE = 2\n")
    link(interpreter, "one", one)
    redirect(interpreter, "two", {"company.two": two / "company/two"})
    names, shipped, imported, program = show(repository, interpreter, "company.one", "company.two")
    assert names == "True"
    assert "'packages/one/src/company/one/__init__.py'" in shipped
    assert imported == "[('company.one', 1, True), ('company.two', 2, True)]"
    assert program == "['1', 'True']"


def test_a_package_in_another_place_and_what_pythonpath_names(repository, interpreter, tmp_path):
    elsewhere, named = (tmp_path / "code/lib").resolve(), (tmp_path / "named").resolve()
    write(elsewhere, "setup.py")
    write(elsewhere, "lib/__init__.py", "from lib._version import VALUE\n")
    write(elsewhere, "lib/_version.py", "VALUE = 3\n")
    write(elsewhere, ".gitignore", "_version.py\nnotes.txt\n")
    write(elsewhere, "lib/notes.txt", "mine\n")
    subprocess.run(["git", "init", "-q", elsewhere], check=True)
    write(named, "single.py", "VALUE = 4\n")
    link(interpreter, "lib", elsewhere)
    _, shipped, imported, program = show(
        repository, interpreter, "lib", "single", PYTHONPATH=str(named)
    )
    assert "'code/lib/lib/_version.py'" in shipped, "Python imports it, though git ignores it"
    assert "notes.txt" not in shipped
    assert imported == "[('lib', 3, True), ('single', 4, True)]"
    assert program == "['3', 'True']"


def test_a_finder_that_leads_into_the_project_itself(repository, interpreter):
    app = repository / "app"
    write(app, "src/own/__init__.py", "VALUE = 5\n")
    write(app, "src/other.py", "VALUE = 6\n")
    redirect(interpreter, "own", {"own": app / "src/own", "other": app / "src/other"})
    _, _, imported, program = show(repository, interpreter, "own", "other")
    assert imported == "[('own', 5, True), ('other', 6, True)]"
    assert program == "['5', 'True']"


def test_what_lies_beside_the_project_is_imported_wherever_the_job_runs(
    place, tmp_path, monkeypatch
):
    """A module's folder is on PYTHONPATH and shares only `/` with the project: it is sent too."""
    write(tmp_path, "beside/lies_beside.py", "VALUE = 7\ndef fail():\n    raise OSError('there')\n")
    folder = (tmp_path / "beside").resolve()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))

    @kinetic.run(accelerator="cpu")
    def use_module(how):
        import lies_beside

        return (lies_beside.VALUE, "/tree/" in lies_beside.__file__) if how else lies_beside.fail()

    assert use_module(True) == (7, True)
    with pytest.raises(OSError, match="there") as caught:
        use_module(False)
    assert str(caught.traceback[-1].path) == str(folder / "lies_beside.py")
