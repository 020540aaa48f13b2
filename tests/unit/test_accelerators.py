"""Accelerator names: every line of the vendor's tables, the accepted spellings, and the
refusals."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._core.accelerators.catalog import catalog_rows, counts, names, shape_for
from kinetic._core.accelerators.families import (
    CPU_DEVICES_MAX,
    DEFAULTS,
    FAMILIES,
    PREFERENCE,
    TPUS,
)
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic.errors import UnknownAccelerator, UsageError, UsageTypeError

ROOT = Path(__file__).parents[2]

# name, topology, hosts, machine type, GKE label
V5E, V6E = "tpu-v5-lite-podslice", "tpu-v6e-slice"
SLICES = [
    ("tpu-v3-4", "2x2", 1, "ct3-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-16", "4x4", 4, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-32", "4x8", 8, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-64", "8x8", 16, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-128", "8x16", 32, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-256", "16x16", 64, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-512", "16x32", 128, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-1024", "32x32", 256, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v3-2048", "32x64", 512, "ct3p-hightpu-4t", "tpu-v3-podslice"),
    ("tpu-v4-4", "2x2x1", 1, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-8", "2x2x2", 2, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-16", "2x2x4", 4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-32", "2x4x4", 8, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-64", "4x4x4", 16, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-128", "4x4x8", 32, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-256", "4x8x8", 64, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-512", "8x8x8", 128, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-768", "8x8x12", 192, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-1024", "8x8x16", 256, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-2048", "8x16x16", 512, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v4-4096", "16x16x16", 1024, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    ("tpu-v5litepod-1", "1x1", 1, "ct5lp-hightpu-1t", V5E),
    ("tpu-v5litepod-4", "2x2", 1, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5litepod-8", "2x4", 1, "ct5lp-hightpu-8t", V5E),
    ("tpu-v5litepod-16", "4x4", 4, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5litepod-32", "4x8", 8, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5litepod-64", "8x8", 16, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5litepod-128", "8x16", 32, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5litepod-256", "16x16", 64, "ct5lp-hightpu-4t", V5E),
    ("tpu-v5p-4", "2x2x1", 1, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-8", "2x2x2", 2, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-16", "2x2x4", 4, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-32", "2x4x4", 8, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-64", "4x4x4", 16, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-128", "4x4x8", 32, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-192", "4x4x12", 48, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-256", "4x8x8", 64, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-320", "4x4x20", 80, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-384", "4x8x12", 96, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-512", "8x8x8", 128, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-768", "8x8x12", 192, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-1024", "8x8x16", 256, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-1152", "8x12x12", 288, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-1728", "12x12x12", 432, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-2048", "8x16x16", 512, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-3072", "12x16x16", 768, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-4096", "16x16x16", 1024, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-6144", "16x16x24", 1536, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v5p-8960", "16x20x28", 2240, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    ("tpu-v6e-1", "1x1", 1, "ct6e-standard-1t", V6E),
    ("tpu-v6e-4", "2x2", 1, "ct6e-standard-4t", V6E),
    ("tpu-v6e-8", "2x4", 2, "ct6e-standard-4t", V6E),
    ("tpu-v6e-8-8t", "2x4", 1, "ct6e-standard-8t", V6E),
    ("tpu-v6e-16", "4x4", 4, "ct6e-standard-4t", V6E),
    ("tpu-v6e-32", "4x8", 8, "ct6e-standard-4t", V6E),
    ("tpu-v6e-64", "8x8", 16, "ct6e-standard-4t", V6E),
    ("tpu-v6e-128", "8x16", 32, "ct6e-standard-4t", V6E),
    ("tpu-v6e-256", "16x16", 64, "ct6e-standard-4t", V6E),
    ("tpu7x-1", "1x1x1", 1, "tpu7x-standard-1t", "tpu7x"),
    ("tpu7x-4", "2x2x1", 1, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-8", "2x2x2", 2, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-16", "2x2x4", 4, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-32", "2x4x4", 8, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-64", "4x4x4", 16, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-4096", "16x16x16", 1024, "tpu7x-standard-4t", "tpu7x"),
    ("tpu7x-9216", "16x24x24", 2304, "tpu7x-standard-4t", "tpu7x"),
]

GPU_MACHINES = {
    ("l4", "nvidia-l4"): {
        1: "g2-standard-4",
        2: "g2-standard-24",
        4: "g2-standard-48",
        8: "g2-standard-96",
    },
    ("t4", "nvidia-tesla-t4"): {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
    ("v100", "nvidia-tesla-v100"): {
        1: "n1-standard-8",
        2: "n1-standard-16",
        4: "n1-standard-32",
        8: "n1-standard-64",
    },
    ("p4", "nvidia-tesla-p4"): {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
    ("p100", "nvidia-tesla-p100"): {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
    ("a100", "nvidia-tesla-a100"): {n: f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)}
    | {16: "a2-megagpu-16g"},
    ("a100-80gb", "nvidia-a100-80gb"): {n: f"a2-ultragpu-{n}g" for n in (1, 2, 4, 8, 16)},
    ("h100", "nvidia-h100-80gb"): {n: f"a3-highgpu-{n}g" for n in (1, 2, 4, 8)},
    ("h100-mega", "nvidia-h100-mega-80gb"): {8: "a3-megagpu-8g"},
    ("h200", "nvidia-h200-141gb"): {8: "a3-ultragpu-8g"},
    ("b200", "nvidia-b200"): {8: "a4-highgpu-8g"},
    ("gb200", "nvidia-gb200"): {4: "a4x-highgpu-4g"},
}
GPU_ROWS = [
    (*key, n, machine) for key, machines in GPU_MACHINES.items() for n, machine in machines.items()
]

SPELLINGS = {
    "cpu": "cpu",
    "CPU": "cpu",
    "cpu:1": "cpu",
    "cpu:8": "cpu:8",
    "cpu-8": "cpu:8",
    "gpu": "gpu-l4",
    "tpu": "tpu-v5litepod-4",
    "tpu:spot": "tpu-v5litepod-4:spot",
    "  l4\n": "gpu-l4",
    "gpu:l4": "gpu-l4",
    "l4x1": "gpu-l4",
    "A100x4": "gpu-a100x4",
    "a100:4": "gpu-a100x4",
    "gpu-h100:8": "gpu-h100x8",
    "gpu-h100:8:spot": "gpu-h100x8:spot",
    "gpu:a100-80gb:2": "gpu-a100-80gbx2",
    "tpu-v6e:16": "tpu-v6e-16",
    "v6e:4x4": "tpu-v6e-16",
    "gpu:a100-80gbx2": "gpu-a100-80gbx2",
    "a100-80gb": "gpu-a100-80gb",
    "a100-40gb": "gpu-a100",
    "nvidia-tesla-a100x8": "gpu-a100x8",
    "nvidia-h100-80gb": "gpu-h100",
    "h100-mega": "gpu-h100-megax8",
    "h200": "gpu-h200x8",
    "gb200": "gpu-gb200x4",
    "gpu:1": "gpu-h100",
    "gpu:4": "gpu-h100x4",
    "gpu:8": "gpu-h100x8",
    "gpu:16": "gpu-a100-80gbx16",
    "gpu:4:spot": "gpu-h100x4:spot",
    "tpu:1": "tpu-v6e-1",
    "tpu:8": "tpu-v6e-8",
    "tpu:512": "tpu-v5p-512",
    "v3": "tpu-v3-4",
    "v4": "tpu-v4-4",
    "v5litepod": "tpu-v5litepod-4",
    "v5p": "tpu-v5p-8",
    "v6e": "tpu-v6e-8",
    "tpu7x": "tpu7x-4",
    "tpu-v5e-1": "tpu-v5litepod-1",
    "tpu-v5litepod-2x4": "tpu-v5litepod-8",
    "v5e-8-8t": "tpu-v5litepod-8",
    "Trillium-8": "tpu-v6e-8",
    "v6e-2x4-8t": "tpu-v6e-8-8t",
    "v6e-8-4t": "tpu-v6e-8",
    "ironwood-8": "tpu7x-8",
    "v7x-2x2x1": "tpu7x-4",
    "tpu-tpu7x-8": "tpu7x-8",
    "v4-4x4x16": "tpu-v4-4x4x16",
    "v4-16x4x4": "tpu-v4-4x4x16",
    "v4-8x4x4": "tpu-v4-128",
    "v5p-4x4x32": "tpu-v5p-4x4x32",
    "v5p-640": "tpu-v5p-640",
}

REFUSED = [
    # name as written, part of the message, nearest name
    ("tpu-v6e-12", "1, 4, 8, 16, 32, 64, 128 or 256 chips, not 12", ("tpu-v6e-8", "tpu-v6e-16")),
    ("v6e-0", "not 0", ("tpu-v6e-1",)),
    ("gpux", "no accelerator family", ("gpu-l4",)),
    ("tpuu", "no accelerator family", ("tpu-v5litepod-4",)),
    ("v6e-512", "not 512", ("tpu-v6e-256", "tpu-v5p-512", "tpu-v4-512")),
    (
        "v5p-100",
        "4, 8, 16, 32 or a multiple of 64 up to 8960 chips, not 100",
        ("tpu-v5p-128", "tpu-v5p-64"),
    ),
    ("v4-4160", "up to 4096", ("tpu-v4-4096", "tpu-v5p-4160")),
    ("v6e-4x2", "no such topology", ("tpu-v6e-8",)),
    ("v6e-4x4x1", "no such topology", ("tpu-v6e-16",)),
    (
        "v4-4x4",
        "2x2x1, 2x2x2, 2x2x4, 2x4x4, and AxBxC of multiples of 4 up to 4096",
        ("tpu-v4-16",),
    ),
    ("v4-2x8x8", "no such topology", ("tpu-v4-128",)),
    ("v5p-8x4x4", "in ascending order", ("tpu-v5p-128",)),
    ("v6e-16-8t", "has no 4x4 on machines with", ("tpu-v6e-16",)),
    ("l4x3", "1, 2, 4 or 8 GPUs, not 3", ("gpu-l4x2", "gpu-l4x4")),
    ("h200x1", "h200 comes with 8 GPUs, not 1", ("gpu-h200x8",)),
    ("l4x16:SPOT", "not 16", ("gpu-l4x8:spot", "gpu-a100-80gbx16:spot", "gpu-a100x16:spot")),
    ("gpu:3", "no gpu slice has 3 GPUs", ("gpu:2", "gpu:4")),
    ("tpu:0", "no tpu slice has 0 chips", ("tpu:1",)),
    ("cpu:0", f"1 to {CPU_DEVICES_MAX} devices", ("cpu", "cpu:1024")),
    ("cpu-fast", "a number of devices", ("cpu", "cpu:4")),
    ("a100:", "write a100xN", ("gpu-a100",)),
    ("h100:3", "1, 2, 4 or 8 GPUs, not 3", ("gpu-h100x2", "gpu-h100x4")),
    ("a100-80", "write a100xN", ("gpu-a100-80gb",)),
    ("v6e-", "write v6e-N", ("tpu-v6e-",)),
    ("v6e-8-", "write v6e-N", ("tpu-v6e-8",)),
    ("v6e:12", "chips, not 12", ("tpu-v6e-8", "tpu-v6e-16")),
    ("gpu-v6e-16", "v6e is a tpu, not a gpu", ("tpu-v6e-16",)),
    ("tpu-l4", "l4 is a gpu, not a tpu", ("gpu-l4",)),
    ("tpu-v6-16", "no TPU family", ("tpu-v6e-16",)),
    ("h10", "no accelerator family", ("gpu-h100",)),
    ("", "empty", ("cpu", "gpu-l4", "tpu-v5litepod-4")),
    (":spot", "empty", ("cpu:spot",)),
    ("tpu-", "families: v3, v4, v5litepod, v5p, v6e, tpu7x.", ()),
    ("zzzzzz", "families: v3", ()),
    ("v4-" + "9" * 50, "up to 4096", ("tpu-v4-4096",)),
    ("cpu:" + "9" * 5000, "no name is that long", ()),
]


@pytest.mark.parametrize(("name", "topology", "hosts", "machine", "label"), SLICES)
def test_each_tpu_slice_of_the_tables(name, topology, hosts, machine, label):
    target = resolve(name)
    assert (target.name, target.kind, target.shape_text, target.hosts) == (
        name,
        "tpu",
        topology,
        hosts,
    )
    assert (target.machine_type, target.gke_accelerator) == (machine, label)
    assert target.chips_per_host == int(machine.rpartition("-")[2].removesuffix("t"))


@pytest.mark.parametrize("row", [row for row in SLICES if not row[0].endswith("t")])
def test_a_topology_means_the_slice_that_its_chip_count_means(row):
    stem, topology = row[0].rpartition("-")[0], row[1]
    assert resolve(f"{stem}-{topology}") == resolve(row[0])


@pytest.mark.parametrize(("family", "label", "count", "machine"), GPU_ROWS)
def test_each_gpu_machine_of_the_tables(family, label, count, machine):
    topology = resolve(f"gpu-{family}x{count}")
    assert (topology.kind, topology.family, topology.chips, topology.hosts) == (
        "gpu",
        family,
        count,
        1,
    )
    assert (topology.machine_type, topology.gke_accelerator, topology.shape) == (
        machine,
        label,
        (count,),
    )


@pytest.mark.parametrize(("written", "canonical"), SPELLINGS.items())
def test_spellings(written, canonical):
    assert resolve(written).name == canonical


def test_the_tables_list_nothing_else():
    tpus = {row.name for row in catalog_rows() if row.kind == "tpu"}
    assert {row[0] for row in SLICES} <= tpus
    extra = tpus - {row[0] for row in SLICES}
    assert extra == {f"tpu7x-{n}" for n in (128, 256, 512, 1024, 2048, 6144)}
    assert sum(row.kind == "gpu" for row in catalog_rows()) == len(GPU_ROWS)
    assert names()[0] == "cpu"


def test_names_of_older_scripts_are_all_known():
    v3 = [4, *(2**n for n in range(4, 12))]
    v4 = [2**n for n in range(2, 13)]
    v5e = [1, *(2**n for n in range(2, 9))]
    older = {"v3": v3, "v4": v4, "v5litepod": v5e, "v5p": [8, 16, 32], "v6e": [8, 16]}
    for family, sizes in older.items():
        for chips in sizes:
            topology = resolve(f"{family}-{chips}")
            assert (topology.family, topology.chips, topology.name) == (
                family,
                chips,
                f"tpu-{family}-{chips}",
            )


def test_eight_chips_of_v6e_are_two_hosts_and_of_v5e_one():
    assert (resolve("v6e-8").hosts, resolve("v6e-8").multi_host) == (2, True)
    assert (resolve("v5e-8").hosts, resolve("v5e-8").multi_host) == (1, False)


def test_spot_as_argument_is_the_same_as_the_suffix():
    assert resolve("v6e-8", spot=True) == resolve("v6e-8:spot") == resolve("v6e-8:spot", spot=True)
    assert resolve("v6e-8:spot").spot
    assert not resolve("v6e-8").spot


@pytest.mark.parametrize(("written", "says", "nearest"), REFUSED)
def test_refusals_say_what_is_wrong_and_what_is_near(written, says, nearest):
    with pytest.raises(UnknownAccelerator, match=re.escape(says)) as caught:
        resolve(written)
    error = caught.value
    assert error.name == written
    assert [
        near.startswith(meant) for near, meant in zip(error.suggestions, nearest, strict=False)
    ] == [True] * len(nearest)
    assert all(near in str(error) for near in error.suggestions)
    assert all(resolve(near) for near in error.suggestions)
    assert len(str(error)) < 600


@pytest.mark.parametrize("value", [None, 8, b"v6e-8", ["v6e-8"], True])
def test_a_name_must_be_text(value):
    with pytest.raises(UsageTypeError, match=type(value).__name__):
        resolve(value)


def test_names_with_prefix_and_bare_names_do_not_clash():
    called = [alias for family in FAMILIES for alias in (family.name, *family.aliases)]
    assert len(called) == len(set(called))
    assert not set(called) & {"cpu", *DEFAULTS}
    assert {name for kind in PREFERENCE.values() for name in kind} <= {
        family.name for family in FAMILIES
    }


def test_listed_large_slices_are_the_most_cubic_ones():
    bare = [family._replace(machines=()) for family in TPUS if family.cube_limit_chips]
    for family in bare:
        for row in catalog_rows():
            if row.family == family.name and row.chips >= 64:
                assert shape_for(family, row.chips) == row.shape


def test_the_reference_page_lists_what_the_catalog_lists():
    page = ROOT / "docs" / "reference" / "accelerators.md"
    tables = [
        line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    listed = re.findall(r"`((?:tpu|gpu|cpu)[^` ]*)` ?([0-9x]*)", "\n".join(tables))
    assert sorted(name for name, _ in listed) == sorted(names())
    assert all(resolve(name).shape_text == shape for name, shape in listed if shape)


@pytest.mark.starts_processes
def test_import_loads_nothing_that_only_errors_need():
    program = (
        "import sys, kinetic._core.accelerators; print({'difflib', 're'} & set(sys.modules) - "
        "set(sys.argv[1].split()))"
    )
    loaded = "import sys, dataclasses, typing; print(*sys.modules)"
    before = output_of(loaded)
    assert output_of(program, before) == "set()"


def output_of(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def resolved_or_refused(text: str) -> Topology | UnknownAccelerator:
    try:
        return resolve(text)
    except UnknownAccelerator as error:
        return error


def whole(topology: Topology) -> bool:
    return topology.hosts * topology.chips_per_host == math.prod(topology.shape) == topology.chips


written = st.one_of(
    st.sampled_from(names()),
    st.builds(
        lambda family, n: f"{family}-{n}",
        st.sampled_from([tpu.name for tpu in TPUS]),
        st.integers(0, 10_000),
    ),
    st.builds(
        lambda family, axes: f"{family}-" + "x".join(str(4 * n) for n in axes),
        st.sampled_from(["v4", "v5p", "tpu7x"]),
        st.lists(st.integers(1, 8), min_size=3, max_size=3),
    ),
    st.builds(lambda n: f"cpu:{n}", st.integers(1, 2000)),
    st.builds(lambda kind, n: f"{kind}:{n}", st.sampled_from(["gpu", "tpu"]), st.integers(1, 5000)),
)


@given(written)
def test_every_slice_is_whole_and_its_name_leads_back_to_it(name):
    topology = resolved_or_refused(name)
    if isinstance(topology, UnknownAccelerator):
        assert topology.suggestions
        return
    assert whole(topology)
    assert resolve(topology.name) == topology
    assert Topology.from_json(topology.to_json()) == topology


@given(st.sampled_from([family for family in FAMILIES if family.kind == "tpu"]), st.data())
def test_every_count_of_a_family_is_a_slice_of_that_many_chips(family, data):
    chips = data.draw(st.sampled_from(counts(family)))
    topology = resolve(f"{family.name}-{chips}")
    assert topology.chips == chips
    assert whole(topology)


@given(written, st.data())
def test_case_prefix_and_spot_do_not_change_the_slice(name, data):
    plain = resolved_or_refused(name)
    if isinstance(plain, UnknownAccelerator):
        return
    cased = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in name)
    assert resolve(cased) == plain
    if plain.kind != "cpu":
        bare = plain.name.removeprefix(f"{plain.kind}-")
        assert (
            resolve(bare)
            == resolve(f"{plain.kind}-{bare}")
            == resolve(f"{plain.kind}:{bare}")
            == plain
        )
    spot = resolve(f"{name}:spot")
    assert spot.spot
    assert (spot.shape, spot.machine_type, spot.name) == (
        plain.shape,
        plain.machine_type,
        f"{plain.name}:spot",
    )
    assert resolve(spot.name) == spot


pieces = st.sampled_from(
    [
        "tpu",
        "gpu",
        "cpu",
        "-",
        ":",
        "x",
        "v6e",
        "v4",
        "l4",
        "a100",
        "80gb",
        "4",
        "16",
        "²",
        "８",
        "t",
        "spot",
    ]
)


@given(st.text() | st.lists(pieces, max_size=8).map("".join))
def test_any_text_is_a_slice_or_a_refusal(text):
    topology = resolved_or_refused(text)
    if isinstance(topology, UnknownAccelerator):
        assert all(resolve(near) for near in topology.suggestions)
        return
    assert whole(topology)
    assert resolve(topology.name) == topology


@given(st.none() | st.integers() | st.binary() | st.floats() | st.lists(st.text()))
def test_any_other_value_is_a_usage_error(value):
    with pytest.raises(UsageError):
        resolve(value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tpu-v9-8", "tpu-v4-8"),
        ("tpu-v7", "tpu7x-1"),
        ("tpu-v6", "tpu-v6e-1"),
        ("tpu-v5:spot", "tpu-v5p-4:spot"),
    ],
)
def test_an_unknown_family_names_the_families(name, nearest):
    words = r"no TPU family is called 'v\d'; families: v3, v4, v5litepod, v5p, v6e, tpu7x\."
    with pytest.raises(UnknownAccelerator, match=words) as caught:
        resolve(name)
    assert nearest in caught.value.suggestions
