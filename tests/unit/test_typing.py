"""Public types, checked by mypy: right uses pass, and each wrong use is an error."""

from __future__ import annotations

import re
from pathlib import Path

import jedi
import pytest
from mypy import api

pytestmark = pytest.mark.timeout(900)  # mypy takes minutes without a cache on a busy machine.

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "typing"


def check(file: Path, cache: Path) -> tuple[str, int]:
    arguments = [
        "--strict",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(cache),
        str(file),
    ]
    out, err, code = api.run(arguments)
    assert not err
    return out, code


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Share the cache of `make check`, so that whichever runs second is fast.
    own = ROOT / ".mypy_cache"
    return own if own.is_dir() else tmp_path_factory.mktemp("mypy")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_right_uses_have_the_right_types(cache: Path) -> None:
    out, code = check(CASES / "calls.py", cache)
    assert code == 0, out


def test_each_mistake_is_found(cache: Path) -> None:
    file = CASES / "mistakes.py"
    lines = enumerate(file.read_text().splitlines(), 1)
    expected = {
        number: match[1]
        for number, line in lines
        if (match := re.search(r"# expect: ([a-z-]+)$", line))
    }
    out, _ = check(file, cache)
    match = {
        int(n): code
        for n, code in re.findall(r"mistakes\.py:(\d+): error: .*\[([a-z-]+)\]$", out, re.MULTILINE)
    }
    assert match == expected, out


@pytest.mark.long
def test_editors_complete_the_public_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jedi, which completes code in Jupyter and vim without running it, finds the public names."""
    import kinetic

    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))

    def names(code: str) -> set[str]:
        script = jedi.Script(code, environment=jedi.InterpreterEnvironment())
        return {completion.name for completion in script.complete()}

    assert set(kinetic.__all__) <= names("import kinetic\nkinetic.")
    call = "import kinetic\n@kinetic.run('cpu')\ndef f(): ...\n"
    assert {"run_async", "with_options", "plan"} <= names(f"{call}f.")
    assert {"result", "status", "logs"} <= names(f"{call}f.run_async().")


def test_a_notebook_completes_public_names_only() -> None:
    import kinetic

    plain = {name for name in dir(kinetic) if not name.startswith("_")}
    assert {"run", "Data", "jobs", "errors"} <= plain
    assert not plain & {"guard", "TYPE_CHECKING", "version"}
