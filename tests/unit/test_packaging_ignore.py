"""What ignore files leave out; git itself is the oracle for .gitignore."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from kinetic._config.environment import git_files
from kinetic._source import bundle, gitconfig, walk
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
    return set(walk.scan(str(root.resolve()), walk.ScanOptions(default_excludes=False)).files)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    top=st.lists(PATTERNS | st.sampled_from(FIXED), max_size=4),
    nested=st.lists(PATTERNS | st.sampled_from(FIXED), max_size=3),
    private=st.lists(st.sampled_from(FIXED), max_size=1),
)
@example(top=["*", "!*/", "!ab"], nested=[], private=[])
@example(top=["a"], nested=["!b"], private=["ab"])
@example(top=["ab"], nested=["!ab"], private=[])
@example(top=["*.b", "!a.b/"], nested=[], private=[])
@example(top=["a/", "!a/b"], nested=["[]-]", "[!]a]"], private=[])
@example(top=["\ufeffa", "b\r", "ab \\ "], nested=["[[:alpha:]", "[a-", "[[:nope:]]"], private=[])
def test_gitignore_means_what_git_means(repository, top, nested, private):
    # Versions of git differ in what they make of "a**/b".
    assume(not any(re.search(r"[^/*!]\*\*", pattern) for pattern in (*top, *nested)))
    (repository / ".gitignore").write_text("\n".join(top), newline="")
    (repository / "a" / ".gitignore").write_text("\n".join(nested) + "\n", newline="")
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/exclude").write_text("\n".join(private))
    assert kept_here(repository) == kept_by_git(repository)


def test_two_stars_beside_a_letter_are_one(repository):
    """As git documents it; older versions took "a**/b" for "ab", too."""
    (repository / ".gitignore").write_text("a**/b")
    (repository / ".git/info/exclude").unlink(missing_ok=True)
    (repository / "a" / ".gitignore").unlink(missing_ok=True)
    kept = kept_here(repository)
    assert {"ab/a", "a/a/b/a"} <= kept
    assert not {"a/b/a", "a.b/b"} & kept


# -- what git ignores in every repository ----------------------------------------------------------

GLOBAL = "*.b\n/ab/\n!a.b\n"
WHERE = {
    "nowhere": {},
    "by default": {".config/git/ignore": GLOBAL},
    "in a folder that the environment names": {"xdg/git/ignore": GLOBAL},
    "named in ~/.gitconfig": {
        ".gitconfig": "[core]\n\texcludesFile = ~/mine\n",
        "mine": GLOBAL,
        ".config/git/ignore": "a\n",
    },
    "named beside the default": {
        ".config/git/config": '[CORE] ExcludesFile="~/mine" ; mine\n',
        "mine": GLOBAL,
    },
    "the later one wins": {
        ".config/git/config": "[core]\nexcludesfile = ~/other\n",
        ".gitconfig": "[core]\nexcludesfile = ~/mine\n",
        "other": "a\n",
        "mine": GLOBAL,
    },
    "of the system": {"system": "[core]\nexcludesfile = ~/mine\n", "mine": GLOBAL},
    "of one repository": {
        ".gitconfig": "[core]\nexcludesfile = ~/other\n",
        "repository/.git/config": "[core]\nbare = false\nexcludesfile = mine\n",
        "repository/mine": GLOBAL,
        "other": "a\n",
    },
    "included": {
        ".gitconfig": '[include]\n\tpath = "more/config"\n[includeIf "gitdir:/no"]\npath = x\n',
        "more/config": "[core]\nexcludesfile = ~/mine\n",
        "mine": GLOBAL,
    },
    "switched off": {
        ".gitconfig": "[core]\nexcludesfile =\n",
        ".config/git/ignore": GLOBAL,
    },
    "another section": {
        ".gitconfig": '[core "x"]\nexcludesfile = ~/mine\n[core]\npager = less # no\n',
        "mine": GLOBAL,
    },
    "under what the repository says": {
        ".config/git/ignore": "a\nab\n",
        "repository/.gitignore": "!a\n",
        "repository/.git/info/exclude": "!ab\n",
    },
}


def in_home(home, **more: str) -> dict[str, str]:
    return environment(home) | {"HOME": str(home)} | more


@pytest.mark.parametrize("where", WHERE)
def test_what_git_ignores_everywhere_is_ignored_here(tmp_path, where):
    if shutil.which("git") is None:
        pytest.skip("git is the oracle")
    home = tmp_path.resolve()
    top = home / "repository"
    make(top, *(folder + name for folder in ("", "ab/", "sub/") for name in ("a", "ab.b", "a.b")))
    env = in_home(home)
    if where.startswith("in a folder"):
        env["XDG_CONFIG_HOME"] = str(home / "xdg")
    if where == "of the system":
        env = {k: v for k, v in env.items() if k != "GIT_CONFIG_NOSYSTEM"}
        env["GIT_CONFIG_SYSTEM"] = str(home / "system")
    subprocess.run(["git", "init", "-q"], cwd=top, check=True, env=env)
    for name, text in WHERE[where].items():
        make(home, name)
        (home / name).write_text(text)
    listed = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listed, cwd=top, capture_output=True, check=True, env=env)
    how = walk.ScanOptions(default_excludes=False, git=git_files(env))
    found = walk.scan(str(top), how)
    assert set(found.files) == set(filter(None, done.stdout.decode().split("\0")))
    assert {str(home / name) for name in WHERE[where] if name not in ("other", "mine")} - {
        str(home / ".config/git/ignore"),
        str(home / "repository/mine"),
    } <= set(found.watched)


def test_a_link_to_what_is_ignored_everywhere_is_read_and_a_change_is_seen(tmp_path):
    home = tmp_path.resolve()
    make(home, "top/.git/HEAD", "top/x.py", "top/x.log", "dotfiles/ignore", ".config/git/y")
    (home / "dotfiles/ignore").write_text("*.log\n")
    (home / ".config/git/ignore").symlink_to(home / "dotfiles/ignore")
    git = git_files({"HOME": str(home)})

    def names() -> set[str]:
        packed = bundle.build(home / "top", git=git, cache_dir=home / "cache", clock_ns=later)
        return {path for path, _ in packed.files()}

    later = lambda: 10**18 * 5  # noqa: E731 - a clock, long after the files were changed
    assert names() == {"x.py"}
    (home / "dotfiles/ignore").write_text("*.py\n")
    assert names() == {"x.log"}
    (home / ".gitconfig").write_text("[core]\nexcludesfile = /nowhere\n")
    assert names() == {"x.py", "x.log"}


def test_one_more_working_tree_has_the_rules_of_its_repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is the oracle")
    home = tmp_path.resolve()
    env, top = in_home(home), home / "main"
    make(top, "x.py")
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=top, check=True, env=env)
    command = ["git", "worktree", "add", "-q", "../more", "-b", "more"]
    subprocess.run(command, cwd=top, check=True, env=env)
    (top / ".git/info").mkdir(exist_ok=True)
    (top / ".git/info/exclude").write_text("*.log\n")
    make(home / "more", "y.log")
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(listed, cwd=home / "more", capture_output=True, check=True, env=env)
    found = walk.scan(str(home / "more"), walk.ScanOptions(default_excludes=False)).files
    assert set(found) - {".git"} == set(done.stdout.decode().split())


SECTIONS = ["[core]", "[core]\n", "[CORE]", '[core "a b"]', "[x]", "[core"]
KEYS = ["excludesFile", "EXCLUDESFILE", "other", " = ", "=", "excludesfile = a"]
VALUES = ['"', "\\", "\\n", '\\"', "\\\n", "a", "~/x", "/y z", '="b c" d', "= a\\\n b"]
CONFIG = st.lists(
    st.sampled_from([*SECTIONS, *KEYS, *VALUES, " ", "\t", "\n", "\r\n", "#", ";"]), max_size=14
).map("".join)


@settings(max_examples=75, deadline=None)
@given(CONFIG)
@example('[core]\nexcludesfile = "a b" c ; d\n')
@example("[core] excludesfile = a\\\n  b # c\n")
@example("[core]\nexcludesfile\n")
def test_settings_are_read_as_git_reads_them(config_file, text):
    config_file.write_bytes(text.encode())
    command = ["git", "config", "--file", str(config_file), "-z", "--list"]
    done = subprocess.run(command, capture_output=True, env=environment(config_file.parent))
    found = list(gitconfig.parse(text))
    if done.returncode:
        return  # git runs nowhere with such a file
    told = [each.partition("\n") for each in done.stdout.decode().split("\0") if each]
    # Before 2.45 git made a space of a tab inside a value.
    assert [(key, value.replace("\t", " ")) for key, value in found] == [
        (key, value.replace("\t", " ")) for key, _, value in told
    ]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    if shutil.which("git") is None:
        pytest.skip("git is the oracle")
    return tmp_path_factory.mktemp("config") / "config"


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
    found = walk.scan(str(root), walk.ScanOptions()).files
    assert set(found) == {"b.csv", ".venv/d.py", ".gitignore", ".kineticignore"}


def test_kineticignore_keeps_paths_in_a_folder_that_others_leave_out(tmp_path):
    root = tmp_path.resolve()
    make(root, "data/small.csv", "data/big.csv", "data/more/x", "data/deep/er/y", "data/deep/z")
    make(root, "node_modules/one/i.js", "node_modules/two/i.js", "mine/a", "mine/b", "out/best/c")
    make(root, "out/last/d", "empty/e")
    (root / ".gitignore").write_text("data/\nempty/\n*.csv\n")
    kept = "data/small.csv /data/deep/er/ ./node_modules/one mine/b out/best empty/*"
    lines = ["mine/", *(f"!{each}" for each in kept.split())]
    (root / ".kineticignore").write_text("\n".join(lines))
    found = walk.scan(str(root), walk.ScanOptions(outputs=frozenset({str(root / "out")})))
    assert {each for each in found.files if "ignore" not in each} == {
        *("data/small.csv", "data/deep/er/y", "node_modules/one/i.js", "out/best/c")
    }


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
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    found = walk.scan(str(root), walk.ScanOptions(default_excludes=False))
    assert set(found.files) == {"x.py", "sub/y.py", "deep/.gitignore/z.py"}
    assert sorted(found.special) == [".gitignore", "sub/.gitignore"]


@given(st.binary())
def test_anything_is_an_ignore_file(text):
    for rules in (git_rules(text), kinetic_rules(text)):
        assert rules.decide("a/b", "b", is_folder=False) in (True, False, None)
