"""Limits and durations of a job are right although the wall clock is set while it runs, as by NTP.
A preloaded library moves the wall clock of all processes of a caller."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from gangs import PATIENCE_S

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")

LIBRARY = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    char text[32] = {0};
    int file = syscall(SYS_openat, AT_FDCWD, AHEAD, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    long length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return length > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""

CALLER = """
import sys, time
sys.executable = "{python}"  # With it, hosts are started.
import kinetic

def set_clock():
    with open("{ahead}", "w") as ahead:
        ahead.write("{step}")
    time.sleep(3)  # Its host connects after one second.
    return time.time() - time.monotonic()

before = time.time() - time.monotonic()
handle = kinetic.run(accelerator="cpu", timeout=600)(set_clock).run_async()
print(round(handle.result() - before))
(report,) = handle.outcome().reports
print(report.ran_s < 60)
"""


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_clock_that_is_set_ends_no_job(step, home, tmp_path):
    """The wall clock moves by an hour while a job runs: no limit ends the job, and the reported run
    time is below a minute."""
    names = "ahead", "clock.so", "caller.py", "python"
    offset_file, library, script, python = (tmp_path / name for name in names)
    offset_file.write_text("0")
    script.write_text(CALLER.format(step=step, ahead=offset_file, python=python))
    python.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    compiler = [
        "gcc",
        "-shared",
        "-fPIC",
        f'-DAHEAD="{offset_file}"',
        "-x",
        "c",
        "-",
        "-o",
        str(library),
    ]
    subprocess.run(compiler, input=LIBRARY, text=True, check=True)
    ran = subprocess.run(
        [str(python), str(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.stdout.split() == [str(step), "True"], ran.stderr
