"""Packages in editable installations, which are sent next to the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from kinetic._source import bundle, companions, editable, shipment, walk
from kinetic._source.companions import Companions
from kinetic._source.dependencies import find, for_hosts
from kinetic._source.download import unpack
from kinetic._source.editable import ImportFolder
from kinetic._source.upload import upload
from kinetic._store.local import LocalStore
from tests.unit.bundle_cases import later, listed, write

ROOT = Path(__file__).resolve().parents[2]


def git_init(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", folder], check=True)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder that contains the `site-packages` of a simulated interpreter."""
    folder = tmp_path.resolve()
    (folder / "site-packages").mkdir()
    folders = [str(folder / "nobody"), str(folder / "site-packages")]
    monkeypatch.setattr(editable, "_site_folders", lambda: folders)
    return folder


def pth(place: Path, *lines: object) -> list[str]:
    """Write a `.pth` file with these lines; return the import path that results."""
    (place / "site-packages/them.pth").write_text("".join(f"{line}\n" for line in lines))
    return [str(place / "site-packages"), *map(str, lines)]


def built(root: Path, *places: ImportFolder, clock=later, **options) -> bundle.Bundle:
    also = Companions(places, (Path("/"),))
    return bundle.build(root, also=also, cache_dir=root.parent / "cache", clock_ns=clock, **options)


def test_path_lines_are_places_and_what_is_installed_is_not(place):
    write(place, {"a/src/x.py": "", "other/site-packages/y.py": "", "home/z.py": ""})
    (place / "link").symlink_to("a")
    lines = ["# no", "", "import sys", place / "link/src", place / "other/site-packages"]
    search = pth(place, *lines, place / "home", place / "gone", ROOT)
    assert editable.find(search, "", [place / "home"]) == [ImportFolder(str(place / "a/src"))], (
        "neither installed packages, home, what is gone, nor kinetic itself"
    )
    assert editable.find(search[:1], "", []) == [], "this interpreter does not import from there"


def test_path_files_are_read_again_only_when_one_comes_or_goes(place, monkeypatch):
    pth(place, "/a")
    assert editable.pth_entries() == ("/a",)
    site_folder = place / "site-packages"
    before = site_folder.stat()
    read = []
    monkeypatch.setattr(Path, "read_text", lambda path, **_: read.append(path.name) or "/b\n")
    assert editable.pth_entries() == ("/a",)
    assert not read, "every call would read them several times"
    (site_folder / "more.pth").touch()
    os.utime(site_folder, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert editable.pth_entries() == ("/b", "/b")
    assert read == ["more.pth", "them.pth"]


def test_folders_that_the_program_names_from_where_it_lies_are_places(place, monkeypatch):
    write(place, {"a/late.py": "", "b/main.py": "", ".editor/y.py": ""})
    monkeypatch.chdir(place / "b")
    search = ["../a", f"{place}/b/../a", f"{place}/b", "../.editor", "../gone", ".."]
    assert editable.find(search, "", [place]) == [ImportFolder(str(place / "a"))]
    space: dict = {"__name__": "script", "__file__": str(place / "b/main.py")}
    exec("def train(): pass", space)
    module = ModuleType("script")
    vars(module).update(space)
    monkeypatch.setitem(sys.modules, "script", module)
    monkeypatch.setattr(sys, "path", search[:1])
    source_settings = shipment.SourceSettings(place / "store", place / "cache")
    project, packed = shipment.of(module.train, source_settings)
    assert {path for path, _ in packed.files()} == {"a/late.py", "b/main.py"}
    assert (project.root, project.editable_rel, project.entry_rel) == (place, ("a",), "b")


def test_folders_of_pythonpath_are_places_unless_an_editor_made_them(place):
    write(place, {"a/x.py": "", ".editor/helpers/y.py": ""})
    named = [str(place / "a"), str(place / ".editor/helpers"), str(ROOT)]
    assert editable.find(named, ":".join(named), []) == [ImportFolder(str(place / "a"))]


@pytest.mark.parametrize("table", ["MAPPING", "_redirections"])
def test_finders_of_build_backends_lead_to_places(place, monkeypatch, table):
    write(place, {"a/pkg/__init__.py": "", "a/solo.py": "", "b/sub/ns/part/__init__.py": ""})
    paths = {
        "pkg": str(place / "a/pkg"),
        "solo": str(place / "a/solo"),
        "ns.part": str(place / "b/sub/ns/part"),
        "renamed": str(place / "a/pkg"),
        "kinetic": str(ROOT / "kinetic"),
    }
    module = ModuleType("__editable___tests_finder")
    finder = type("Finder", (), {"__module__": module.__name__})
    if table == "MAPPING":
        module.MAPPING = paths
    else:
        finder._redirections = {
            name: f"{path}/__init__.py" if Path(path).is_dir() else f"{path}.py"
            for name, path in paths.items()
        }
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert editable.find([], "", []) == [
        ImportFolder(str(place / "a"), ("pkg", "solo.py")),
        ImportFolder(str(place / "b/sub"), ("ns",)),
    ]


def test_a_part_is_what_is_imported_of_a_project(place):
    write(place, {"a/pyproject.toml": "", "a/src/x.py": "", "b/setup.py": "", "b/pkg/y.py": ""})
    a, b = str(place / "a"), str(place / "b")
    parts = editable.parts(
        [ImportFolder(f"{a}/src"), ImportFolder(b, ("pkg",)), ImportFolder(f"{a}/lib")], [place]
    )
    assert [(part.root, part.only) for part in parts] == [(a, ("lib", "src")), (b, ("pkg",))]
    assert editable.parts([ImportFolder(b)], [place])[0].only is None


@pytest.mark.starts_processes
def test_the_ignore_rules_of_each_project_count_and_keys_stay(place):
    git_init(place / "lib")
    native = f"fast{EXTENSION_SUFFIXES[0]}"
    write(
        place,
        {
            "app/pyproject.toml": "",
            "app/train.py": "",
            "lib/pyproject.toml": "",
            "lib/.gitignore": "*.so\n_version.py\n*.bin\n",
            "lib/.kineticignore": "src/pkg/large/\n",
            "lib/tests/test.py": "",
            "lib/src/loose/_version.py": "",
            "lib/src/pkg/__init__.py": "",
            "lib/src/pkg/_version.py": "",
            f"lib/src/pkg/{native}": "",
            "lib/src/pkg/data.bin": "",
            "lib/src/pkg/large/x.py": "",
            "lib/src/pkg/.env": "",
            "lib/src/pkg/resource.txt": "",
        },
    )
    packed = built(place / "app", ImportFolder(str(place / "lib/src")))
    assert packed.root == place
    assert [path for path in listed(packed) if (place / path).is_file()] == [
        "app/pyproject.toml",
        "app/train.py",
        "lib/src/pkg/__init__.py",
        "lib/src/pkg/_version.py",
        f"lib/src/pkg/{native}",
        "lib/src/pkg/resource.txt",
    ]
    assert any("lib/src/pkg/.env" in text and "keys" in text for text in packed.warnings)


def test_a_package_around_the_project(place):
    write(place, {"r/setup.py": "", "r/pkg/__init__.py": "", "r/app/.kineticignore": "no.py\n"})
    write(place, {"r/app/setup.py": "", "r/app/no.py": "", "r/app/yes.py": "", "r/o.py": ""})
    files = {
        path
        for path in listed(built(place / "r/app", ImportFolder(str(place / "r"))))
        if "." in path
    }
    assert files == {
        *("o.py", "setup.py", "pkg/__init__.py"),
        *("app/.kineticignore", "app/setup.py", "app/yes.py"),
    }


@pytest.mark.starts_processes
def test_in_the_project_its_own_rules_decide_but_git_does_not_hide_a_package(place):
    git_init(place / "r")
    write(place, {"r/setup.py": "", "r/.gitignore": "third/\nown/_v.py\n"})
    write(place, {"r/.kineticignore": "no/\n", "r/no/a.py": "", "r/third/b.py": ""})
    write(place, {"r/own/__init__.py": "", "r/own/_v.py": ""})
    places = [ImportFolder(str(place / "r" / name)) for name in ("no", "third", "own")]
    packed = built(place / "r", *places)
    assert {path for path in listed(packed) if path.endswith(".py")} == {
        *("setup.py", "third/b.py", "own/__init__.py", "own/_v.py")
    }
    assert packed.root == place / "r"


def test_a_package_that_is_too_large_is_left_out_and_named(place, monkeypatch):
    write(place, {"app/setup.py": "", "lib/setup.py": "", "lib/x.py": "", "lib/y.py": ""})
    monkeypatch.setattr(walk, "MOST_FILES", 2)
    packed = built(place / "app", ImportFolder(str(place / "lib")))
    assert [path for path in listed(packed) if path.startswith("lib/")] == []
    assert any(f"{place}/lib" in text and "Too large" in text for text in packed.warnings)


@pytest.mark.parametrize("change", ["a rule in place", "a file less"])
def test_a_package_that_is_not_too_large_any_more_is_sent(place, monkeypatch, change):
    write(place, {"app/setup.py": "", "lib/setup.py": "", "lib/.kineticignore": "nothing\n"})
    write(place, {"lib/deep/x.py": "", "lib/deep/y.py": ""})
    monkeypatch.setattr(walk, "MOST_FILES", 3)
    lib = ImportFolder(str(place / "lib"))
    assert built(place / "app", lib).warnings
    if change == "a file less":
        (place / "lib/deep/y.py").unlink()
    else:
        with open(place / "lib/.kineticignore", "r+") as rules:
            rules.write("y.py    ")
    packed = built(place / "app", lib)
    assert "lib/deep/x.py" in listed(packed)
    assert packed.warnings == ()


def test_what_one_scan_follows_and_another_does_not_is_sent_once(place):
    write(place, {"more/x.py": "", "more/sub/y.py": "", "f": ""})
    follows = walk.Scan(folders={"a": 0o755, "a/sub": 0o755})
    for rel in ("f", "a/x.py", "a/sub/y.py"):
        info = (place / "f").stat()
        follows.files[rel] = walk.FoundFile(str(place / "f"), 0o644, 0, walk.stamp_of(info))
    keeps = walk.Scan(links={"a": "more", "f": "g"})
    for first, second in ((follows, keeps), (keeps, follows)):
        scan = walk.Scan()
        for scanned in (first, second):
            companions._add(scan, scanned, str(place), str(place))
        assert (scan.folders, scan.files, scan.links) == (
            first.folders,
            first.files,
            first.links,
        )


def test_an_unchanged_package_is_not_walked_again(place, monkeypatch):
    write(place, {"app/setup.py": "", "lib/setup.py": "", "lib/x.py": "1"})
    lib = ImportFolder(str(place / "lib"))
    first = built(place / "app", lib)
    write(place, {"lib/x.py": "22"})
    second = built(place / "app", lib)
    assert first.tree != second.tree
    monkeypatch.setattr(bundle, "scan_with_companions", None)
    assert built(place / "app", lib).tree == second.tree


@pytest.mark.starts_processes
def test_a_package_that_is_generated_in_an_ignored_folder_is_seen(place):
    git_init(place / "lib")
    write(place, {"app/setup.py": "", "lib/setup.py": ""})
    write(place, {"lib/.gitignore": "gen/\n", "lib/src/pkg/__init__.py": ""})
    write(place, {"lib/src/pkg/gen/x.proto": ""})
    lib = ImportFolder(str(place / "lib/src"))
    generated = "lib/src/pkg/gen/x_pb2.py"
    assert generated not in listed(built(place / "app", lib))
    write(place, {"lib/src/pkg/gen/__init__.py": "", generated: ""})
    assert generated in listed(built(place / "app", lib))
    (place / "lib/src/pkg/gen/__init__.py").unlink()
    assert generated not in listed(built(place / "app", lib))


def dist(site: Path, name: str, folder: Path, requires: str = "") -> None:
    about = {"url": folder.as_uri(), "dir_info": {"editable": True}}
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}"
    info = {f"{name}-1.dist-info/METADATA": text}
    write(site, info | {f"{name}-1.dist-info/direct_url.json": json.dumps(about)})


def test_a_package_still_knows_its_version(place):
    site, lib, app = place / "site-packages", place / "lib", place / "app"
    write(place, {"app/setup.py": "", "lib/setup.py": "", "lib/src/lib/__init__.py": ""})
    dist(site, "lib", lib)
    dist(site, "kinetic-run", ROOT)
    dist(site, "unused", place / "unused")
    packed = built(app, ImportFolder(str(lib / "src")))
    assert [path for path in listed(packed) if "dist-info" in path] == [
        "lib/src/lib-1.dist-info",
        "lib/src/lib-1.dist-info/METADATA",
    ]
    store = LocalStore(place / "store")
    assert upload(packed, store).changed is None
    unpack(store, packed.tree, place / "host")
    (distribution,) = metadata.distributions(path=[str(place / "host/lib/src")])
    assert (distribution.name, distribution.version) == ("lib", "1")
    dist(site, "lib", lib, "Summary: changed\n")
    assert built(app, ImportFolder(str(lib / "src"))).tree != packed.tree


def test_what_only_a_hook_of_its_build_backend_finds_is_named(place):
    site = place / "site-packages"
    for name in ("found", "hooked_one", "jaxes"):
        dist(site, name, place / name)
    write(place, {"jaxes/jax/__init__.py": ""})
    dist(site, "kinetic-run", ROOT)
    assert editable.find_hooked([str(place / "found/src")]) == ["hooked_one"]


def test_hosts_install_what_an_editable_package_requires_and_not_the_package(place, monkeypatch):
    site, lib = place / "site-packages", place / "my lib"
    write(lib, {"src/lib/__init__.py": ""})
    wants = "Requires-Dist: einops>=0.7\nRequires-Dist: jax\nRequires-Dist: x; extra == 'dev'\n"
    dist(site, "My_Lib", lib, wants)
    dist(site, "unused", place / "unused")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    packages = editable.packages([str(lib / "src")])
    assert [(each.name, each.folder) for each in packages] == [("my-lib", str(lib))]
    for name, text in {
        "requirements.txt": f"numpy\n-e {lib}\nmy-lib[dev]\n",
        "pyproject.toml": (
            '[project]\ndependencies = ["numpy", "my.lib"]\n'
            "[tool.uv.sources]\nmy_lib = { workspace = true }\n"
        ),
    }.items():
        write(place / "app", {name: text})
        declared = find(place / "app", home=place, editable=packages)
        lines = for_hosts(declared, "cpu", {"jax": "0.10.2"}, bucket=False).lines
        assert lines[:3] == ("numpy", "einops>=0.7", "jax==0.10.2")
        (place / "app" / name).unlink()
