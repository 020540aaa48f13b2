"""Classes that a session defines more than once: hosts have the one that it has."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import script_host
from script_host import Session

from kinetic._pickling import call

library = script_host.library

USE = "import picklertest_library as lib\ndef use(): return Net\n"
NET = "@lib.register\nclass Net:\n    def size(self): return {}\n"
BARE = "@lib.register\nclass Net:\n    size: int = {}\n"
WRAPPED = """
import functools
def keep(function):
    @functools.wraps(function)
    def call(self): return function(self)
    return call
@lib.register
class Net(lib.Base):
    @property
    @keep
    def size(self): return {}
"""
WITH_OPTIONS = "@lib.register_with(n={})\nclass Net:\n    size: int\n"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, library: types.ModuleType) -> Session:
    made = Session(monkeypatch)
    made.run(USE)
    return made


def size_there(session: Session, library: Any) -> Any:
    """Return the size that a host has; there, the class is registered once."""
    net = session.send("use", library=library).value[0]()
    assert [each for each in library.SEEN if isinstance(each, str)] == ["Net"]
    return read_size(net)


def read_size(net: Any) -> Any:
    made = net()
    return made.size() if callable(made.size) else made.size


@pytest.mark.parametrize("text", [NET, BARE, WRAPPED])
def test_a_cell_that_runs_again_defines_the_class_again(
    text: str, session: Session, library: Any
) -> None:
    for size in (1, 200, 1):
        session.run(text.format(size))
        assert size_there(session, library) == size


def test_of_cells_whose_classes_look_alike_the_one_that_ran_last_counts(
    session: Session, library: Any
) -> None:
    library.options = []
    exec(
        "def register_with(**given):\n    options.append(given)\n    return register", vars(library)
    )
    for number in (1, 2, 1):
        session.run(WITH_OPTIONS.format(number))
        library.options.clear()
        session.send("use", library=library)
        assert library.options == [{"n": number}]


@pytest.mark.parametrize("text", [NET, BARE, WRAPPED])
def test_a_file_that_is_edited_and_executed_again_defines_the_class_again(
    text: str, session: Session, library: Any, tmp_path: Path
) -> None:
    file = tmp_path / "s.py"
    session.main.__file__ = str(file)
    for size in (1, 200, 300, 1):
        source = USE + text.format(size)
        file.write_text(source)
        session.execute(source, str(file))
        assert size_there(session, library) == size


@pytest.mark.parametrize("text", [NET, WRAPPED])
def test_a_file_that_is_only_edited_changes_nothing(
    text: str, session: Session, library: Any, tmp_path: Path
) -> None:
    file = tmp_path / "s.py"
    source = USE + text.format(1)
    for edited in (source, source.replace("1", "22"), f"# no line as before\n{source}"):
        file.write_text(edited)
        if edited is source:
            session.execute(source, str(file))
        assert size_there(session, library) == 1


@pytest.mark.parametrize("text", [NET, WRAPPED])
def test_a_class_typed_where_no_source_is_kept_is_not_another_one(
    text: str, session: Session, tmp_path: Path
) -> None:
    file = tmp_path / "s.py"
    source = USE + text.format(1)
    file.write_text(source)
    session.main.__file__ = str(file)
    session.execute(source, str(file))
    session.execute(text.format(2), "<stdin>")
    assert read_size(session.send("use").value[0]()) == 2
    session.execute(text.format(3), "<timed exec>")
    assert read_size(session.send("use").value[0]()) == 3


def test_a_warning_names_a_class_whose_decorators_hosts_cannot_execute(session: Session) -> None:
    session.run(NET.format(1))
    assert call.pack(session.main.use, (), {}, env_vars={}).warnings == ()
    session.execute(NET.format(2), "<timed exec>")
    (warning,) = call.pack(session.main.use, (), {}, env_vars={}).warnings
    assert "not known what source Net comes from" in warning


@pytest.mark.parametrize("kept", ["__pydantic_fields__", "__attrs_attrs__"])
def test_a_class_whose_fields_only_its_library_keeps_is_the_one_that_was_typed(
    kept: str, session: Session, library: Any, tmp_path: Path
) -> None:
    exec(
        "import types\ndef model(cls):\n"
        "    field = types.SimpleNamespace(name='size', default=cls.size)\n"
        "    del cls.size\n"
        f"    cls.{kept} = {{'size': field}} if {'pydantic' in kept} else [field]\n"
        "    return register(cls)",
        vars(library),
    )
    text = f"{USE}@lib.model\nclass Net:\n    size: int = {{}}\n"
    file = tmp_path / "s.py"
    session.main.__file__ = str(file)
    for size in (1, 2):
        file.write_text(text.format(size))
        session.execute(text.format(size), str(file))
        session.send("use", library=library)
        assert library.SEEN == ["Net"]
    session.execute(text.format(3), "<stdin>")
    made: Any = session.send("use").value[0]()
    fields = getattr(made, kept)
    assert (fields["size"] if "pydantic" in kept else fields[0]).default == 3
