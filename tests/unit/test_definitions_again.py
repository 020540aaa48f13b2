"""Classes that a session defines more than once: hosts have the one that it has."""

from __future__ import annotations

import sys
import textwrap
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


@pytest.mark.parametrize("text", [NET, BARE, WRAPPED])
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


STATEMENT = "class Net:\n    def size(self): return {}\nlib.register_{}with(Net, n={})\n"


@pytest.fixture
def registered(library: Any) -> list[Any]:
    """What `register_with` gets; it refuses a class that it has, as JAX does."""
    text = """
REGISTERED = []
def register_with(cls, n):
    if n < 0: raise TypeError("n")
    if cls in [each for each, _ in REGISTERED]: raise ValueError(f"Duplicate {cls}")
    REGISTERED.append((cls, n))
def register_also_with(cls, n): register_with(cls, n)
"""
    exec(text, vars(library))
    found: list[Any] = library.REGISTERED
    return found


def registered_there(session: Session, registered: list[Any]) -> tuple[Any, list[int]]:
    """Return the size of the class that a host registers, and how it does it."""
    registered.clear()
    net = session.send("use").value[0]()
    assert all(cls is net for cls, _ in registered)
    return read_size(net), [n for _, n in registered]


def test_a_cell_with_a_class_and_a_statement_that_registers_it_runs_again(
    session: Session, registered: list[Any]
) -> None:
    for cell in [(1, "", 1), (1, "", 2), (2, "also_", 3), (1, "", 1)]:
        session.run(STATEMENT.format(*cell))
        assert registered_there(session, registered) == (cell[0], [cell[2]])
    session.run(STATEMENT.format(1, "", 1).partition("lib.")[0])
    assert registered_there(session, registered) == (1, [])


def test_a_registration_that_failed_and_was_mended_is_left_out(
    session: Session, registered: list[Any]
) -> None:
    session.run("class Net:\n    size = 1\n")
    with pytest.raises(TypeError):
        session.run("lib.register_with(Net, n=-1)")
    session.run("lib.register_with(Net, n=2)")
    assert registered_there(session, registered) == (1, [2])


def test_a_class_registered_in_several_ways_by_several_cells_is_on_hosts_as_well(
    session: Session, registered: list[Any], library: Any
) -> None:
    exec(
        "def register_name(name, cls): REGISTERED.append((cls, name))\n"
        "def register_each(cls, n): register_name(n, cls)",
        vars(library),
    )
    session.run("class Net:\n    size = 1\nlib.register_name('a', Net)\n")
    session.run("lib.register_name('b', Net)\nlib.register_name('c', Net)\n")
    session.run("for each in [Net]: lib.register_each(each, n=1)\n")
    session.run("for each in [Net]: lib.register_name('e', each)\n")
    assert registered_there(session, registered) == (1, ["a", "b", "c", 1, "e"])


def test_a_second_registration_does_not_break_a_call(
    session: Session, registered: list[Any]
) -> None:
    session.run("class Net:\n    size = 1\nlib.register_with(Net, n=1)\n")
    with pytest.raises(ValueError, match="Duplicate"):
        session.run("lib.register_also_with(Net, n=2)\n")
    assert registered_there(session, registered) == (1, [1])


@pytest.mark.parametrize("text", [NET, BARE, WRAPPED])
def test_cells_count_in_a_session_that_names_a_file(
    text: str, session: Session, library: Any, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    session.main.__file__ = str(file)
    for size in (1, 2, 1):
        file.write_text(f"# %%\n{USE}# %%\n{text.format(size)}")
        session.run(text.format(size))
        assert size_there(session, library) == size
    session.execute(file.read_text().replace(USE, "#\n#\n"), str(file))
    assert size_there(session, library) == 1


def test_registrations_of_a_file_do_not_count_for_classes_of_cells(
    session: Session, registered: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    session.main.__file__ = str(file)
    file.write_text(f"# %%\n{STATEMENT.format(1, '', 1)}")
    session.run(STATEMENT.format(1, "", 2))
    assert registered_there(session, registered) == (1, [2])


def test_cells_count_where_they_run_in_a_namespace_of_their_own(
    session: Session, library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text("def cell():\n    pass\n")
    session.main.__file__ = str(tmp_path / "app.py")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.delattr(sys, "ps1")
    for size in (1, 2):
        session.run(NET.format(size))
        assert size_there(session, library) == size


@pytest.mark.parametrize("text", [NET, BARE, WRAPPED])
@pytest.mark.parametrize("magic", [("time", "<timed exec>"), ("prun", "<string>")])
def test_cells_count_that_a_magic_executes(
    magic: tuple[str, str], text: str, session: Session, library: Any
) -> None:
    name, file = magic
    for size in (1, 200, 1):
        session.run_magic(name, text.format(size), file)
        assert size_there(session, library) == size


def test_cells_of_a_file_count_that_marimo_executes(
    session: Session, library: Any, tmp_path: Path
) -> None:
    file = tmp_path / "app.py"
    session.main.__file__ = str(file)
    cell = "    @lib.register\n    class Net:\n        def size(self): return 2\n"
    file.write_text(f"@app.cell(hide_code=True)\ndef _(lib):\n{cell}    return (Net,)\n")
    session.execute("\n" * 2 + textwrap.dedent(cell), str(file))
    assert size_there(session, library) == 2


def test_registrations_stay_in_force_beside_others(
    session: Session, registered: list[Any], library: Any
) -> None:
    exec("def register_kind(kind, *cls): REGISTERED.append((cls[0], kind))\n", vars(library))
    session.run("class Net:\n    size = 1\nlib.register_kind('kind', Net)\n")
    session.run("class Other:\n    size = 2\nlib.register_kind('kind', Other)\n")
    session.run("class Codec: pass\nlib.register_kind('coded', Net, Codec)\n")
    session.run("class Codec:\n    again = True\n")
    registered.clear()
    session.send("use")
    assert [(cls.__name__, kind) for cls, kind in registered] == [
        ("Net", "kind"),
        ("Other", "kind"),
        ("Net", "coded"),
    ]


@pytest.mark.parametrize("edited", ["{}# below\n", "# above\n{}"])
def test_a_file_may_be_edited_above_and_below_a_class(
    edited: str, session: Session, registered: list[Any], library: Any, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    text = (
        "from __future__ import annotations\n@lib.register\nclass Net(lib.Base):\n"
        "    def size(self):\n        def one(x: int) -> int: return x\n        return one(1)\n"
        "lib.register_with(Net, n=1)\n"
    )
    file.write_text(text)
    session.main.__file__ = str(file)
    session.execute(text, str(file))
    for now in ("{}", edited):
        file.write_text(now.format(text))
        library.SEEN.clear()
        assert registered_there(session, registered) == (1, [1])
        assert "Net" in library.SEEN


def test_attributes_and_functions_of_libraries_say_nothing_of_a_class(
    session: Session, library: Any
) -> None:
    exec(
        "class Odd:\n    @property\n    def __dict__(self): raise RuntimeError\n"
        "def hello(self): return 1\nhello.__qualname__ = 'Net.hello'\n"
        "hello.__code__ = hello.__code__.replace(co_qualname='Net.hello')\n",
        vars(library),
    )
    session.run(
        "@lib.register\nclass Net:\n    odd = lib.Odd()\n    hello = lib.hello\n"
        "    def size(self): return 3\n"
    )
    assert size_there(session, library) == 3
