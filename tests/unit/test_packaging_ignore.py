"""What ignore files leave out; git itself is the oracle for .gitignore."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kinetic._source import walk
from kinetic._source.ignore import git_rules, kinetic_rules


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


LETTERS = st.sampled_from([*"abAB.-*?/!\\[]^ #:", "**", "[a", "[!a-b]", "[[:alpha:]]"])
PATTERNS = st.lists(LETTERS, min_size=1, max_size=7).map("".join)
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
    """Files that git neither ignores itself nor inside an ignored folder."""
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
    return set(walk.scan(str(root.resolve()), walk.How(default_excludes=False)).files)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    top=st.lists(PATTERNS | st.sampled_from(FIXED), max_size=4),
    nested=st.lists(PATTERNS | st.sampled_from(FIXED), max_size=3),
    private=st.lists(st.sampled_from(FIXED), max_size=1),
)
@example(top=["*", "!*/", "!ab"], nested=[], private=[])
@example(top=["a"], nested=["!b"], private=["ab"])
@example(top=["ab"], nested=["!ab"], private=[])
@example(top=["a**/b"], nested=["**"], private=[])
@example(top=["*.b", "!a.b/"], nested=[], private=[])
@example(top=["a/", "!a/b"], nested=["[]-]", "[!]a]"], private=[])
@example(top=["\ufeffa", "b\r", "ab \\ "], nested=["[[:alpha:]", "[a-", "[[:nope:]]"], private=[])
def test_gitignore_means_what_git_means(repository, top, nested, private):
    (repository / ".gitignore").write_text("\n".join(top), newline="")
    (repository / "a" / ".gitignore").write_text("\n".join(nested) + "\n", newline="")
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/exclude").write_text("\n".join(private))
    assert kept_here(repository) == kept_by_git(repository)


def make(root, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")


def test_the_rules_of_the_repository_hold_for_a_project_inside_it(tmp_path):
    root = tmp_path.resolve()
    make(
        root,
        ".git/HEAD",
        "pkgs/mine/x.py",
        "pkgs/mine/x.ckpt",
        "pkgs/mine/out/y",
        "pkgs/mine/z.log",
    )
    (root / ".gitignore").write_text("*.ckpt\n/pkgs/mine/out/\n")
    (root / "pkgs/.gitignore").write_text("mine/*.log\n")
    assert kept_here(root / "pkgs/mine") == {"x.py"}


def test_a_project_that_its_repository_ignores_is_shipped_whole(tmp_path):
    root = tmp_path.resolve()
    make(root, ".git/HEAD", "build/mine/x.py", "build/mine/y.log")
    (root / ".gitignore").write_text("build/\n*.log\n")
    assert kept_here(root / "build/mine") == {"x.py", "y.log"}


def test_kineticignore_has_the_last_word(tmp_path):
    root = tmp_path.resolve()
    make(root, "a.csv", "b.csv", "c.py", ".venv/d.py", "sub/e.csv")
    (root / ".gitignore").write_text("*.csv\n")
    (root / ".kineticignore").write_text("c.py\n!b.csv\n!.venv\n")
    found = walk.scan(str(root), walk.How()).files
    assert set(found) == {"b.csv", ".venv/d.py", ".gitignore", ".kineticignore"}


def test_a_link_is_no_ignore_file_and_garbage_does_no_harm(tmp_path):
    root = tmp_path.resolve()
    make(root, "x.py", "sub/y.py")
    (root / "rules").write_text("x.py\n")
    (root / ".gitignore").symlink_to("rules")
    (root / "sub/.gitignore").write_bytes(b"\xff\xfe\0[\n\\\n")
    assert kept_here(root) == {"x.py", "rules", "sub/y.py", "sub/.gitignore"}


BYTES = [
    "é",
    "?",
    "??",
    "*",
    "a",
    "[é]",
    "[!a]",
    "[à-é]",
    "日",
    "日本",
    "\\",
    "/",
    "!",
    "\udcff",
    "Ã",
    "[[:alpha:]]",
    "**",
]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(
        st.lists(st.sampled_from(BYTES), min_size=1, max_size=4).map("".join), max_size=4
    )
)
@example(lines=["?"])
@example(lines=["a[é]"])
@example(lines=["é/", "!é/a"])
@example(lines=["d/日*", "\udcff"])
def test_names_beyond_ascii_are_bytes_as_in_git(foreign, lines):
    (foreign / ".gitignore").write_bytes(os.fsencode("\n".join(lines)))
    assert kept_here(foreign) == kept_by_git(foreign)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    if shutil.which("git") is None:
        pytest.skip("git is the oracle")
    root = tmp_path_factory.mktemp("foreign")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True, env=environment(root))
    for folder in ("", "é/", "d/", "\udcff\udcfe/"):
        (root / folder).mkdir(exist_ok=True)
        for name in ("a", "é-", "aé", "日本", "日", "\udcc3", "Ã", "\udca9", "à"):
            (root / folder / name).write_text("")
    return root


def test_an_ignore_file_that_is_no_file_has_no_rules(tmp_path):
    root = tmp_path.resolve()
    make(root, "x.py", "sub/y.py", "deep/.gitignore/z.py")
    os.mkfifo(root / ".gitignore")
    os.mknod(root / "sub/.gitignore", stat.S_IFSOCK)
    found = walk.scan(str(root), walk.How(default_excludes=False))
    assert set(found.files) == {"x.py", "sub/y.py", "deep/.gitignore/z.py"}
    assert sorted(found.special) == [".gitignore", "sub/.gitignore"]


@given(st.binary())
def test_anything_is_an_ignore_file(text):
    for rules in (git_rules(text), kinetic_rules(text)):
        assert rules.decide("a/b", "b", is_folder=False) in (True, False, None)
