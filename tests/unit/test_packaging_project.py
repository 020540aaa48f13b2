"""Finding the project that a function belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic._source.project import MARKERS, Project, find_project
from kinetic.errors import UsageError


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


def find(entry, place, **options):
    options = {
        "cwd": place,
        "home": place / "nobody",
        "sys_path": [],
        "package_root": None,
    } | options
    return find_project(entry, **options)


def tree(place: Path, *files: str) -> None:
    for file in files:
        path = place / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


@pytest.mark.parametrize("marker", MARKERS)
def test_the_nearest_marker_is_the_root(place, marker):
    tree(place, "pyproject.toml", f"repo/{marker}", "repo/src/deep/train.py")
    assert find(place / "repo/src/deep/train.py", place).root == place / "repo"
    assert find(place / "repo/src/deep", place).entry_rel == "src/deep"


def test_a_git_folder_is_a_marker(place):
    tree(place, "repo/.git/HEAD", "repo/a/x.py")
    assert find(place / "repo/a/x.py", place).root == place / "repo"


def test_packages_are_climbed_out_of(place):
    tree(
        place,
        "code/pkg/__init__.py",
        "code/pkg/sub/__init__.py",
        "code/pkg/sub/x.py",
        "code/pkg/setup.py",
    )
    project = find(place / "code/pkg/sub/x.py", place)
    assert (project.root, project.entry_rel) == (place / "code", "pkg/sub")


def test_without_a_marker_the_folder_itself_is_the_root(place):
    tree(place, "a/b/x.py")
    assert find(place / "a/b/x.py", place) == Project(place / "a/b", "", None, (), marked=False)


def test_an_ignore_file_of_ours_marks_a_project_where_nothing_else_does(place):
    tree(place, "a/.kineticignore", "a/b/x.py", "c/setup.py", "c/d/.kineticignore", "c/d/y.py")
    assert find(place / "a/b/x.py", place) == Project(place / "a", "b", None, ())
    assert find(place / "c/d/y.py", place) == Project(place / "c", "d", None, ())


def test_home_and_temporary_folders_are_nobodys_project(place):
    tree(
        place,
        "home/.git/HEAD",
        "home/x.py",
        "tmp/setup.py",
        "tmp/y.py",
        "tmp/mine/z.py",
        "tmp/own/setup.py",
        "tmp/own/sub/w.py",
    )
    options = {"home": place / "home", "temporary": [place / "tmp"]}
    assert find(place / "home/x.py", place, **options).shared
    assert find(place / "tmp/y.py", place, **options).shared
    assert find(Path("/"), place, **options).shared
    assert find(place / "tmp/mine/z.py", place, **options) == Project(
        place / "tmp/mine", "", None, (), marked=False
    )
    assert find(place / "tmp/own/sub/w.py", place, **options) == Project(
        place / "tmp/own", "sub", None, ()
    )
    project = find(place / "home/x.py", place, package_root=str(place / "home"), **options)
    assert project == Project(place / "home", "", None, ()), "unless somebody says so"


def test_a_notebook_counts_from_the_working_directory(place):
    tree(place, "repo/setup.cfg", "repo/notebooks/n.ipynb")
    project = find(None, place, cwd=place / "repo/notebooks")
    assert (project.root, project.entry_rel, project.cwd_rel) == (
        place / "repo",
        "notebooks",
        "notebooks",
    )


def test_home_is_no_project_unless_started_there(place):
    tree(place, "home/.git/HEAD", "home/script/x.py", "home/y.py")
    assert (
        find(place / "home/script/x.py", place, home=place / "home").root == place / "home/script"
    )
    assert find(place / "home/y.py", place, home=place / "home").root == place / "home"


def test_climbing_out_of_packages_stops_below_home(place):
    tree(place, "home/pkg/__init__.py", "home/pkg/x.py", "home/__init__.py")
    assert find(place / "home/pkg/x.py", place, home=place / "home").root == place / "home/pkg"


def test_the_top_of_the_file_system_is_no_project(place, monkeypatch):
    tree(place, "a/x.py")
    assert find(Path("/"), place).root == Path("/")
    assert find(place / "a/x.py", place).root != Path("/")


def test_the_given_root_wins(place):
    tree(place, "repo/pyproject.toml", "repo/sub/setup.py", "repo/sub/x.py")
    for package_root in (str(place / "repo"), "repo", "~/"):
        home = place / "repo" if package_root == "~/" else place
        project = find(place / "repo/sub/x.py", place, package_root=package_root, home=home)
        assert (project.root, project.entry_rel) == (place / "repo", "sub")


def test_a_given_root_must_exist_and_contain_the_entry(place):
    tree(place, "a/x.py", "b/y.py", "file")
    with pytest.raises(UsageError, match="outside it"):
        find(place / "a/x.py", place, package_root=str(place / "b"))
    for wrong in ("nowhere", "file"):
        with pytest.raises(UsageError, match="not a folder"):
            find(place / "a/x.py", place, package_root=str(place / wrong))
    (place / "ab").mkdir()
    with pytest.raises(UsageError, match="outside it"):
        find(place / "ab", place, package_root=str(place / "a"))


def test_the_search_path_is_kept_in_order_without_installed_packages(place):
    tree(
        place,
        "repo/setup.py",
        "repo/lib/a.py",
        "repo/src/b.py",
        "repo/.venv/lib/python3.11/site-packages/c.py",
        "other/d.py",
    )
    repo = place / "repo"
    sys_path = [
        "",
        str(repo / "src"),
        str(place / "other"),
        "/usr/lib",
        str(repo / ".venv/lib/python3.11/site-packages"),
    ]
    sys_path += [str(repo / "lib"), str(repo / "src"), str(repo / "gone"), str(repo / "setup.py")]
    project = find(repo / "src/b.py", place, cwd=repo, sys_path=sys_path)
    assert project.sys_path_rel == ("", "src", "lib")
    assert project.cwd_rel == ""


def test_links_are_seen_through(place):
    tree(place, "real/setup.py", "real/src/x.py")
    (place / "link").symlink_to(place / "real")
    project = find(
        place / "link/src/x.py", place, cwd=place / "link", sys_path=[str(place / "link/src")]
    )
    assert project == Project(place / "real", "src", "", ("src",))
