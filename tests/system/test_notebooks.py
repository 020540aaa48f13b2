"""Notebooks through a real Jupyter kernel: functions from cells run on slices, and the cells show
progress."""

from __future__ import annotations

import json
import os

import nbclient
import nbformat
import pytest
from kernels import ROOT, CellOutput, Kernel

import kinetic
from kinetic import errors

# Ignore warnings of Jupyter's packages.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def folder(home):
    project = home.parent / "notebook"
    project.mkdir(parents=True)
    return project


@pytest.fixture
def kernel(folder):
    started = Kernel(folder)
    try:
        started.run("%colors nocolor\nimport kinetic")
        yield started
    finally:
        started.close()


@pytest.mark.long
def test_the_example_runs(folder):
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder.parent / "ipython")}
    client = nbclient.NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(folder)}}
    )
    with client.setup_kernel(env=environ):
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    values = [output.data for output in outputs if output.output_type == "execute_result"]
    assert "Plan of fit" in values[0]["text/html"]
    assert values[1]["text/plain"] == "(Line(slope=3.0, offset=1.0), 8)"
    assert "JobHandle job-" in values[2]["text/plain"]
    printed = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert "step 100: slope" in printed
    assert "step 20: slope" in printed


def test_output_arrives_while_the_cell_runs(kernel, folder):
    kernel.run("""
@kinetic.run(accelerator="cpu")
def talk(go_on):
    import os, sys, time
    print("first", flush=True)
    print("aside", file=sys.stderr, flush=True)
    while not os.path.exists(go_on):
        time.sleep(0.01)
    print("second")
""")
    marker = folder / "go-on"
    chunks = []
    for kind, content in kernel.start(f"talk({str(marker)!r})"):
        if kind == "stream":
            chunks.append((content["name"], content["text"]))
        text = "".join(words for _, words in chunks)
        if "first" in text and "aside" in text:
            marker.touch()  # End the function: both lines have come.
    assert ("stdout", "first\n") in chunks
    assert "second" in "".join(words for name, words in chunks if name == "stdout")
    assert "aside" in "".join(words for name, words in chunks if name == "stderr")


def test_whatever_cells_define_goes_along(kernel, folder):
    (folder / "beside.py").write_text("OFFSET = 7\n\ndef shifted(x):\n    return x + OFFSET\n")
    kernel.run(
        "from beside import shifted\nSCALE = 10\ndef helper(x):\n    return shifted(x) * SCALE"
    )
    kernel.run("@kinetic.run(accelerator='cpu')\ndef work(x):\n    return helper(x)")
    assert kernel.run("work(1)").value["text/plain"] == "80"
    kernel.run("def helper(x):\n    return -shifted(x)")
    assert kernel.run("work(1)").value["text/plain"] == "-8", (
        "a helper that was redefined in a later cell"
    )
    kernel.run("SCALE = 2\ndef helper(x):\n    return shifted(x) * SCALE")
    assert kernel.run("work(1)").value["text/plain"] == "16", (
        "a global that was changed in a later cell"
    )
    kernel.run("""
from dataclasses import dataclass
@dataclass
class Config:
    rate: float
    def doubled(self):
        return Config(self.rate * 2)
class Failed(Exception):
    pass
def outer(n):
    def inner(config):
        return [config.doubled() for _ in range(n)]
    return inner
""")
    cell = kernel.run("""
made = kinetic.run(accelerator="cpu")(outer(2))(Config(1.5))
made, all(type(c) is Config for c in made), made[0].doubled() == Config(6.0)
""")
    assert cell.value["text/plain"] == "([Config(rate=3.0), Config(rate=3.0)], True, True)"
    cell = kernel.run("""
@kinetic.run(accelerator="cpu")
def fail(self_made):
    raise Failed(self_made.rate)
try:
    fail(Config(0.5))
except Failed as error:
    print("caught", error)
""")
    assert cell.stream("stdout") == "caught 0.5\n", cell.error


@pytest.mark.long
def test_classes_that_cells_register_are_registered_on_the_host(kernel):
    kernel.run("""
from typing import Any
import flax.struct, jax, jax.numpy as jnp, optax
from flax.training import train_state
jax.config.update("jax_enable_x64", True)
class State(train_state.TrainState):
    batch_stats: Any = None
""")
    kernel.run("""
@flax.struct.dataclass
class Point:
    x: float
    y: float

class Late:
    def __init__(self, a): self.a = a

jax.tree_util.register_pytree_node(
    Late, lambda late: ((late.a,), None), lambda aux, children: Late(*children)
)
""")
    cell = kernel.run("""
@kinetic.run(accelerator="cpu")
def look(point):
    state = State.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.sgd(0.1),
        batch_stats={"m": jnp.ones(2)},
    )
    trees = (state, point, Point(1.0, 2.0), Late(1.0))
    counts = [len(jax.tree_util.tree_leaves(tree)) for tree in trees]
    return counts, str(jnp.ones(1).dtype), jax.tree_util.tree_map(lambda leaf: leaf + 1, point)

counts, dtype, point = look(Point(1.0, 2.0))
counts, dtype, type(point) is Point, point.y
""")
    assert cell.value["text/plain"] == "([3, 2, 2, 1], 'float64', True, 3.0)"
    kernel.run("@flax.struct.dataclass\nclass Point:\n    x: float\n    y: float\n    z: float")
    cell = kernel.run("""
@kinetic.run(accelerator="cpu")
def count():
    return len(jax.tree_util.tree_leaves(Point(1.0, 2.0, 3.0)))
count()
""")
    assert cell.value["text/plain"] == "3", "a class that was defined again in a later cell"


def test_cells_that_run_again_define_and_register_their_classes_again(kernel, folder):
    (folder / "train.py").write_text("# %%\nclass Pair: pass\n")
    kernel.run(f"__file__ = {str(folder / 'train.py')!r}\nimport dataclasses, functools, jax")
    kernel.run("""
@kinetic.run(accelerator="cpu")
def count():
    return [len(jax.tree_util.tree_leaves(each)) for each in (Pair(1, 2), Late())]
""")
    cell = """
@functools.partial(jax.tree_util.register_dataclass, data_fields={0}, meta_fields={1})
@dataclasses.dataclass
class Pair:
    a: int
    b: int
class Late:
    pass
jax.tree_util.register_pytree_node(Late, lambda _: ({0}, None), lambda *_: Late())
"""
    one, two = cell.format(["a"], ["b"]), cell.format(["a", "b"], [])
    for text, leaves in ((one, [1, 1]), (two, [2, 2]), (one, [1, 1]), (f"%%time\n{two}", [2, 2])):
        assert not kernel.run(text).error
        assert kernel.run("count()").value["text/plain"] == str(leaves)


def test_an_edited_module_is_what_its_file_says_and_autoreload_brings_both_together(kernel, folder):
    module = folder / "part.py"
    module.write_text("def version():\n    return 1\n")
    kernel.run("import part")
    kernel.run("@kinetic.run(accelerator='cpu')\ndef look():\n    return part.version()")
    assert kernel.run("look()").value["text/plain"] == "1"
    module.write_text("def version():\n    return 22\n")
    cell = kernel.run("look(), look.local()")
    assert cell.value["text/plain"] == "(22, 1)"
    assert "part has changed since the import" in cell.stream("stderr")
    kernel.run("%load_ext autoreload\n%autoreload 2")
    module.write_text("def version():\n    return 333\n")
    cell = kernel.run("look(), look.local()")
    assert cell.value["text/plain"] == "(333, 333)", "reloaded before the cell ran"
    assert "changed since" not in cell.stream("stderr")


def test_tracebacks_show_the_lines_of_cells_and_none_of_ours(kernel):
    kernel.run("password = 'not for others'\ndef halve(x):\n    y = x - x\n    return x / y")
    cell = kernel.run("@kinetic.run(accelerator='cpu')\ndef boom(x):\n    return halve(x)\nboom(3)")
    local, _, remote = cell.error.partition("Remote traceback")
    assert "----> 4     return x / y" in local
    assert "kinetic/_client/handle.py" not in cell.error
    assert "kinetic/_host" not in cell.error
    assert ": as above, raised at Cell In[2]:4 in halve.\n" in remote
    log = kernel.run("kinetic.list_jobs()[0].logs(follow=True)").stream("stderr")
    assert "  Cell In[2], line 4, in halve\n    return x / y\n" in log
    assert "ipykernel" not in cell.error
    plan = kernel.run("print(boom.plan(3).plan.to_json())").stream("stdout")
    assert "return x / y" in plan
    assert "not for others" not in plan


def test_a_waiting_cell_shows_where_the_hosts_stand(kernel, folder):
    marker = folder / "go-on"
    kernel.run("""
@kinetic.run(accelerator="tpu-v6e-8")
def wait(go_on):
    import os, time
    while not os.path.exists(go_on):
        time.sleep(0.01)
    return "done"
""")
    drawn = []
    for kind, content in kernel.start(f"wait({str(marker)!r})"):
        if kind in ("display_data", "update_display_data"):
            drawn.append((kind, content["transient"]["display_id"], content["data"]))
            if "2 hosts: running" in content["data"]["text/plain"]:
                marker.touch()
        assert kind != "error", content
    assert [kind for kind, _, _ in drawn] == ["display_data"] + ["update_display_data"] * (
        len(drawn) - 1
    )
    assert len({place for _, place, _ in drawn}) == 1, "one place in the output"
    assert "succeeded" in drawn[-1][2]["text/html"]
    assert "2 hosts: returned" in drawn[-1][2]["text/plain"]


def test_handles_and_plans_are_drawn(kernel):
    kernel.run("@kinetic.run(accelerator='tpu-v6e-8')\ndef quick(x):\n    return x")
    assert "1 planned" in kernel.run("quick.plan(1)").value["text/html"]
    assert "quick" in kernel.run("job = quick.run_async(1); job").value["text/html"]
    assert "1 returned" in kernel.run("job.result(); job").value["text/html"]
    assert "not_found" in kernel.run("job.cleanup(); job").value["text/html"]


def test_an_interrupted_cell_says_how_to_come_back_and_the_job_goes_on(kernel):
    kernel.run(
        "@kinetic.run(accelerator='cpu')\ndef slow():\n    import time\n"
        "    print('running', flush=True)\n    time.sleep(1000)"
    )
    chunks = []
    for kind, content in kernel.start("slow()"):
        chunks.append((kind, content))
        if kind == "stream" and "running" in content["text"]:
            kernel.interrupt()
    cell = CellOutput(chunks)
    assert "KeyboardInterrupt" in cell.error
    (handle,) = kinetic.list_jobs()
    last = cell.error.splitlines()[-1]
    assert f'kinetic.attach("{handle.job_id}")' in last, cell.error
    assert f"kinetic jobs cancel {handle.job_id}" in last
    assert "kinetic/_client/handle.py" not in cell.error
    assert not handle.status().ended
    assert kernel.run("1 + 1").value["text/plain"] == "2"
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result()


def test_a_job_outlives_its_kernel(folder):
    kernel = Kernel(folder)
    try:
        cell = kernel.run("""
import kinetic
@kinetic.run(accelerator="cpu")
def slow():
    import time
    time.sleep(1)
    return "still there"
print(slow.run_async().job_id)
""")
    finally:
        kernel.close()
    assert kinetic.attach(cell.stream("stdout").strip()).result() == "still there"


def test_the_example_has_no_output_and_names_no_machine():
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    assert all(
        not cell.get("outputs") and cell.get("execution_count") is None
        for cell in notebook["cells"]
    )


def test_a_progress_bar_is_not_cut_in_two_by_the_display(kernel):
    kernel.run("import kinetic")
    cell = kernel.run("""
@kinetic.run(accelerator="cpu")
def bar():
    import sys, time
    for done in range(12):
        print(f"\\r{done}/12", end="", file=sys.stderr, flush=True)
        time.sleep(0.15)
    print(file=sys.stderr)

bar()
""")
    assert not cell.error, cell.error
    kinds = [
        kind
        for kind, content in cell.messages
        if kind in ("stream", "display_data") and "12" in str(content)
    ]
    assert kinds.count("display_data") == 1
    assert kinds[0] == "display_data", "the display has its place above the line"
