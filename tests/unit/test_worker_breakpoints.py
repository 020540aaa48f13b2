"""`breakpoint()` in a job without a debugger raises an error that names the options which work."""

from __future__ import annotations

import importlib
import pdb
import sys
import types

import pytest

from kinetic._host.worker import breakpoints
from kinetic.errors import UsageError


@pytest.fixture(autouse=True)
def own_debuggers(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    yield
    for name in ("ipdb", "ipdb.__main__"):
        sys.modules.pop(name, None)


def test_ipdb_is_refused_whenever_it_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "ipdb"
    package.mkdir()
    (package / "__init__.py").write_text("from ipdb.__main__ import set_trace\n")
    (package / "__main__.py").write_text("def set_trace(frame=None): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    breakpoints._refuse("")
    with pytest.raises(UsageError, match=r"^ipdb\.set_trace\(\): a job has no terminal"):
        importlib.import_module("ipdb").set_trace()


def test_ipythons_debugger_is_refused_that_was_imported_before(monkeypatch):
    module = types.ModuleType("IPython.core.debugger")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    breakpoints._refuse("")
    with pytest.raises(UsageError, match=r"^set_trace\(\): a job has no terminal"):
        module.set_trace(header="here")


def test_the_standard_librarys_is_refused():
    breakpoints._refuse("")
    with pytest.raises(UsageError, match=r"^pdb\.set_trace\(\): .* debug=True"):
        pdb.set_trace()
    with pytest.raises(UsageError, match=r"^breakpoint\(\): .* debug=True"):
        breakpoint()
