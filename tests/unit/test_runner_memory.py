"""Detecting kills by the out-of-memory killer, from files in the kernel's formats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kinetic._host.agent.memory import MemoryVerdict, Watch

PID = 7
GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal:  8388608 kB\nMemFree: 1 kB\n")
    write(tmp_path, "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
    return tmp_path


def write(root, file, text):
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(root, group, kills, limit="max"):
    write(root, f"proc/{PID}/cgroup", f"0::{group}\n")
    write(
        root,
        f"sys/fs/cgroup{group}/memory.events",
        f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n",
    )
    write(root, f"sys/fs/cgroup{group}/memory.max", f"{limit}\n")


def v1(root, group, kills, limit=9223372036854771712):
    write(root, f"proc/{PID}/cgroup", f"5:devices:/\n4:cpu,memory:{group}\n0::/\n")
    write(
        root,
        f"sys/fs/cgroup/memory{group}/memory.oom_control",
        f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    )
    write(root, f"sys/fs/cgroup/memory{group}/memory.limit_in_bytes", f"{limit}\n")


@pytest.mark.parametrize("version", [v1, v2])
def test_a_kill_in_its_own_group_is_seen_and_one_elsewhere_is_not(version, root):
    version(root, "/jobs/a", 4)
    watch = Watch(PID, root=root)
    write(root, "proc/vmstat", "oom_kill 4\n")  # The kernel killed another process.
    assert watch.verdict() == MemoryVerdict(struck=False, limit_bytes=8 * GIB)
    version(root, "/jobs/a", 5)
    assert watch.verdict().struck


@pytest.mark.parametrize("version", [v1, v2])
def test_the_tightest_limit_counts_whichever_group_sets_it(version, root):
    version(root, "/jobs", 0, 2 * GIB)
    version(root, "/jobs/a", 0)
    assert Watch(PID, root=root).verdict().limit_bytes == 2 * GIB


def test_a_process_that_is_moved_is_followed(root):
    v2(root, "/a", 0)
    watch = Watch(PID, root=root)
    v2(root, "/b", 7, GIB)
    watch.read_group()
    assert watch.verdict() == MemoryVerdict(struck=False, limit_bytes=GIB)
    v2(root, "/b", 8, GIB)
    assert watch.verdict().struck


def test_in_a_container_that_sees_only_its_own_group_the_mount_counts(root):
    v2(root, "", 0, GIB)
    write(root, f"proc/{PID}/cgroup", "0::/system.slice/of/the/host\n")
    assert Watch(PID, root=root).verdict() == MemoryVerdict(struck=False, limit_bytes=GIB)


def test_without_control_groups_the_machine_counts(root):
    watch = Watch(PID, root=root)
    assert watch.verdict() == MemoryVerdict(struck=False, limit_bytes=8 * GIB)
    write(root, "proc/vmstat", "oom_kill 4\n")
    assert watch.verdict().struck


def test_nothing_is_known_where_nothing_can_be_read(tmp_path):
    assert Watch(PID, root=tmp_path).verdict() == MemoryVerdict()


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no /proc")
def test_this_very_process_has_a_limit():
    verdict = Watch(os.getpid()).verdict()
    assert not verdict.struck
    assert verdict.limit_bytes > 1 << 20
