"""Files of the project that have the name of a library's module break nothing, and are what the
user's own code imports.

In: projects with such files. Out: values, and who got which module. One call asks for many such
files at once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OTHERS = ["click", "cloudpickle", "grpc", "rich", "setproctitle"]
UNUSED = [*sorted(name for name in sys.stdlib_module_names if not name.startswith("_")), *OTHERS]
USED = [
    "secrets",
    "json",
    "types",
    "random",
    "logging",
    "queue",
    "select",
    "signal",
    "socket",
    "email",
    "calendar",
    "token",
    *OTHERS,
]
# What the interpreter has built in is found before any file: `select` in Debian's.
USED = [name for name in USED if name not in sys.builtin_module_names]

CALL = """
import kinetic

@kinetic.run(accelerator=ACCELERATOR)
def add(x):
    import jax
    return x + jax.device_count()

if __name__ == "__main__":
    print(add(1))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def shadow(project, *names):
    for name in names:
        (project / f"{name}.py").write_text(f"OWN = {name!r}\nclass Own:\n    pass\n")


def python(project, *arguments, **more):
    environ = os.environ | more
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("accelerator", "value"), [("cpu", "2\n"), ("tpu-v6e-8", "9\n")])
def test_files_that_nobody_imports_break_nothing(project, accelerator, value):
    """All names of the standard library at once. JAX imports some of them only while it runs."""
    shadow(project, *UNUSED)
    (project / "google").mkdir()
    (project / "google" / "__init__.py").touch()
    (project / "main.py").write_text(CALL.replace("ACCELERATOR", repr(accelerator)))
    assert python(project, "main.py") == value


def test_the_command_line_beside_such_files(project):
    shadow(
        project, *(name for name in USED if name != "types"), "subprocess", "dataclasses", "string"
    )  # runpy needs types
    assert python(project, "-m", "kinetic", "jobs", "list") == ""


def test_a_folder_on_the_python_path(project, tmp_path):
    shadow(project, "secrets", "json", "socket", "threading")
    (project / "main.py").write_text(CALL.replace("ACCELERATOR", "'cpu'"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert python(elsewhere, str(project / "main.py"), PYTHONPATH=str(project)) == "2\n"


USES = """
import importlib
import kinetic
IMPORTS
import helper

@kinetic.run(accelerator="cpu")
def use(given):
    # which import the library's
    import concurrent.futures, email.message, http.client, multiprocessing, unittest.mock
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(len, "abc").result() == 3
    IMPORTS_INDENTED
    for name in NAMES:
        assert importlib.import_module(name).OWN == name
    assert [module.OWN for module in MODULES] == NAMES
    assert helper.names() == NAMES
    return given

NAMES = [NAMES_LISTED]
MODULES = [NAMES_PLAIN]

if __name__ == "__main__":
    assert helper.names() == NAMES
    for module in MODULES:
        given = module.Own()
        given.module = module.OWN
        assert type(use(given)) is module.Own
"""


def test_what_the_users_own_code_imports_is_the_users(project):
    """Also on hosts, where the library's modules of these names were loaded before."""
    used = [name for name in USED if name not in {"email", "cloudpickle"}]
    shadow(project, *used)
    imports = [f"import {name}" for name in used]
    source = USES.replace("IMPORTS_INDENTED", "\n    ".join(imports)).replace(
        "IMPORTS", "\n".join(imports)
    )
    source = source.replace("NAMES_LISTED", ", ".join(map(repr, used))).replace(
        "NAMES_PLAIN", ", ".join(used)
    )
    (project / "main.py").write_text(source)
    helper = [*imports, f"def names():\n    return [module.OWN for module in [{', '.join(used)}]]"]
    (project / "helper.py").write_text("\n".join(helper))
    python(project, "main.py")


@pytest.mark.parametrize("first", ["import kinetic", "import secrets"])
def test_the_order_of_imports_does_not_matter(project, first):
    shadow(project, "secrets")
    lines = [
        first,
        "import kinetic, secrets, base64",
        "kinetic.run",
        "assert secrets.OWN == 'secrets'",
    ]
    (project / "main.py").write_text("\n".join(lines))
    python(project, "main.py")


def test_nothing_is_changed_where_there_is_no_such_file(project):
    lines = [
        "import builtins, sys",
        "before = builtins.__import__, list(sys.meta_path)",
        "import kinetic",
        "kinetic.run",
    ]
    (project / "main.py").write_text(
        "\n".join([*lines, "assert before == (builtins.__import__, list(sys.meta_path))"])
    )
    python(project, "main.py")


def test_a_module_that_cannot_be_imported_leaves_the_library_as_it_was(project):
    (project / "threading.py").write_text("raise ValueError('mine')")
    lines = [
        "import kinetic",
        "kinetic.run",
        "try:",
        "    import threading",
        "except ValueError:",
        "    print('mine')",
    ]
    (project / "main.py").write_text("\n".join([*lines, "import concurrent.futures.thread, queue"]))
    assert python(project, "main.py") == "mine\n"


def test_an_import_that_fails_is_shown_as_plain_python_shows_it(project):
    """Here and on a host: where the import stands, and nothing of ours."""
    shadow(project, "secrets", "json")
    (project / "json.py").write_text("import not_there\n")
    (project / "main.py").write_text(
        "import kinetic\n\n@kinetic.run(accelerator='cpu')\ndef load():\n    import json\n\n"
        "try:\n    import json\nexcept ImportError:\n    import traceback; "
        "traceback.print_exc()\nload()\n"
    )
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.stderr.count("import not_there\nModuleNotFoundError") == 2, done.stderr
    assert "as above, raised at json.py:1 in <module>." in done.stderr
    assert "_shadows" not in done.stderr
