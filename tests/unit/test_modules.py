"""The choice between modules that a host imports by name and modules that are sent by value."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kinetic._pickling import modules
from kinetic._pickling.modules import Shipped
from kinetic._source import bundle

Result = SimpleNamespace


@pytest.fixture
def classify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Yield a function that writes files, imports modules, and classifies all modules."""
    before = set(sys.modules)
    root = tmp_path / "project"
    root.mkdir()
    python_path = list(sys.path)

    def import_and_classify(
        files: dict[str, str],
        imported: list[str],
        search: tuple[str, ...] = ("",),
        ignore: str = "",
        extra: str = "",
    ) -> Result:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (root / ".kineticignore").write_text(ignore)
        monkeypatch.setattr(
            sys,
            "path",
            [*(str(root / folder) for folder in search), *([extra] if extra else []), *python_path],
        )
        importlib.invalidate_caches()
        for name in imported:
            importlib.import_module(name)
        return repeat(search)

    def repeat(search: tuple[str, ...] = ("",), python_path: str = "") -> Result:
        tree = bundle.build(root, cache_dir=tmp_path / "cache")
        classes = modules.classify(Shipped(root, search, tree.manifest, python_path))
        return SimpleNamespace(
            by_value={m.__name__ for m in classes.by_value if m.__name__ not in before},
            edited=set(classes.edited) - before,
            imported=set(classes.imported) - before,
            root=root,
            repeat=repeat,
        )

    yield import_and_classify
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_tree_are_imported(classify: Callable[..., Result]) -> None:
    files = {"modtest_a.py": "", "modtest_b/__init__.py": "", "modtest_b/deep/part.py": "X = 1"}
    first = classify(files, ["modtest_a", "modtest_b.deep.part"])
    assert first.by_value == set()
    assert first.imported == {"modtest_a", "modtest_b", "modtest_b.deep.part"}


def test_what_an_ignore_file_leaves_out_travels_by_value(classify: Callable[..., Result]) -> None:
    first = classify(
        {"modtest_c.py": "", "modtest_d.py": ""},
        ["modtest_c", "modtest_d"],
        ignore="modtest_c.py\n",
    )
    assert (first.by_value, first.imported) == ({"modtest_c"}, {"modtest_d"})


def test_a_module_is_found_by_the_hosts_search_path_only(classify: Callable[..., Result]) -> None:
    files = {"src/modtest_e.py": "", "modtest_f.py": ""}
    first = classify(files, ["modtest_e", "modtest_f"], search=("src", ""))
    assert first.imported == {"modtest_e", "modtest_f"}
    assert first.repeat(("",)).by_value == {"modtest_e"}


def test_a_module_that_another_one_hides_on_the_host_travels_by_value(
    classify: Callable[..., Result],
) -> None:
    first = classify({"second/modtest_g.py": ""}, ["modtest_g"], search=("first", "second"))
    assert first.imported == {"modtest_g"}
    (first.root / "first").mkdir()
    (first.root / "first" / "modtest_g.py").write_text("another = True")
    assert first.repeat(("first", "second")).by_value == {"modtest_g"}


def test_a_module_outside_the_tree_travels_by_value_unless_the_host_finds_it(
    classify: Callable[..., Result], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "modtest_h.py").touch()
    first = classify({}, ["modtest_h"], extra=str(outside))
    assert first.by_value == {"modtest_h"}
    assert first.repeat(python_path=f"/nowhere{os.pathsep}{outside}").by_value == set()


def test_a_module_reached_through_a_link_is_that_of_the_tree(
    classify: Callable[..., Result],
) -> None:
    first = classify({"real/modtest_i.py": ""}, [], search=("link",))
    (first.root / "link").symlink_to("real")
    importlib.invalidate_caches()
    importlib.import_module("modtest_i")
    second = first.repeat(("link",))
    assert (second.by_value, second.imported) == (set(), {"modtest_i"})


def test_a_module_loaded_under_a_name_of_its_own_travels_by_value(
    classify: Callable[..., Result],
) -> None:
    first = classify({"modtest_j.py": ""}, [])
    spec = importlib.util.spec_from_file_location("modtest_other_name", first.root / "modtest_j.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    assert first.repeat().by_value == {"modtest_other_name"}


def edit(file: Path, text: str) -> None:
    """Write a file with a modification time later than that of any earlier content."""
    later_ns = file.stat().st_mtime_ns + 5_000_000_000
    file.write_text(text)
    os.utime(file, ns=(later_ns, later_ns))


def test_an_edited_module_is_named_until_it_is_reloaded(classify: Callable[..., Result]) -> None:
    first = classify({"modtest_k.py": "X = 1"}, ["modtest_k"])
    assert first.edited == set()
    edit(first.root / "modtest_k.py", "X = 22")
    second = first.repeat()
    assert (second.edited, second.by_value) == ({"modtest_k"}, set())
    importlib.reload(sys.modules["modtest_k"])
    third = first.repeat()
    assert (third.edited, third.imported) == (set(), {"modtest_k"})


def test_an_edit_before_the_first_look_is_seen_by_the_byte_code(
    classify: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first = classify({"modtest_l.py": "X = 1"}, [])
    importlib.import_module("modtest_l")
    edit(first.root / "modtest_l.py", "X = 333")
    assert first.repeat().edited == {"modtest_l"}
