"""Files that ignore rules exclude from a submission; git's own answers are the expected results."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kinetic._source import bundle, walk
from kinetic._source import git as git_door
from kinetic._source.ignore import kinetic_rules


def left_out(text: str, path: str, *, folder: bool = False) -> bool | None:
    return kinetic_rules(text.encode()).decide(path, path.rpartition("/")[2], is_folder=folder)


@pytest.mark.parametrize(
    ("pattern", "path", "verdict"),
    [
        ("*.csv", "a/b.csv", True),
        ("data/*.csv", "data/deep/b.csv", True),
        ("data/*.csv", "b.csv", None),
        ("b.py", "a/b.py", True),
        ("# b.py", "# b.py", None),
        ("  b.py  ", "b.py", True),
        ("", "a", None),
        ("/", "a", None),
        ("/b.py", "a/b.py", None),
        ("/b.py", "b.py", True),
        ("./a/b.py", "a/b.py", True),
        ("[ab].py", "b.py", True),
        ("b", "ab", None),
        ("*.py\n!keep.py", "x/keep.py", False),
        ("!keep.py\n*.py", "x/keep.py", True),
    ],
)
def test_kineticignore(pattern, path, verdict):
    assert left_out(pattern, path) is verdict


def test_a_trailing_slash_means_folders_only():
    assert left_out("data/", "x/data", folder=True) is True
    assert left_out("data/", "x/data", folder=False) is None


FIXED = [
    "a",
    "b/",
    "/a",
    "*",
    "!a",
    "a/**",
    "**/b",
    "a/**/b",
    "*.b",
    "a*b",
    "!a/b",
    "!*/",
    "a/*",
    "[a-b]",
    r"\#a",
    r"\!a",
    "a\\ ",
    "a ",
]
FILES = ("a", "b", "ab", "a.b", "A", "a b", "#a", "!a", "-", "a ", "[a", "a\\", "^", ":", "]")
FOLDERS = ("", "a/", "b/", "ab/", "a/b/", "a/a/b/", ".b/", "a.b/")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if shutil.which("git") is None:
        pytest.skip("git is the oracle")
    root = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True, env=environment(root))
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for path in (root / folder / name for folder in FOLDERS for name in FILES):
        if not path.exists():
            path.write_text("")
    return root


def environment(root) -> dict[str, str]:
    return {
        "HOME": str(root),
        "GIT_CONFIG_NOSYSTEM": "1",
        "PATH": "/usr/bin:/bin:/usr/local/bin",
        "GIT_OPTIONAL_LOCKS": "0",
    }


def kept_by_git(root) -> set[str]:
    """Return the files that git does not ignore, neither by their name nor by a parent folder."""
    command = [
        "git",
        "-c",
        "core.quotePath=false",
        "ls-files",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True, env=environment(root))
    return set(filter(None, os.fsdecode(done.stdout).split("\0")))


def kept_here(root) -> set[str]:
    return set(walk.scan(str(root.resolve()), walk.ScanOptions(default_excludes=False)).files)


@pytest.mark.starts_processes
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    top=st.lists(st.sampled_from(FIXED), max_size=4),
    nested=st.lists(st.sampled_from(FIXED), max_size=3),
    private=st.lists(st.sampled_from(FIXED), max_size=1),
)
@example(top=["*", "!*/", "!ab"], nested=[], private=[])
@example(top=["a"], nested=["!b"], private=["ab"])
@example(top=["*.b", "!a.b/"], nested=[], private=[])
def test_gitignore_means_what_git_means(repository, top, nested, private):
    (repository / ".gitignore").write_text("\n".join(top), newline="")
    (repository / "a" / ".gitignore").write_text("\n".join(nested) + "\n", newline="")
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/exclude").write_text("\n".join(private))
    assert kept_here(repository) == kept_by_git(repository)


# -- git's ignore rules in other files than .gitignore ---------------------------------------------

GLOBAL = "*.b\n/ab/\n!a.b\n"
WHERE = {
    "by default": {".config/git/ignore": GLOBAL},
    "named in ~/.gitconfig": {
        ".gitconfig": "[core]\n\texcludesFile = ~/mine\n",
        "mine": GLOBAL,
        ".config/git/ignore": "a\n",
    },
    "of one repository": {
        "repository/.git/config": "[core]\nexcludesfile = ../mine\n",
        "mine": GLOBAL,
    },
}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path.resolve()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return home


def git(folder, *words: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return os.fsdecode(done.stdout)


def read_late_clock() -> int:
    """Return a time 10 s ahead, so that files seem old and the cache trusts their timestamps."""
    return time.time_ns() + 10**10


@pytest.mark.starts_processes
@pytest.mark.parametrize("where", WHERE)
def test_what_git_ignores_everywhere_is_ignored_here_and_a_change_is_seen(home, where):
    top = home / "repository"
    names = ("a", "ab.b", "a.b")
    make(top, *(folder + name for folder in ("", "ab/", "sub/") for name in names))
    git(top, "init", "-q")
    for name, text in WHERE[where].items():
        make(home, name)
        (home / name).write_text(text)

    def list_sent() -> set[str]:
        packed = bundle.build(top, cache_dir=home / "cache", clock_ns=read_late_clock)
        return {path for path, _ in packed.files()}

    def listed() -> set[str]:
        return set(git(top, "ls-files", "-co", "--exclude-standard").split())

    assert list_sent() == listed() != set()
    name = next(name for name, text in WHERE[where].items() if text == GLOBAL)
    (home / name).write_text("a\n")
    assert list_sent() == listed() == {"ab/ab.b", "ab/a.b", "ab.b", "a.b", "sub/ab.b", "sub/a.b"}
    (top / ".git/info/exclude").write_text("*.b\n")
    assert list_sent() == listed() == set()


@pytest.mark.starts_processes
def test_what_git_tracks_is_sent_although_a_rule_matches(home):
    """`git add -f` adds files although a rule ignores them. They are sent, as `git clone` has them
    too."""
    make(
        home, ".gitignore", "veo/logging.py", "config.json", "other.json", "data/small", "data/big"
    )
    (home / ".gitignore").write_text("log*\n*.json\ndata/\n")
    git(home, "init", "-q")
    git(home, "add", "-f", "config.json", "veo/logging.py", "data/small")
    names = {".gitignore", "config.json", "veo/logging.py", "data/small"}
    assert kept_here(home) == names

    def list_sent() -> set[str]:
        packed = bundle.build(home, cache_dir=home.parent / "cache", clock_ns=read_late_clock)
        return {path for path, _ in packed.files()}

    assert list_sent() == names
    git(home, "add", "-f", "other.json")
    assert list_sent() == names | {"other.json"}, "the index is looked at"


@pytest.mark.starts_processes
def test_nested_repositories_and_submodules_have_their_own_rules(home):
    for name in ("lib", "project", "project/nested"):
        make(home / name, "a.py", "a.log", "a.tmp")
        git(home / name, "init", "-q")
    (home / "lib/.gitignore").write_text("*.log\n")
    git(home / "lib", "add", ".")
    git(home / "lib", "commit", "-qm", "x")
    (home / "project/.gitignore").write_text("*.tmp\n")
    git(home / "project", "submodule", "--quiet", "add", str(home / "lib"), "sub")
    make(home / "project/sub", "b.py", "b.log", "b.tmp")
    (home / "project/nested/.gitignore").write_text("a.py\n")
    paths = {path for path in kept_here(home / "project") if ".git" not in path}
    assert paths == {
        *("a.py", "a.log", "nested/a.log", "nested/a.tmp"),
        *("sub/a.py", "sub/a.tmp", "sub/b.py", "sub/b.tmp"),
    }


@pytest.mark.starts_processes
def test_the_environment_of_a_hook_does_not_lead_git_to_another_repository(home, monkeypatch):
    for name in ("one", "other"):
        make(home / name, "a.py", "a.log")
        git(home / name, "init", "-q")
    (home / "one/.gitignore").write_text("*.log\n")
    monkeypatch.setenv("GIT_DIR", str(home / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(home / "other"))
    assert kept_here(home / "one") == {"a.py", ".gitignore"}


@pytest.mark.starts_processes
def test_without_git_its_rules_are_not_read_and_a_warning_says_so(home, monkeypatch):
    make(home / "project", ".gitignore", "a.py", "a.log")
    (home / "project/.gitignore").write_text("*.log\n")

    def warnings() -> str:
        packed = bundle.build(home / "project", cache_dir=home / "cache")
        assert {path for path, _ in packed.files()} == {".gitignore", "a.py", "a.log"}
        (warning,) = packed.warnings
        return warning

    assert "is not in a git repository" in warnings()
    (home / "project/.git").write_text("gitdir: nowhere")
    assert "because git failed: fatal: " in warnings()
    shutil.rmtree(home / "cache")
    (home / "bin").mkdir()
    (home / "bin/env").symlink_to(shutil.which("env"))
    monkeypatch.setenv("PATH", str(home / "bin"))
    (home / "project/nested/.git").mkdir(parents=True)
    assert warnings() == walk._NO_GIT, "once for all repositories"


@pytest.mark.starts_processes
def test_one_more_working_tree_has_the_rules_of_its_repository(home):
    top = home / "main"
    make(top, "x.py")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "x")
    git(top, "worktree", "add", "-q", "../more", "-b", "more")
    (top / ".git/info").mkdir(exist_ok=True)
    (top / ".git/info/exclude").write_text("*.log\n")
    make(home / "more", "y.log")
    listed = git(home / "more", "ls-files", "-co", "--exclude-standard").split()
    files = walk.scan(str(home / "more"), walk.ScanOptions(default_excludes=False)).files
    assert set(files) - {".git"} == set(listed)


def make(root, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")


@pytest.mark.starts_processes
def test_the_rules_of_the_repository_hold_for_a_project_inside_it(home):
    root = home
    git(root, "init", "-q")
    make(
        root,
        "pkgs/mine/x.py",
        "pkgs/mine/x.ckpt",
        "pkgs/mine/out/y",
        "pkgs/mine/z.log",
    )
    (root / ".gitignore").write_text("*.ckpt\n/pkgs/mine/out/\n")
    (root / "pkgs/.gitignore").write_text("mine/*.log\n")
    assert kept_here(root / "pkgs/mine") == {"x.py"}


@pytest.mark.starts_processes
def test_a_project_that_its_repository_ignores_is_shipped_whole(tmp_path):
    root = tmp_path.resolve()
    git(root, "init", "-q")
    make(root, "build/mine/x.py", "build/mine/y.log")
    (root / ".gitignore").write_text("build/\n*.log\n")
    assert kept_here(root / "build/mine") == {"x.py", "y.log"}


@pytest.mark.starts_processes
def test_kineticignore_has_the_last_word(tmp_path):
    root = tmp_path.resolve()
    git(root, "init", "-q")
    make(root, "a.csv", "b.csv", "c.py", ".venv/d.py", "sub/e.csv")
    (root / ".gitignore").write_text("*.csv\n")
    (root / ".kineticignore").write_text("c.py\n!b.csv\n!.venv\n")
    files = walk.scan(str(root), walk.ScanOptions()).files
    assert set(files) == {"b.csv", ".venv/d.py", ".gitignore", ".kineticignore"}


@pytest.mark.starts_processes
def test_kineticignore_keeps_paths_in_a_folder_that_others_leave_out(tmp_path):
    root = tmp_path.resolve()
    git(root, "init", "-q")
    make(root, "data/small.csv", "data/big.csv", "data/more/x", "data/deep/er/y", "data/deep/z")
    make(root, "node_modules/one/i.js", "node_modules/two/i.js", "mine/a", "mine/b", "out/best/c")
    make(root, "out/last/d", "empty/e")
    (root / ".gitignore").write_text("data/\nempty/\n*.csv\n")
    patterns = "data/small.csv /data/deep/er/ ./node_modules/one mine/b out/best empty/*"
    lines = ["mine/", *(f"!{each}" for each in patterns.split())]
    (root / ".kineticignore").write_text("\n".join(lines))
    scan = walk.scan(str(root), walk.ScanOptions(outputs=frozenset({str(root / "out")})))
    assert {each for each in scan.files if "ignore" not in each} == {
        *("data/small.csv", "data/deep/er/y", "node_modules/one/i.js", "out/best/c")
    }


@given(st.binary())
def test_anything_is_an_ignore_file(text):
    assert kinetic_rules(text).decide("a/b", "b", is_folder=False) in (True, False, None)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_an_ignore_file_that_is_no_file_has_no_rules(tmp_path, kind):
    root = tmp_path.resolve()
    make(root, "x.py")
    if kind == "link":
        (root / "rules").write_text("x.py\n")
        (root / ".kineticignore").symlink_to("rules")
    elif kind == "pipe":
        os.mkfifo(root / ".kineticignore")
    else:
        make(root, ".kineticignore/y")
    assert "x.py" in kept_here(root)


@pytest.mark.starts_processes
def test_a_git_that_does_not_answer_is_waited_for_and_named(home, monkeypatch):
    make(home / "project", "a.py", "a.log", ".gitignore")
    (home / "project/.gitignore").write_text("*.log\n")
    git(home / "project", "init", "-q")
    (home / "bin").mkdir()
    (home / "bin/git").write_text(
        f'#!/bin/sh\ncase "$*" in *ls-files*) until [ -e {home}/told ]; do sleep 0.01; done; esac\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    (home / "bin/git").chmod(0o755)
    messages = []

    class Answer(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            (home / "told").touch()  # git waits for this file.

    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(git_door, "SLOW_S", 0.01)
    handler = Answer()
    logging.getLogger("kinetic").addHandler(handler)
    try:
        files = kept_here(home / "project")
    finally:
        logging.getLogger("kinetic").removeHandler(handler)
    assert files == {"a.py", ".gitignore"}
    first = messages[0]
    assert first.startswith("kinetic: Still waiting for git after 0.01 s")
    assert str(home / "project") in first
