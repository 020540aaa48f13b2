"""Scripts outside of any project: only the files that a script needs are sent."""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

import pytest

from kinetic._source import bundle, hashing, manifest, shipment, walk
from kinetic.cli import program
from kinetic.cli.program import Program, ProgramKind


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A home folder with the files that users typically have."""
    home = tmp_path.resolve() / "home"
    write(
        home,
        ".ssh/id_rsa",
        ".aws/credentials",
        ".netrc",
        ".bashrc",
        "secret.pem",
        "Photos/1.jpg",
        "work/other/y.py",
        "notes.txt",
    )
    write(
        home,
        ".local/lib/python3.11/site-packages/installed.py",
        "miniforge/conda-meta/history",
        "miniforge/bin/python",
    )
    (home / "film.mkv").write_bytes(b"x" * 1_000_001)
    (home / "pipe").unlink(missing_ok=True)
    os.mkfifo(home / "pipe")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    return home


def write(root: Path, *files: str, text: str = "") -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def listed(packed: bundle.Bundle | None) -> list[str]:
    assert packed is not None
    return sorted(
        each.path for each in manifest.decode(packed.manifest) if isinstance(each, manifest.File)
    )


def sent(script: Path, monkeypatch, **options) -> bundle.Bundle:
    module = types.ModuleType("lonely")
    module.__file__ = str(script)
    exec("def train(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "lonely", module)
    cache = script.parent / ".cache"
    _, packed = shipment.of(
        module.train, shipment.SourceSettings(script.parent / ".store", cache, **options)
    )
    assert packed is not None
    return packed


def test_a_script_in_home_is_sent_with_the_modules_that_it_imports(folder, monkeypatch):
    write(
        folder,
        "t.py",
        text="import helper, json, numpy\nfrom pack.sub import x\ndef f():\n    import late\n",
    )
    write(folder, "helper.py", text="import deep.inside")
    write(folder, "pack/__init__.py", "pack/sub/__init__.py", "pack/data.txt", "pack/key.pem")
    write(folder, "late.py", "unused.py", "deep/__init__.py", "deep/inside.py", "deep/beside.py")
    packed = sent(folder / "t.py", monkeypatch)
    assert listed(packed) == [
        "deep/__init__.py", "deep/beside.py", "deep/inside.py", "helper.py", "late.py",
        "pack/__init__.py", "pack/data.txt", "pack/sub/__init__.py", "t.py",
    ]  # fmt: skip
    sent_warning, kept_back = packed.warnings
    assert (
        f"{folder} is not a project, so only the script and its modules are sent: " in sent_warning
    )
    assert "t.py" in sent_warning
    assert kept_back == "Files left out because they look like keys or passwords: pack/key.pem."


def test_a_prompt_in_home_sends_only_what_it_has_imported(folder, monkeypatch):
    """At a prompt, in a notebook and with `python -c` there is no script whose files belong to the
    function."""
    write(folder, "diary.txt", ".bash_history", "docs/letter.txt", "helper.py")
    function = types.FunctionType((lambda: None).__code__, {"__name__": "__main__"}, "f")
    function.__module__ = "prompt"
    monkeypatch.setitem(sys.modules, "prompt", types.ModuleType("prompt"))
    monkeypatch.chdir(folder)

    def pack():
        _, packed = shipment.of(
            function, shipment.SourceSettings(folder / ".store", folder / ".cache")
        )
        return packed

    packed = pack()
    assert listed(packed) == []
    assert f"{folder} is not a project, so none of its files is sent." in packed.warnings[0]
    helper = types.ModuleType("helper")
    helper.__file__ = str(folder / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", helper)
    assert listed(pack()) == ["helper.py"]


def test_what_is_loaded_from_there_belongs_to_it(folder, monkeypatch):
    """Modules that the script has loaded without an import statement are sent too, but not those of
    the interpreter, or of installations in the home folder."""
    write(
        folder,
        "t.py",
        "plugins/one.py",
        "plugins/two.py",
        "pkg/__init__.py",
        "pkg/part.py",
        "pkg/other.py",
    )
    monkeypatch.setattr(sys, "prefix", str(folder / "conda"))
    write(folder, "conda/lib/python3.11/random.py")
    for name, file in {
        "one": "plugins/one.py",
        "pkg.part": "pkg/part.py",
        "installed": ".local/lib/python3.11/site-packages/installed.py",
        "random_of_conda": "conda/lib/python3.11/random.py",
    }.items():
        module = types.ModuleType(name)
        module.__file__ = str(folder / file)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", [str(folder / "conda/lib/python3.11"), *sys.path])
    assert listed(sent(folder / "t.py", monkeypatch)) == [
        "pkg/__init__.py", "pkg/other.py", "pkg/part.py", "plugins/one.py", "t.py",
    ]  # fmt: skip


def test_a_local_module_named_like_one_of_the_library_is_sent(folder, monkeypatch):
    write(folder, "t.py", text="import random, email")
    write(folder, "random.py", "email/__init__.py", "email/x.py")
    assert {"random.py", "email/__init__.py", "email/x.py"} <= set(
        listed(sent(folder / "t.py", monkeypatch))
    )


def test_a_linked_module_on_pythonpath_is_sent_once(folder, monkeypatch):
    write(folder, "t.py", text="import linked, pkg.inner")
    write(folder, "libs/real.py", "libs/setup.py", "shared/__init__.py", "shared/inner.py")
    (folder / "libs/linked.py").symlink_to("real.py")
    (folder / "libs/pkg").symlink_to("../shared")
    monkeypatch.setattr(sys, "path", [str(folder / "libs"), *sys.path])
    packed = sent(folder / "t.py", monkeypatch, python_path=str(folder / "libs"))
    names = ["linked.py", "pkg/__init__.py", "pkg/inner.py", "real.py", "setup.py"]
    assert listed(packed) == [*(f"libs/{name}" for name in names), "t.py"]


def test_a_script_that_is_no_python_is_still_sent(folder, monkeypatch):
    write(folder, "t.py", text="def (:\n'\\d'\n")
    assert listed(sent(folder / "t.py", monkeypatch)) == ["t.py"]


def program_of(kind: ProgramKind, *words: str) -> list[str]:
    func = program.make_function(Program(kind, words[0], words[1:]), Path.cwd())
    home = Path.home()
    _, packed = shipment.of(func, shipment.SourceSettings(home / ".store", home / ".cache"))
    del sys.modules[func.__module__]
    return listed(packed)


def test_programs_are_sent_with_what_their_words_name(folder):
    write(folder, "t.py", "tool/run.py", text="import helper")
    write(folder, "helper.py", "conf/a.yaml", "conf/b.yaml", "pkg/__init__.py", "pkg/__main__.py")
    words = ("t.py", "--config=conf/a.yaml")
    assert program_of(ProgramKind.SCRIPT, *words) == ["conf/a.yaml", "helper.py", "t.py"]
    words = ("python", "tool/run.py", "film.mkv")
    assert program_of(ProgramKind.COMMAND, *words) == ["film.mkv", "helper.py", "tool/run.py"]
    for module in ("pkg", "pkg.__main__"):
        names = ["pkg/__init__.py", "pkg/__main__.py"]
        assert program_of(ProgramKind.MODULE, module) == names
    assert program_of(ProgramKind.COMMAND, "cat", ".ssh/id_rsa", ".netrc") == []


def test_an_unmarked_folder_is_sent_whole_while_it_is_small(tmp_path, monkeypatch):
    root = tmp_path.resolve() / "sketch"
    write(root, "t.py", "data/a.csv", ".env", ".hidden/x", "big/b.bin", text="import helper")
    write(root, "helper.py", "lib/more.py")
    packed = sent(root / "t.py", monkeypatch)
    assert listed(packed) == ["big/b.bin", "data/a.csv", "helper.py", "lib/more.py", "t.py"]
    assert packed.warnings == ("Files left out because they look like keys or passwords: .env.",)
    monkeypatch.setattr(walk, "MODEST_BYTES", 20)
    assert listed(sent(root / "t.py", monkeypatch)) == ["helper.py", "t.py"]
    write(root, "pyproject.toml")
    second = sent(root / "t.py", monkeypatch)
    assert {".env", ".hidden/x", "big/b.bin"} < set(listed(second)), (
        "a project says itself what belongs to it"
    )


def test_of_a_folder_that_all_programs_use_only_modules_are_sent(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    write(folder, "t.py", text="import helper\nopen('./rows.csv')")
    write(folder, "helper.py", "rows.csv", "other.py")
    assert listed(sent(folder / "t.py", monkeypatch, temporary=(folder,))) == ["helper.py", "t.py"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_link_brings_no_key_along(folder, whole):
    root = folder / "sketch" if whole else folder
    write(root, "t.py", "fine.csv")
    for name, target in {
        "a": ".ssh/id_rsa",
        "b": ".netrc",
        "c": ".ssh",
        "d": "secret.pem",
        "e": "notes.txt",
    }.items():
        (root / name).symlink_to(folder / target)
    script = ("t.py", "fine.csv", *"abcde")
    packed = bundle.build(root, script=script, whole=whole, cache_dir=folder / ".cache")
    assert listed(packed) == ["e", "fine.csv", "t.py"]
    assert "a, b" in packed.warnings[-1]


def test_home_as_the_project_that_somebody_asked_for_keeps_its_keys(folder, monkeypatch):
    write(folder, "t.py")
    packed = sent(folder / "t.py", monkeypatch, package_root="~")
    assert {"t.py", "Photos/1.jpg", "film.mkv"} <= set(listed(packed))
    assert not [
        path for path in listed(packed) if path.startswith((".ssh", ".aws", ".netrc", "secret"))
    ]


def test_an_unchanged_script_is_not_read_again_and_every_change_is_seen(folder, monkeypatch):
    write(folder, "t.py", "pkg/__init__.py", text="1")
    reads, real = [], hashing.read
    monkeypatch.setattr(hashing, "read", lambda path: reads.append(path) or real(path))

    def build():
        options = {"cache_dir": folder / ".cache", "clock_ns": lambda: time.time_ns() + 10**10}
        return bundle.build(folder, script=("t.py", "pkg"), whole=False, **options)

    first, count = build(), len(reads)
    assert build() == first
    assert len(reads) == count
    write(folder, "new.py", "pkg/new.py")
    (folder / "t.py").write_text("changed")
    assert build().digests().keys() == {"t.py", "pkg/__init__.py", "pkg/new.py"}
    assert build().digests()["t.py"] != first.digests()["t.py"]
