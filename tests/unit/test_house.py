"""The project's own rules for modules. Each rule is a small function, which is itself tested on a
text that breaks it."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MAX_LINES = 900
MAX_FUNCTION_LINES = 100
IN_PROGRAMS = {"kinetic/_host/worker/joining.py", "kinetic/_host/worker/startup/sitecustomize.py"}
"""Modules in programs that a function starts, which know their host only from the environment."""
MAY_READ_ENVIRON = {
    "kinetic/_config/settings.py",
    "kinetic/_host/identity.py",
    "kinetic/_host/bootstrap.py",  # runs in a pod that may not have kinetic yet
    "kinetic/_host/local/zygote.py",  # restarts itself
    "kinetic/_host/agent/worker_process.py",  # reads PYTHONHASHSEED
    "kinetic/_host/worker/jaxworld.py",
    "kinetic/_ray/address.py",  # reads the token, as Google's library reads its credentials
    "kinetic/_in_job/slices.py",  # reads the variables that the worker sets for the function
    "kinetic/_in_job/preemption.py",  # likewise
    "kinetic/_datasets/data.py",  # likewise, for modules that create their data on a host, too
} | IN_PROGRAMS
MAY_WRITE_ENVIRON = {
    "kinetic/_compile/compiler.py",  # a process of its own, before it loads JAX
    "kinetic/_compile/topologies.py",  # libtpu reads only variables; restored afterwards
    "kinetic/_host/worker/attempt.py",
    "kinetic/_host/worker/joining.py",
    "kinetic/_host/worker/libraries.py",  # a fork server imports as workers do
}
"""Modules that may set environment variables, as they run in a process such as the worker."""
WITHOUT_KINETIC = IN_PROGRAMS | {
    "kinetic/_host/bootstrap.py",
    "kinetic/_host/worker/startup/kinetic_awaiting.py",
}
"""Modules that run in processes where kinetic cannot be imported, or not yet."""
MAY_LOCK = WITHOUT_KINETIC
MAY_NAME_PROC = WITHOUT_KINETIC | {
    "kinetic/_datasets/call_data.py",  # refuses to mount data below /proc
    "kinetic/_source/shipment.py",  # counts no script below /proc as the project's
    "kinetic/_host/worker/mounts.py",  # sets up a user namespace
}
PARTICIPLES = re.compile(
    r"_*(?:\w+ed|[a-z]+ing|told|sent|made|found|kept|known|seen|held|left|lost|met|said|shown"
    r"|taken|given|written|drawn|built|brought|begun|broken|chosen|come|gone|got|heard|hidden|laid|led"
    r"|meant|paid|spent|spoken|stuck|thought|thrown|torn|understood|used|wound|bound|caught)_*"
)
NO_PARTICIPLES = {"embed", "feed", "listing", "need", "ping", "ring", "seed", "setting", "string"}
DICTATED = {"_missing_", "cancelled", "done", "preempted"}
"""Names that enum, concurrent.futures and the public API (`kinetic.preempted`) prescribe."""
CHANGING = {"update", "clear", "pop", "setdefault", "__setitem__"}


def modules() -> list[Path]:
    return sorted((ROOT / "kinetic").rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """Return all nodes of a module, the module first. The cache holds one module for the next rule:
    with all modules it would slow the garbage collector in later tests."""
    return list(ast.walk(ast.parse(source)))


def environment_uses(source: str) -> tuple[list[int], list[int]]:
    """List the lines that read the process's environment, and those that change it."""
    reads, writes = [], []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            reads += [
                node.lineno
                for alias in node.names
                if alias.name in {"environ", "environb", "getenv", "getenvb"}
            ]
        if not (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            continue
        if node.attr in {"getenv", "getenvb"}:
            reads.append(node.lineno)
        elif node.attr in {"putenv", "unsetenv"}:
            writes.append(node.lineno)
        elif node.attr in {"environ", "environb"}:
            (writes if _changes(node, source) else reads).append(node.lineno)
    return reads, writes


def _changes(node: ast.AST, source: str) -> bool:
    parent = next(each for each in nodes_of(source) if node in ast.iter_child_nodes(each))
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Store | ast.Del)
    if isinstance(parent, ast.AugAssign):
        return True
    return isinstance(parent, ast.Attribute) and parent.attr in CHANGING


def lock_calls(source: str) -> list[int]:
    """List the lines that lock a file, or read who holds a lock."""
    return [
        node.lineno
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute)
        and re.fullmatch(r"flock|lockf|F_(OFD_)?[GS]ETLKW?", node.attr)
    ]


def proc_paths(source: str) -> list[int]:
    """List the lines with a path below /proc."""
    return [
        node.lineno
        for node in nodes_of(source)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"/proc(/|$)", node.value)
    ]


def imports_of_kinetic(source: str) -> list[int]:
    """List the lines that import kinetic at run time, without a fallback."""
    quiet = {
        node
        for block in nodes_of(source)
        if (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
        or (isinstance(block, ast.Try) and "except ImportError:" in ast.unparse(block))
        for node in ast.walk(block)
    }
    return [
        node.lineno
        for node in nodes_of(source)
        if node not in quiet
        and isinstance(node, ast.Import | ast.ImportFrom)
        and re.match(r"(from|import) kinetic\b", ast.unparse(node))
    ]


def docstring_fault(source: str) -> str:
    """Return what a module's docstring lacks, or "" if it has a first sentence."""
    first = (ast.get_docstring(nodes_of(source)[0]) or "").partition("\n\n")[0]
    return "" if first.strip().endswith((".", ":")) else "a first sentence that says what it is"


def long_functions(source: str) -> list[str]:
    """List the functions with too many lines."""
    return [
        node.name
        for node in nodes_of(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def bare_raises(source: str) -> list[int]:
    """List the lines that raise RuntimeError or Exception, which callers cannot catch by name."""
    raised = [
        node for node in nodes_of(source) if isinstance(node, ast.Raise) and node.exc is not None
    ]
    return [
        node.lineno
        for node in raised
        if _class_name(node.exc) in {"RuntimeError", "Exception", "BaseException"}
    ]


def _class_name(raised: ast.expr | None) -> str:
    target = raised.func if isinstance(raised, ast.Call) else raised
    return target.id if isinstance(target, ast.Name) else ""


def bare_participles(source: str) -> list[str]:
    """List the functions named by a bare participle: `told`, `_checked`, `waiting`. Properties may
    have such names."""
    functions = [
        node
        for node in nodes_of(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        each.name
        for each in functions
        if PARTICIPLES.fullmatch(each.name)
        and "_" not in each.name.strip("_")
        and each.name.strip("_") not in NO_PARTICIPLES
        and each.name not in DICTATED
        and not any("property" in ast.unparse(decorator) for decorator in each.decorator_list)
    ]


def machine_paths(text: str) -> list[str]:
    """List the paths of a particular machine. `/home/me` and `/home/you` are examples."""
    # A checkout in "/src" is too short to identify a machine.
    own = re.escape(str(ROOT)) if len(ROOT.parts) > 2 else r"(?!)"
    return re.findall(rf"{own}\b|/Users/\w+|/home/(?!me\b|you\b|user\b)\w+|\.pyenv/versions", text)


SHORTEST_LIMIT_S = 100.0
_LIMITS = (
    r"mark\.timeout\(([\d.]+)",
    r"PATIENCE_S = ([\d.]+)",
    r"monotonic\(\) \+ ([\d.]+)",
    r"check=.*, timeout=([\d.]+)",
)
_CLOCKS = r"(?:perf_counter|monotonic|time)\(\)"


def tight_limits(source: str) -> list[str]:
    """List time limits that are too short for a busy machine, and assertions about durations."""
    short = [
        m[0]
        for limit in _LIMITS
        for m in re.finditer(limit, source)
        if float(m[1]) < SHORTEST_LIMIT_S
    ]
    return short + re.findall(rf"assert [^\n]*{_CLOCKS} - [^\n]*", source)


def is_of_system(path: Path) -> bool:
    return name(path).startswith("kinetic/_system/")


RULES: dict[str, Callable[[Path, str], object]] = {
    "opening": lambda path, source: path.name != "__init__.py" and docstring_fault(source),
    "reads": lambda path, source: (
        name(path) not in MAY_READ_ENVIRON and environment_uses(source)[0]
    ),
    "changes": lambda path, source: (
        name(path) not in MAY_WRITE_ENVIRON and environment_uses(source)[1]
    ),
    "locks": lambda path, source: not is_of_system(path) and lock_calls(source),
    "proc": lambda path, source: not is_of_system(path) and proc_paths(source),
    "imports": lambda path, source: name(path) in WITHOUT_KINETIC and imports_of_kinetic(source),
    "length": lambda _, source: (lines := len(source.splitlines())) > MAX_LINES and lines,
    "functions": lambda _, source: long_functions(source),
    "name": lambda path, _: FORBIDDEN_NAMES & {*path.relative_to(ROOT).with_suffix("").parts},
    "raises": lambda _, source: bare_raises(source),
    "verbs": lambda _, source: bare_participles(source),
}
"""Rules by name: each returns the faults of a module, given its path and text, or a false value."""


@functools.cache
def all_faults() -> dict[str, dict[str, object]]:
    """Return the faults by rule and module; check all rules of a module before parsing the next."""
    faults: dict[str, dict[str, object]] = {rule: {} for rule in RULES}
    for path in modules():
        source = path.read_text()
        for rule, check in RULES.items():
            if fault := check(path, source):
                faults[rule][name(path)] = fault
    return faults


def test_every_module_opens_with_where_it_sits() -> None:
    assert all_faults()["opening"] == {}


def test_the_environment_is_read_in_two_modules() -> None:
    assert all_faults()["reads"] == {}


def test_the_environment_is_changed_only_in_workers() -> None:
    assert all_faults()["changes"] == {}


def test_only_system_locks_files() -> None:
    assert all_faults()["locks"].keys() <= MAY_LOCK


def test_only_system_reads_proc() -> None:
    assert all_faults()["proc"].keys() <= MAY_NAME_PROC


def test_what_runs_without_kinetic_does_not_import_it() -> None:
    assert all_faults()["imports"] == {}


def test_no_module_is_two_rooms() -> None:
    assert all_faults()["length"] == {}


def test_no_function_is_two_thoughts() -> None:
    assert all_faults()["functions"] == {}


def test_modules_are_named_for_what_they_are() -> None:
    assert all_faults()["name"] == {}


def test_errors_can_be_caught_by_name() -> None:
    assert all_faults()["raises"] == {}


def collections_by_host(source: str) -> int:
    """Count annotated attributes that hold or map host numbers, such as `dict[int, …]`."""
    assignments = (node for node in nodes_of(source) if isinstance(node, ast.AnnAssign))
    by_number = re.compile(r"(set|dict|frozenset|Counter|defaultdict|Mapping)\[int\b")
    return sum(
        isinstance(node.target, ast.Attribute)
        and bool(by_number.match(ast.unparse(node.annotation)))
        for node in assignments
    )


def test_who_is_there_is_kept_by_hosts_and_their_waiting_room_alone() -> None:
    """State by host is kept in hosts.py and waiting_room.py alone: copies would come to differ."""
    counts = {
        name(path): count
        for folder in ("_host", "_rpc")
        for path in (ROOT / "kinetic" / folder).glob("*.py")
        if (count := collections_by_host(path.read_text()))
    }
    # Not states of hosts: files with the last output of agents, and open streams.
    processes = {"kinetic/_host/agents.py": 2, "kinetic/_rpc/server.py": 1}
    assert counts == processes | {"kinetic/_host/hosts.py": 4, "kinetic/_rpc/waiting_room.py": 5}


def test_functions_are_named_for_what_they_do() -> None:
    assert all_faults()["verbs"] == {}


def test_tests_pass_on_a_busy_machine() -> None:
    own = Path(__file__)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != own]
    assert {name(path): lim for path in tests if (lim := tight_limits(path.read_text()))} == {}


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Test modules outside of packages need unique names: pytest imports them by bare names."""
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    loose = [path for path in folders if not (path / "__init__.py").exists()]
    names = Counter(module.name for folder in loose for module in folder.glob("*.py"))
    assert [each for each, times in names.items() if times > 1 and each != "conftest.py"] == []


def test_the_site_leads_to_each_page_once() -> None:
    nav = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.starts_processes
def test_no_file_names_the_machine_it_was_written_on() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {
        f: (ROOT / f).read_text(errors="ignore")
        for f in listed.stdout.split("\0")
        if f and (ROOT / f).is_file()
    }
    paths = {
        f: hits
        for f, text in texts.items()
        if f != name(Path(__file__)) and (hits := machine_paths(text))
    }
    assert paths == {}


@pytest.mark.parametrize(
    ("rule", "breaks", "keeps"),
    [
        (
            lambda s: environment_uses(s)[0],
            "import os\nx = os.environ.get('A')",
            "import os\nx = os.getpid()",
        ),
        (
            lambda s: environment_uses(s)[0],
            "import os\nx = os.environ['A']",
            "import os\nos.environ['A'] = 'b'",
        ),
        (
            lambda s: environment_uses(s)[0],
            "import os\nf(dict(os.environ))",
            "import os\nos.environ.update(A='b')",
        ),
        (lambda s: environment_uses(s)[0], "from os import getenv", "from os import getpid"),
        (
            lambda s: environment_uses(s)[1],
            "import os\ndel os.environ['A']",
            "import os\nx = os.getenv('A')",
        ),
        (lock_calls, "import fcntl\nfcntl.flock(1, 2)", "import fcntl\nfcntl.fcntl(1, 2)"),
        (proc_paths, "open(f'/proc/{pid}/stat')", "open('/process')  # not in /proc"),
        (
            imports_of_kinetic,
            "from kinetic._core import plan",
            "if TYPE_CHECKING:\n    import kinetic",
        ),
        (
            docstring_fault,
            '"""A thing\n\nIn: a. Out: b.\n"""',
            '"""A thing:\nlong.\n\nIn: a. Out: b.\n"""',
        ),
        (docstring_fault, "import os", '"""A thing."""'),
        (
            long_functions,
            "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
            "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1),
        ),
        (
            tight_limits,
            "pytestmark = pytest.mark.timeout(60)",
            "pytestmark = pytest.mark.timeout(600)",
        ),
        (
            tight_limits,
            "deadline = time.monotonic() + 20",
            "deadline = time.monotonic() + PATIENCE_S",
        ),
        (
            tight_limits,
            "assert time.perf_counter() - begun < 3",
            "took_s = time.perf_counter() - begun",
        ),
        (bare_raises, "raise RuntimeError('no')", "raise ValueError('no')"),
        (
            bare_raises,
            "try: ...\nexcept E as e: raise Exception from e",
            "try: ...\nexcept E: raise",
        ),
        (bare_participles, "def _checked(x): ...", "def check(x): ..."),
        (bare_participles, "async def waiting(): ...", "@property\ndef waiting(self): ..."),
        (bare_participles, "def told(): ...", "def ring(): ...\ndef told_of(): ..."),
        (machine_paths, "see /" + "Users/ann/x", "see ~/x and /home/me/x"),
        (machine_paths, "see /" + "home/ann/x", "see kinetic/home"),
    ],
)
def test_a_rule_sees_what_breaks_it(rule: Callable[[str], object], breaks: str, keeps: str) -> None:
    assert rule(breaks)
    assert not rule(keeps)


def test_every_promise_is_shown_by_tests_that_exist() -> None:
    folder = ROOT / "tests" / "system"
    table = ast.parse((folder / "conftest.py").read_text())
    shown_by = next(
        ast.literal_eval(node.value)
        for node in table.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHOWN_BY"
    )
    missing = [
        name
        for name in itertools.chain(*shown_by.values())
        for file, _, test in [name.partition("::")]
        if not (folder / file).is_file()
        or f"def {test.partition('[')[0]}(" not in f"{(folder / file).read_text()}def ("
    ]
    assert missing == []
