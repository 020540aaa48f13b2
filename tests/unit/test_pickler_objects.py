"""Objects and modules of which plain pickle would lose a part."""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import wrapt
from payload_cases import elsewhere, in_main
from script_host import sent

from kinetic._pickling import call, results
from kinetic.errors import PicklingError, SetupFailed


def pack(func: Callable[..., Any], *args: Any, **options: Any) -> call.Packed:
    return call.pack(func, args, {}, env_vars={}, **options)


# -- modules ---------------------------------------------------------------------------------------

PACKAGES = """
import picklertest_package, picklertest_package.inner.deep
import picklertest_package.named as short
from picklertest_package.taken import (
    VALUE,
)
def use_getattr(): return getattr(picklertest_package, "inner").deep.__name__
def use_vars(): return sorted(n for n in vars(picklertest_package) if not n.startswith("_"))
class Holder:
    lib = picklertest_package
    def use(self): return self.lib.inner.deep.__name__
def use_class(): return Holder().use()
def use_default(lib=picklertest_package): return lib.named.__name__
def use_argument(lib): return lib.taken.__name__
"""
NAMES = ("inner/__init__", "inner/deep", "named", "taken", "other")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "picklertest_package/inner").mkdir(parents=True)
    for name in ("__init__", *NAMES):
        (tmp_path / f"picklertest_package/{name}.py").write_text("VALUE = 1\n")
    (tmp_path / "script.py").write_text(PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("picklertest_package.other")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("picklertest_package")]:
        del sys.modules[name]


def run_script(file: Path) -> dict[str, Any]:
    space = {"__name__": "__main__", "__file__": str(file), "__builtins__": __builtins__}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), space)
    return space


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("use_getattr", "picklertest_package.inner.deep"),
        ("use_vars", "['VALUE', 'inner', 'named', 'taken']"),
        ("use_class", "picklertest_package.inner.deep"),
        ("use_default", "picklertest_package.named"),
        ("use_argument", "picklertest_package.taken"),
    ],
)
def test_a_package_has_the_modules_that_the_script_imports(
    packages: Path, name: str, message: str
) -> None:
    space = run_script(packages / "script.py")
    args = (space["picklertest_package"],) if name == "use_argument" else ()
    data = pack(space[name], *args).data
    code = f"sys.path.insert(0, {str(packages)!r})\nfrom kinetic._pickling import call\n"
    assert elsewhere(code + "f, args, _ = call.unpack(data)\nprint(f(*args))", data) == message


@pytest.mark.starts_processes
def test_a_package_has_the_modules_that_the_cells_of_a_notebook_import(packages: Path) -> None:
    cells = ["", "%matplotlib inline\nimport picklertest_package.named", "picklertest_package"]
    space: dict[str, Any] = {"__name__": "__main__", "In": cells}
    exec("import picklertest_package.named\ndef use(): return vars(picklertest_package)", space)
    code = f"sys.path.insert(0, {str(packages)!r})\nfrom kinetic._pickling import call\n"
    output = elsewhere(code + "print('named' in call.unpack(data)[0]())", pack(space["use"]).data)
    assert output == "True"


# -- objects ---------------------------------------------------------------------------------------

DESCRIPTORS = """
class classproperty(property):
    def __init__(self, function, note=""):
        super().__init__(function)
        self.note = note
    def __get__(self, obj, owner): return self.fget(owner)
class Static(staticmethod):
    def __get__(self, obj, owner=None): return "static", self.__func__
class Net:
    width = 8
    @classproperty
    def params(cls): return cls.width ** 2
    area = classproperty(lambda cls: cls.width, "two")
    make = Static(len)
    def size(self): return self.params
"""


def test_descriptors_of_a_scripts_own_classes_keep_what_they_hold() -> None:
    net, kind = sent(DESCRIPTORS, "Net", "classproperty").value
    assert (net.params, net.area, net().size(), net.make) == (64, 8, 64, ("static", len))
    area = vars(net)["area"]
    assert (vars(net)["params"].note, area.note, type(area)) == ("", "two", kind)


def test_descriptors_come_back_with_what_they_hold() -> None:
    space = in_main(DESCRIPTORS)

    def make() -> type:
        class Inner:
            params = space["classproperty"](lambda cls: cls.__name__)

        return Inner

    assert results.unpack_value(results.pack_value(make())).params == "Inner"


FORWARDING = """
class Store:
    def __init__(self, inner): self._inner = inner
    def __getattr__(self, name): return getattr(self._inner, name)
class Guarded(Store):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return super().__getattr__(name)
class Reduced(Store):
    def __reduce__(self): return Reduced, (self._inner,)
class Table(Store):
    def __getattr__(self, name): return self.__dict__["_inner"][name]
class Made(Store):
    def __new__(cls, *args):
        made = super().__new__(cls)
        made._inner = {}
        return made
class Bare:
    def __getattr__(self, name): return {}[name]
s, t = Store({"a": 1}), Table({"a": 1})
def use(): return s.get("a")
def use_table(): return t.a
"""


@pytest.mark.parametrize(("function", "name"), [("use", "Store"), ("use_table", "Table")])
def test_an_object_that_could_not_be_unpickled_is_refused_here(function: str, name: str) -> None:
    space = in_main(FORWARDING)
    with pytest.raises(PicklingError) as caught:
        pack(space[function])
    message = str(caught.value)
    assert message.startswith(
        f"Global '{'s' if name == 'Store' else 't'}' used by {function} cannot"
    )
    assert f"an empty {name}" in message
    assert "__reduce__" in message
    assert len(message.splitlines()) == 1
    value = space["s" if name == "Store" else "t"]
    with pytest.raises(PicklingError, match=rf"its part \['a'\]\[0\] is an? {name}\. Unpickling"):
        pack(len, {"a": [value]})
    with pytest.raises(PicklingError, match=f"an empty {name}"):
        results.pack_value(value)


@pytest.mark.parametrize("name", ["Guarded", "Reduced", "Made"])
def test_an_object_that_forwards_and_can_be_unpickled_is_sent(name: str) -> None:
    value = in_main(FORWARDING)[name]({"a": 1})
    _, (copy,), _ = call.unpack(pack(len, value).data)
    assert copy._inner == {"a": 1}
    assert copy.get("a") == 1


def test_an_object_without_attributes_is_sent_whatever_its_class_answers() -> None:
    bare = in_main(FORWARDING)["Bare"]
    _, (copy,), _ = call.unpack(pack(len, bare()).data)
    assert type(copy) is bare


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("picklertest_wrapt")
    module.__file__ = f"{Path(wrapt.__file__).parent}/picklertest_wrapt.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = (
        "import wrapt\n@wrapt.decorator\n"
        "def traced(wrapped, instance, args, kwargs): return 'traced', wrapped(*args, **kwargs)\n"
        "@traced\ndef helper(x): return x + 1\n"
    )
    exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(module))
    return module


@pytest.mark.parametrize("of_script", [False, True])
def test_functions_that_wrapt_has_wrapped_arrive(
    wrapped: types.ModuleType, of_script: bool
) -> None:
    decorator = (
        "@wrapt.decorator\ndef traced(wrapped, instance, args, kwargs):\n"
        "    return 'traced', wrapped(*args, **kwargs)\n"
        if of_script
        else "from picklertest_wrapt import traced\n"
    )
    text = (
        f"import wrapt, picklertest_wrapt\n{decorator}@traced\ndef local(x): return x, local\n"
        "def b(): return local(1)[1][0], wrapt.FunctionWrapper is type(local)\n"
        "class Net:\n    @traced\n    def go(self, x): return x\n"
        "def e(net): return net.go(7)\n"
        "def d(f): return f(2)\n"
    )
    space = in_main(text)
    assert call.unpack(pack(space["b"]).data)[0]() == (1, True)
    func, (argument,), _ = call.unpack(pack(space["d"], wrapped.helper).data)
    assert argument is wrapped.helper
    assert func(argument) == ("traced", 3)
    assert call.unpack(pack(space["local"]).data)[0](5)[1][0] == 5
    func, (net,), _ = call.unpack(pack(space["e"], space["Net"]()).data)
    assert func(net) == ("traced", 7)
    with pytest.raises(PicklingError, match="Move it into a module of the project"):
        pack(space["Net"]().go)


def test_a_function_of_a_script_that_jaxtyping_checks_arrives() -> None:
    def check(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    space = in_main("def f(x: int) -> int: return 2 * x\n")
    checked = jaxtyping.jaxtyped(typechecker=check)(space["f"])
    assert any(
        isinstance(cell.cell_contents, list)
        and isinstance(cell.cell_contents[0], weakref.ReferenceType)
        for cell in checked.__closure__ or ()
    ), "otherwise this shows nothing"
    assert call.unpack(pack(checked).data)[0](4) == 8


# -- classes ---------------------------------------------------------------------------------------


def test_a_class_may_lie_about_its_own() -> None:
    text = """
class Proxy:
    @property
    def __class__(self): return int
    @property
    def __name__(self): return "proxy"
def look(): return isinstance(Proxy(), int), Proxy().__name__
"""
    assert call.unpack(pack(in_main(text)["look"]).data)[0]() == (True, "proxy")
    cls, _ = sent(text + "both = Proxy, 1\n", "both").value[0]
    assert cls.__name__ == "Proxy"


def test_an_enumeration_has_what_it_repeats_of_its_base() -> None:
    text = """
import enum
class Base(enum.Enum):
    def loss(self): return "base"
class Child(Base):
    A = 1
    loss = Base.loss
"""
    base, child = sent(text, "Base", "Child").value
    base.loss = lambda self: "patched"
    assert (child.A.loss(), "loss" in vars(child)) == ("base", True)


# -- command lines of scripts ----------------------------------------------------------------------


@pytest.mark.starts_processes
def test_a_module_that_reads_the_command_line_on_import_finds_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "picklertest_args.py").write_text("import sys\nARGS = list(sys.argv)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    module = importlib.import_module("picklertest_args")
    space = in_main("import picklertest_args\ndef use(): return picklertest_args.ARGS\n")
    data = pack(space["use"]).data
    del sys.modules[module.__name__]
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nfrom kinetic._pickling import call\n"
    output = elsewhere(code + "print(call.unpack(data)[0]())", data)
    assert output == "['train.py', '--lr', '0.1']"


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupts:
    def __reduce__(self) -> Any:
        return interrupt, ()


def test_what_interrupts_a_host_while_it_unpickles_is_not_kinetics_fault() -> None:
    data = pack(len, Interrupts()).data
    with pytest.raises(SetupFailed, match="KeyboardInterrupt"):
        call.unpack(data)


class Refuses:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_what_interrupts_a_host_while_it_pickles_is_named() -> None:
    with pytest.raises(PicklingError, match=r"The returned value \(list\).*\[0\] is a Refuses"):
        results.pack_value([Refuses()])
