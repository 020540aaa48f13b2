"""What the worker puts back in the interpreter, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import builtins, json, sys
from kinetic._host.worker import interpreter as mending
before = mending.Interpreter()
{havoc}
before.mend()
import decimal, email
assert isinstance(json.dumps([1]), str) and len(sys.path) > 1 and sys.getrecursionlimit() >= 1000
{after}
builtins.print("mended")
"""


@pytest.mark.parametrize(
    ("havoc", "after"),
    [
        (
            "sys.path.clear(); sys.modules.clear(); sys.meta_path.clear(); sys.path_hooks.clear()",
            "import json",
        ),
        ("sys.path = None; sys.modules = {}; sys.meta_path = (); sys.path_hooks = 7", ""),
        ("vars(builtins).update(dict.fromkeys(vars(builtins)))", "assert None is None"),
        ("del builtins.isinstance, builtins.len, builtins.__import__", ""),
        ("sys.setrecursionlimit(50)", ""),
        (
            "sys.path[:0] = ['/mine']; sys.modules['mine'] = 7",
            "assert sys.path[0] == '/mine' and sys.modules['mine'] == 7",
        ),
        ("builtins.print = lambda *_: sys.stdout.write('mended\\n')", ""),
        ("sys.setrecursionlimit(5000)", "assert sys.getrecursionlimit() == 5000"),
    ],
)
def test_what_is_missing_comes_back_and_what_was_added_stays(havoc, after):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(havoc=havoc, after=after)],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "mended\n", done.stderr
