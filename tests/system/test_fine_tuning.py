"""The programs of docs/how-to/fine-tuning.md; skipped unless Tunix and KerasHub are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from test_docs import DOCS, blocks

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PAGE = DOCS / "how-to/fine-tuning.md"
NEEDS = {"lora.py": "keras_hub", "sft.py": "tunix", "dpo.py": "tunix", "grpo.py": "tunix"}
PLAIN = "import json, {0}; print(json.dumps({0}.{1}.__wrapped__()))"


@pytest.mark.parametrize("name", NEEDS)
def test_two_hosts_train_as_one_and_as_plain_python(name, tmp_path, home):
    pytest.importorskip(NEEDS[name])
    for block in blocks(PAGE.read_text()):
        (tmp_path / block.title).write_text(block.text)
    function = re.search(r"^def (\w+)", (tmp_path / name).read_text(), re.MULTILINE)
    assert function
    printed = [
        run(tmp_path, name),
        run(tmp_path, "-c", PLAIN.format(name.removesuffix(".py"), function[1])),
    ]
    one_host, two_hosts, plain = "".join(printed).splitlines()
    assert one_host == two_hosts == plain


def run(folder, *command):
    """Run a Python program in the folder; return its stdout."""
    environ = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
