"""The import path of programs that a job starts on a host."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kinetic._host.agent import start_message
from kinetic._host.worker import attempt


@pytest.fixture
def place(tmp_path) -> Path:
    for folder in ("project/src", "project/.venv", "tree/src", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path.resolve()


def path(place: Path, places: list[str], inherited: str) -> list[str]:
    facts = {"client_root": str(place / "project"), "tree": str(place / "tree")}
    search_path = start_message.make_search_path(
        [str(place / folder) for folder in places], inherited, **facts
    )
    return search_path.replace(f"{place}/", "").split(os.pathsep)


def test_the_tree_comes_first_and_the_project_is_replaced_by_it(place):
    inherited = os.pathsep.join(
        str(place / folder) for folder in ("project/src", "outside", "project/.venv", "project")
    )
    assert path(place, ["tree"], inherited) == ["tree", "tree/src", "outside", "project/.venv"], (
        ".venv was not sent"
    )
    assert path(place, [], "src::..") == ["src", "", ".."], (
        "relative ones start at the host's folder"
    )
    assert path(place, ["tree"], "") == ["tree"]


def test_a_folder_of_the_project_is_known_by_any_of_its_names(place):
    (place / "link").symlink_to("project")
    assert path(place, [], f"{place}/link/src") == ["tree/src"]
    assert path(place, [], f"{place}/project-2/src") == ["project-2/src"]


@pytest.mark.parametrize(
    ("name", "is_inherited"),
    [("secrets.py", False), ("email/__init__.py", False), ("code/x", True), ("my.py", True)],
)
def test_a_place_that_would_hide_standard_modules_is_left_to_the_program(place, name, is_inherited):
    (place / "tree" / name).parent.mkdir(exist_ok=True)
    (place / "tree" / name).touch()
    assert path(place, ["tree"], f"{place}/outside") == ["tree", "outside"][not is_inherited :]
    assert path(place, ["tree"], f"{place}/project") == ["tree"], (
        "the caller's own PYTHONPATH names it"
    )


@pytest.mark.parametrize("root", ["", "/repo"])
def test_what_is_installed_editable_is_imported_from_the_tree_where_it_was_imported(root):
    start = SimpleNamespace(
        client_root=root or "/",
        tree="/t",
        sys_path=["/t/app"],
        editable=["/t/own/src", "/t/named", "/t/found"],
    )
    inherited = [f"{root}/named", "/std", "/venv/site-packages", f"{root}/own/src", f"{root}/x"]
    assert attempt.make_import_path(start, inherited) == [
        *("/t/app", "/t/named", "/std", "/t/found", "/venv/site-packages", "/t/own/src"),
        f"{root}/x",
    ]
    assert attempt.make_import_path(start, ["/std", "/image/site-packages"]) == [
        *("/t/app", "/std", *start.editable, "/image/site-packages")
    ], "on a cluster nothing of the caller's disk is there"


def first(path: str | None, *, is_virtual: bool = True) -> dict[str, str]:
    inherited = {} if path is None else {"PATH": path}
    facts = {"executable": "/me/bin/python", "prefix": "/me", "is_virtual": is_virtual}
    return start_message.prefer_environment(inherited, **facts)


def test_programs_are_those_of_the_hosts_environment():
    assert first("/bin:/me/bin") == {"PATH": "/me/bin:/bin", "VIRTUAL_ENV": "/me"}
    assert first("/other/bin:/bin")["PATH"] == "/me/bin:/other/bin:/bin"
    assert first("/me/bin:/bin") == {}, "it is active"
    assert first(None)["PATH"] == f"/me/bin:{os.defpath}"
    assert first("/bin:/me/bin", is_virtual=False) == {}, "the system's order is its own"
    assert first("/bin", is_virtual=False) == {"PATH": "/me/bin:/bin"}
