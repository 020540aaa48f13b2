"""Which modules a host can import as they are here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kinetic._pickling import modules
from kinetic._pickling.modules import Shipped
from kinetic._source import bundle

Shown = SimpleNamespace


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Shown]]:
    """Write files, import modules, and look; gives the modules' names without `modtest_`."""
    before = set(sys.modules)
    root = tmp_path / "project"
    root.mkdir()
    python_path = list(sys.path)

    def looked(
        files: dict[str, str],
        imported: list[str],
        search: tuple[str, ...] = ("",),
        ignore: str = "",
        extra: str = "",
    ) -> Shown:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (root / ".kineticignore").write_text(ignore)
        monkeypatch.setattr(
            sys,
            "path",
            [*(str(root / place) for place in search), *([extra] if extra else []), *python_path],
        )
        importlib.invalidate_caches()
        for name in imported:
            importlib.import_module(name)
        return again(search)

    def again(search: tuple[str, ...] = ("",), python_path: str = "") -> Shown:
        tree = bundle.build(root, cache_dir=tmp_path / "cache")
        found = modules.classify(Shipped(root, search, tree.manifest, python_path))
        return SimpleNamespace(
            by_value={m.__name__ for m in found.by_value if m.__name__ not in before},
            edited=set(found.edited) - before,
            imported=set(found.imported) - before,
            root=root,
            again=again,
        )

    yield looked
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_tree_are_imported(look: Callable[..., Shown]) -> None:
    files = {"modtest_a.py": "", "modtest_b/__init__.py": "", "modtest_b/deep/part.py": "X = 1"}
    found = look(files, ["modtest_a", "modtest_b.deep.part"])
    assert found.by_value == set()
    assert found.imported == {"modtest_a", "modtest_b", "modtest_b.deep.part"}


def test_what_an_ignore_file_leaves_out_travels_by_value(look: Callable[..., Shown]) -> None:
    found = look(
        {"modtest_c.py": "", "modtest_d.py": ""},
        ["modtest_c", "modtest_d"],
        ignore="modtest_c.py\n",
    )
    assert (found.by_value, found.imported) == ({"modtest_c"}, {"modtest_d"})


def test_a_module_is_found_by_the_hosts_search_path_only(look: Callable[..., Shown]) -> None:
    files = {"src/modtest_e.py": "", "modtest_f.py": ""}
    found = look(files, ["modtest_e", "modtest_f"], search=("src", ""))
    assert found.imported == {"modtest_e", "modtest_f"}
    assert found.again(("",)).by_value == {"modtest_e"}


def test_a_module_that_another_one_hides_on_the_host_travels_by_value(
    look: Callable[..., Shown],
) -> None:
    found = look({"second/modtest_g.py": ""}, ["modtest_g"], search=("first", "second"))
    assert found.imported == {"modtest_g"}
    (found.root / "first").mkdir()
    (found.root / "first" / "modtest_g.py").write_text("another = True")
    assert found.again(("first", "second")).by_value == {"modtest_g"}


def test_a_module_outside_the_tree_travels_by_value_unless_the_host_finds_it(
    look: Callable[..., Shown], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "modtest_h.py").touch()
    found = look({}, ["modtest_h"], extra=str(outside))
    assert found.by_value == {"modtest_h"}
    assert found.again(python_path=f"/nowhere{os.pathsep}{outside}").by_value == set()


def test_a_module_reached_through_a_link_is_that_of_the_tree(look: Callable[..., Shown]) -> None:
    found = look({"real/modtest_i.py": ""}, [], search=("link",))
    (found.root / "link").symlink_to("real")
    importlib.invalidate_caches()
    importlib.import_module("modtest_i")
    again = found.again(("link",))
    assert (again.by_value, again.imported) == (set(), {"modtest_i"})


def test_a_module_loaded_under_a_name_of_its_own_travels_by_value(
    look: Callable[..., Shown],
) -> None:
    found = look({"modtest_j.py": ""}, [])
    spec = importlib.util.spec_from_file_location("modtest_other_name", found.root / "modtest_j.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    assert found.again().by_value == {"modtest_other_name"}


def edit(file: Path, text: str) -> None:
    """Write the file, and give it a time that no earlier content can have had."""
    later_ns = file.stat().st_mtime_ns + 5_000_000_000
    file.write_text(text)
    os.utime(file, ns=(later_ns, later_ns))


def test_an_edited_module_is_named_until_it_is_reloaded(look: Callable[..., Shown]) -> None:
    found = look({"modtest_k.py": "X = 1"}, ["modtest_k"])
    assert found.edited == set()
    edit(found.root / "modtest_k.py", "X = 22")
    again = found.again()
    assert (again.edited, again.by_value) == ({"modtest_k"}, set())
    importlib.reload(sys.modules["modtest_k"])
    again = found.again()
    assert (again.edited, again.imported) == (set(), {"modtest_k"})


def test_an_edit_before_the_first_look_is_seen_by_the_byte_code(
    look: Callable[..., Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = look({"modtest_l.py": "X = 1"}, [])
    importlib.import_module("modtest_l")
    edit(found.root / "modtest_l.py", "X = 333")
    assert found.again().edited == {"modtest_l"}


def test_a_module_that_the_program_has_made_is_sent(
    look: Callable[..., Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "modtest_made",
        "json.modtest_made",
    ):  # The package of the second makes it, on a host too.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert look({"modtest_a.py": ""}, ["modtest_a"]).by_value == {"modtest_made"}
