"""Run the code and the sessions of the documentation, and check that its lists are complete.

A page's ```python blocks are one script, in order; it runs first. A block with title="train.py" is
that file instead. Then its ```console blocks run: a line that begins with "$ " is a command, and
the lines below must appear in its output, in order; "…" stands for any text, alone on a line for
any lines. Ids of jobs may differ; times, ages and sizes are not compared. A block may follow one of

    <!-- not run: reason -->        the block is only shown
    <!-- fails -->                  its last command, or the script, ends with a code other than 0
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from doubles.ray_cluster import RayCluster

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ABSENT = ROOT / "tests/absent"  # The folder hides packages that Keras imports.
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
ON_RAY = DOCS / "how-to/ray.md"
LONG = {
    "checkpoints",
    "commands",
    "costs",
    "debugging",
    "detached-jobs",
    "elastic",
    "elastic-data",
    "elastic-pathways",
    "evaluate",
    "hangs",
    "keras-on-several-hosts",
    "lost-hosts",
    "moving-from-keras-kinetic",
    "several-hosts",
    "simulation",
    "tpu-compile",
    "tutorial",
    "two-tiers",
    "watch-a-training",
    "who-is-blamed",
}
"""Pages whose test takes long, because it runs several jobs or trains on several hosts."""

FENCE = re.compile(
    r"(?:<!-- (?P<mark>not run|fails)(?:: (?P<why>[^>]+))? -->\n+)?"
    r"```(?P<kind>python|console)(?P<info>[^\n]*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
JOB = re.compile(r"\bjob-[0-9a-f]{8}\b")
LOOSE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [+-]\d{4})?|\b\d+(?:[.,]\d+)* "
    r"?(?:s|ms|min|m|h|d|[KMG]?i?B|bytes)\b|/\S*/(?=\S)"
)
"""Text that differs from run to run: dates, durations, sizes, and the folders of paths."""

pytestmark = [pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    kind: str
    title: str
    text: str
    line: int
    mark: str = ""
    why: str = ""


def blocks(page: str) -> list[Block]:
    fenced = []
    for match in FENCE.finditer(page):
        title = re.search(r'title="([^"]+)"', match["info"])
        line = page.count("\n", 0, match.start("text")) + 1
        fenced.append(
            Block(
                match["kind"],
                title[1] if title else "",
                match["text"],
                line,
                match["mark"] or "",
                match["why"] or "",
            )
        )
    return fenced


def script(code: list[Block]) -> str:
    """Join the blocks into one program whose line numbers are those of the page."""
    lines: list[str] = []
    for block in code:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block, and the lines that the page shows as its output."""
    expected: list[str] = []
    command = ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line[2:], []
        elif line.startswith("> ") and command and not expected:
            command += f"\n{line[2:]}"
        else:
            expected.append(line)
    if command:
        yield command, expected


def pattern(line: str) -> tuple[re.Pattern[str], list[str]]:
    """Return a regular expression for a line that the page shows, and the job ids in the line."""
    ids = JOB.findall(line)
    out = []
    for part in re.split(r"(…|\bjob-[0-9a-f]{8}\b)", line.strip()):
        if part == "…":
            out.append(".*")
        elif JOB.fullmatch(part):
            out.append(r"(job-[0-9a-f]{8})")
        else:
            out.append(_loosely(part))
    return re.compile(r"\s*" + "".join(out) + r"\s*"), ids


def _loosely(text: str) -> str:
    pieces, at = [], 0
    for match in LOOSE.finditer(text):
        pieces += [_words(text[at : match.start()]), rf"(?:{LOOSE.pattern})"]
        at = match.end()
    return "".join([*pieces, _words(text[at:])])


def _words(text: str) -> str:
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def compare(expected: list[str], printed: str, ids: dict[str, str]) -> str:
    """Return "" if all expected lines were printed in order, or else a sentence with the first
    missing line. Enters into `ids` the real id for each id on the page."""
    rest = printed.splitlines()
    for line in (text for text in expected if text.strip() not in ("", "…")):
        wanted, names = pattern(line)
        while rest:
            match = wanted.fullmatch(rest.pop(0))
            if match and all(
                ids.get(name, real) == real
                for name, real in zip(names, match.groups(), strict=True)
            ):
                ids |= dict(zip(names, match.groups(), strict=True))
                break
        else:
            return f"not printed: {line}"
    return ""


def run_page(page: Path, folder: Path) -> None:
    """Run the code and the sessions of a page in a folder, as a reader would."""
    (folder / "pyproject.toml").touch()  # The folder becomes a project of its own.
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    to_run = [block for block in blocks(page.read_text()) if block.mark != "not run"]
    for block in to_run:
        if block.kind == "python" and block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
    code = [block for block in to_run if block.kind == "python" and not block.title]
    if code:
        program = folder / f"{page.stem.replace('-', '_')}.py"
        program.write_text(script(code))
        lean = environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ABSENT}"}
        process = _run([sys.executable, str(program)], folder, lean)
        fails = any(block.mark for block in code)
        assert (process.returncode != 0) == fails, (
            f"the code of {page.name} ended with {process.returncode}\n{process.stdout}"
        )
    ids: dict[str, str] = {}
    for block in to_run:
        if block.kind == "console":
            run_session(block, f"{page.name}:{block.line}", folder, environ, ids)


def run_session(
    block: Block, where: str, folder: Path, environ: dict[str, str], ids: dict[str, str]
) -> None:
    session = list(commands(block))
    for number, (command, expected) in enumerate(session):
        line = JOB.sub(lambda match: ids.get(match[0], match[0]), command)
        process = _run(["sh", "-c", line], folder, environ)
        missing = compare(expected, process.stdout, ids)
        assert not missing, (
            f"{where}: $ {line}\n{missing}\n--- printed ({process.returncode}):\n{process.stdout}"
        )
        fails = block.mark == "fails" and number == len(session) - 1
        assert (process.returncode != 0) == fails, (
            f"{where}: $ {line}\nended with {process.returncode}:\n{process.stdout}"
        )


def _run(
    command: list[str], folder: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=500,
    )


def _skip_without_compiler(page: Path) -> None:
    from kinetic._compile import topologies

    if page.stem == "tpu-compile" and not topologies.is_installed():
        pytest.skip("libtpu is not installed: pip install libtpu")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# A page may end with `kinetic jobs cancel`, which does not wait for the job's grace period.
@pytest.mark.settles_within(12)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page.stem in LONG else [])
        for page in PAGES
        if page != ON_RAY and blocks(page.read_text())
    ],
    ids=_name,
)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    _skip_without_compiler(page)
    run_page(page, tmp_path)


@pytest.mark.long
@pytest.mark.settles_within(90)  # Agents on Ray look for a dead leader for this long.
def test_the_page_about_ray_does_what_it_says(
    ray_store_turn: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment has the address of a real dashboard, and no KINETIC_STORE."""
    monkeypatch.setenv("KINETIC_ADDRESS", ray_store_turn.address)
    monkeypatch.setenv("KINETIC_POD_PYTHON", sys.executable)
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "1")
    run_page(ON_RAY, tmp_path)


# -- blocks that are not run, and complete lists ---------------------------------------------------


def test_what_is_not_run_says_why() -> None:
    silent = [
        f"{_name(page)}:{b.line}"
        for page in PAGES
        for b in blocks(page.read_text())
        if b.mark == "not run" and not b.why
    ]
    assert silent == []


def test_little_is_not_run() -> None:
    all_blocks = [block for page in PAGES for block in blocks(page.read_text())]
    assert len([block for block in all_blocks if block.mark == "not run"]) * 4 <= len(all_blocks)


def test_every_link_between_files_of_the_project_leads_somewhere() -> None:
    broken = []
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (page.parent / target).exists():
                broken.append(f"{_name(page)}: {target}")
    assert broken == []


def test_the_reference_describes_each_name_once_and_no_column_lacks_a_heading() -> None:
    named = re.findall(r"^::: (\S+)$", (DOCS / "reference/api.md").read_text(), re.MULTILINE)
    assert len(named) > 20
    assert [name for name in named if named.count(name) > 1] == []
    hook = _hook("options")
    head, *_ = hook.on_page_markdown(hook.PLACE).splitlines()
    assert all(column.strip() for column in head.strip("|").split("|")), head


def test_every_public_name_is_in_the_reference() -> None:
    import kinetic

    page = (DOCS / "reference/api.md").read_text()
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    named |= {name.removeprefix("kinetic.") for name in re.findall(r"`([\w.]+)`", page)}
    assert set(kinetic.__all__) - named == set()


def test_every_argument_of_a_public_function_is_described() -> None:
    page = (DOCS / "reference/api.md").read_text()
    silent = []
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page, re.MULTILINE):
        if not name.startswith("kinetic.keras"):  # Its documentation would import Keras.
            silent += list(_silent_arguments(name, options))
    assert silent == []


def _silent_arguments(name: str, options: str) -> Iterator[str]:
    thing = pkgutil.resolve_name(name)
    functions = {name: thing} if inspect.isfunction(thing) else {}
    if inspect.isclass(thing):
        left_out = re.compile("|".join(re.findall(r'"!([^"]+)"', options)) or "^_")
        for attribute in dir(thing):
            member = getattr(thing, attribute)
            is_ours = str(getattr(member, "__module__", "")).startswith("kinetic.")
            if is_ours and callable(member) and not left_out.search(attribute):
                functions[f"{name}.{attribute}"] = member
    for title, function in functions.items():
        text = inspect.getdoc(function) or ""
        if "options are those of" in text:
            continue
        # A function without a docstring is not on the page.
        parameters = inspect.signature(function).parameters if text else {}
        for parameter in parameters.values():
            is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            is_bound = parameter.name in ("self", "cls")
            if is_named and not is_bound and not re.search(rf"\b{parameter.name}\b", text):
                yield f"{title}({parameter.name})"


def test_every_page_can_be_reached() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [
        p for page in DOCS.rglob("*.md") if (p := page.relative_to(DOCS).as_posix()) not in nav
    ] == []


def test_every_setting_has_its_row() -> None:
    from kinetic._config import settings

    page = (DOCS / "reference/settings.md").read_text()
    variables = {row.variable for row in settings._ROWS.values()}
    read_on_hosts = set(
        re.findall(r'"(KINETIC_\w+)"', (ROOT / "kinetic/_host/identity.py").read_text())
    )
    set_for_functions = set(
        re.findall(
            r'"((?:KINETIC_|JAX_|KERAS_)\w+)":',
            _source("_host/agent/start_message.py", "_host/worker/jaxworld.py"),
        )
    )
    assert variables, "settings must be read from somewhere"
    assert [
        name
        for name in sorted(variables | read_on_hosts | set_for_functions)
        if f"`{name}`" not in page
    ] == []


def _source(*names: str) -> str:
    return "\n".join((ROOT / "kinetic" / name).read_text() for name in names)


def _error_classes() -> list[str]:
    return [
        node.name for node in ast.parse(_source("errors.py")).body if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize("page", ["how-to/troubleshooting.md", "reference/errors.md"])
def test_every_error_is_explained(page: str) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in _error_classes() if name not in text] == []


def test_the_page_of_errors_says_what_to_do() -> None:
    page = (DOCS / "reference/errors.md").read_text()
    names = re.findall(r"^::: kinetic\.errors\.(\w+)\n\n\*\*What to do:\*\* ", page, re.MULTILINE)
    assert names == _error_classes()


def test_the_package_the_command_and_the_changelog_have_one_version() -> None:
    from kinetic import __version__

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["version"]["path"] == "kinetic/version.py"
    printed = subprocess.run(
        [sys.executable, "-m", "kinetic", "--version"], capture_output=True, text=True
    )
    assert printed.stdout == f"kinetic {__version__}\n"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d[\d.]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert versions[0] == __version__
    assert len(changelog.splitlines()) <= 150
    for page in ("how-to/upgrading.md", "explanation/limits.md", "explanation/how-it-compares.md"):
        assert f"kinetic {__version__.rpartition('.')[0]}" in (DOCS / page).read_text()


def test_every_exit_code_is_listed() -> None:
    from kinetic.cli import exit_codes

    page = (DOCS / "reference/cli.md").read_text()
    assert [code for code, _ in exit_codes.TABLE if f"| {code} |" not in page] == []


def test_every_option_of_kinetic_run_is_listed() -> None:
    from kinetic._core.options import Options

    page = (DOCS / "reference/cli.md").read_text()
    rows = [field.metadata["option"] for field in dataclasses.fields(Options)]
    flags = [row.flag.names[0] for row in rows if row.flag is not None]
    assert len(flags) > 20
    assert [flag for flag in flags if f"`{flag}" not in page] == []


# -- wrong pages are detected ----------------------------------------------------------------------

PAGE = """
```python
x = 1
```

<!-- not run: it needs a cluster -->
```python
x = 2
```

```python title="a.py"
x = 3
```

<!-- fails -->
```console
$ echo job-00000000 1.5 s
job-11111111 20 s
$ false
```
"""


def test_blocks_are_found_with_their_marks() -> None:
    page_blocks = blocks(PAGE)
    assert [(b.kind, b.title, b.mark, b.why) for b in page_blocks] == [
        ("python", "", "", ""),
        ("python", "", "not run", "it needs a cluster"),
        ("python", "a.py", "", ""),
        ("console", "", "fails", ""),
    ]
    assert script(page_blocks[:1]).splitlines()[2] == "x = 1"
    assert list(commands(page_blocks[3])) == [
        ("echo job-00000000 1.5 s", ["job-11111111 20 s"]),
        ("false", []),
    ]


def test_a_session_is_compared_loosely_but_compared() -> None:
    ids: dict[str, str] = {}
    assert (
        compare(
            ["started job-11111111", "took 1.5 s …"],
            "hello\nstarted job-abcdefab\ntook 20 ms for  all\n",
            ids,
        )
        == ""
    )
    assert ids == {"job-11111111": "job-abcdefab"}
    assert compare(["job-11111111 ended"], "job-00000000 ended", ids) != "", (
        "another job is another job"
    )
    assert compare(["one", "two"], "two\none\n", {}) == "not printed: two"
    assert compare(["epoch 1"], "epoch 2", {}) == "not printed: epoch 1"


def test_what_a_page_shows_wrongly_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="not printed: two"):
        run_page(page, tmp_path)


def _hook(name: str) -> Any:
    """Run a hook of the documentation's build, and return its module-level names."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / f"hooks/{name}.py")))


def test_links_of_the_pages_for_programs_hold(tmp_path: Path) -> None:
    hook = _hook("llms")
    page = (
        "# A page\n\nSee [it](../b.md#c), [this](#d). Then stop.\n\n```python\nx[0](../b.md)\n```\n"
    )
    assert hook.title_of(page) == "A page"
    assert hook.summary_of(page) == "See it, this."
    rebased = hook.rebase(page, "how-to/a.md")
    assert "[it](b.md#c), [this](how-to/a.md#d)" in rebased
    assert "x[0](../b.md)" in rebased, "code stays as it is"
    full = tmp_path / "llms-full.txt"
    assert sorted(hook.broken_links(rebased, full)) == ["b.md", "how-to/a.md"]
    (tmp_path / "how-to").mkdir()
    for name, anchor in (("b", "c"), ("how-to/a", "e")):
        (tmp_path / f"{name}.md").touch()
        (tmp_path / f"{name}.html").write_text(f'<h2 id="{anchor}">')
    assert list(hook.broken_links(rebased, full)) == ["how-to/a.md#d"]


@pytest.mark.long
def test_the_pages_for_programs_are_complete(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the documentation's site is built by `make docs`")
    import kinetic

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    index, full = ((tmp_path / name).read_text() for name in ("llms.txt", "llms-full.txt"))
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        assert f"]({name})" in index
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        headings = re.findall(r"^#.*$", prose, re.MULTILINE)
        assert [heading for heading in headings if f"\n{heading}\n" not in f"\n{full}"] == []
        assert (tmp_path / name).exists()
    for name in set(kinetic.__all__) - {"BatchError", "__version__", "errors"}:
        assert re.search(rf"^### (jobs\.)?{name}$", full, re.MULTILINE), name
    assert "::: kinetic" not in full


def test_a_page_that_would_fetch_something_is_refused(tmp_path: Path) -> None:
    fetched = _hook("offline").fetched
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org"><img '
        'src="a.png">'
    )
    assert fetched(page) == []
    page.write_text(
        '<script src="//a.org/x.js"></script><style>@import "https://b.org/y.css";</style><link '
        'rel="stylesheet" href="http://c">'
    )
    assert fetched(page) == ["//a.org/x.js", "https://b.org/y.css", "http://c"]
