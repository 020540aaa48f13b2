"""The dashboard: first paint, delay from a host to the page, and cost while 100 jobs run. Needs
Chromium and its driver."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measure

import kinetic

ROUNDS, JOBS, LINES, WATCHED_S = 16, 100, 100, 20.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAINT = "return performance.getEntriesByName('first-contentful-paint').map((e) => e.startTime)"
_WATCH_LINES = """
window.lines = [];
new MutationObserver((changes) => {
  for (const change of changes)
    for (const node of change.addedNodes)
      if (!window.lines.some(([, text]) => text === node.textContent))
        window.lines.push([Date.now() / 1000, node.textContent]);
}).observe(document.getElementById("lines"), {childList: true});
"""
_WATCH_ROWS = """
window.states = {};
new MutationObserver(() => { for (const row of document.querySelectorAll("#rows > .row"))
  if (row.innerText.includes("succeeded")) window.states[row.id] ??= Date.now() / 1000;
}).observe(document.getElementById("rows"), {childList: true, subtree: true});
"""


def ticker(lines: int) -> None:
    """Print the time repeatedly."""
    time.sleep(5)  # Until the page is open.
    for _ in range(lines):
        print(repr(time.time()), flush=True)
        time.sleep(0.05)


@contextmanager
def serve() -> Iterator[tuple[int, str]]:
    """Run `kinetic dashboard`; yield its process id and its address."""
    words = [sys.executable, "-m", "kinetic", "dashboard", "--no-open"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child.pid, child.stdout.readline().strip()
        finally:
            child.terminate()


@contextmanager
def browse() -> Iterator[Any]:
    """Start a headless browser."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory(prefix="kn-bench-browser-") as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        for switch in ("headless=new", "no-sandbox", "disable-gpu", f"user-data-dir={folder}"):
            options.add_argument(f"--{switch}")
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=service)
        try:
            yield browser
        finally:
            browser.quit()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1000


def until(poll: Any) -> Any:
    """Poll until the result is true; return it."""
    while not (result := poll()):
        time.sleep(0.05)
    return result


def first_paints(browser: Any, *urls: str) -> list[list[float]]:
    """Return the seconds from each request to the first paint. Pages are opened in turn, so that a
    slow moment of the machine affects all of them."""
    columns: list[list[float]] = [[] for _ in urls]
    for _ in range(ROUNDS):
        for url, paints in zip(urls, columns, strict=True):
            browser.get("about:blank")
            browser.get(url)
            paints.append(until(lambda: browser.execute_script(_PAINT))[0] / 1e3)
    return [paints[1:] for paints in columns]


def line_delays(browser: Any, url: str) -> list[float]:
    """Return the delays from a host's print to the page."""
    handle = kinetic.run(accelerator="cpu")(ticker).run_async(LINES)
    browser.get(f"{url}jobs/{handle.job_id}")
    browser.execute_script(_WATCH_LINES)
    script = "return window.lines"
    lines = until(lambda: len(rows := browser.execute_script(script)) >= LINES and rows)
    return sorted(at - float(words) for at, words in lines)


def end_delays(browser: Any, url: str) -> list[float]:
    """Return the delays from a job's end, as its outcome has it, to the list of jobs."""
    browser.get(url)
    browser.execute_script(_WATCH_ROWS)
    delays = []
    for _ in range(10):
        handle = kinetic.run(accelerator="cpu")(time.sleep).run_async(1)
        ended_at = handle.wait().ended_at
        at = until(
            lambda row=f"row-{handle.job_id}": browser.execute_script(
                f"return window.states['{row}']"
            )
        )
        delays.append(at - ended_at)
    return sorted(delays)


def main() -> None:
    if shutil.which("chromedriver") is None:
        print("\nthe dashboard: skipped, because chromedriver is not on the PATH")
        return
    with measure.home(), browse() as browser, serve() as (pid, url):
        kinetic.run(accelerator="cpu")(int)()
        with tempfile.NamedTemporaryFile(suffix=".html", mode="w") as page:
            page.write("<!doctype html><title>bare</title><p>bare</p>")
            page.flush()
            began_s = cpu_s(pid)
            paints = first_paints(browser, url, f"file://{page.name}")
            used_s = (cpu_s(pid) - began_s) / ROUNDS
        measure.heading("the dashboard (floor: a page of one word, from a file)")
        measure.row("first paint of the list", *map(statistics.median, paints))
        measure.row("the quickest", *map(min, paints))
        print(f"  {'the server meanwhile, processor time':42}{used_s * 1e3:9.1f} ms a page")

        delays = line_delays(browser, url)
        print(
            f"\nfrom a host's print to the page, {len(delays)} lines: median "
            f"{statistics.median(delays) * 1e3:.0f} ms, 95th percentile "
            f"{delays[int(len(delays) * 0.95)] * 1e3:.0f} ms (goal <= 300 ms)"
        )
        ends = end_delays(browser, url)
        print(
            f"from a job's end to the list: median {statistics.median(ends) * 1e3:.0f} ms, longest "
            f"{ends[-1] * 1e3:.0f} ms"
        )

        handles = [kinetic.run(accelerator="cpu")(time.sleep).run_async(3600) for _ in range(JOBS)]
        try:
            browser.get(url)
            until(
                lambda: (
                    f"{JOBS}\nrunning" in browser.find_element("id", "counts").text
                    or f"{JOBS} running" in browser.find_element("id", "counts").text
                )
            )
            began_s, began = cpu_s(pid), time.monotonic()
            time.sleep(WATCHED_S)
            share = (cpu_s(pid) - began_s) / (time.monotonic() - began)
            print(
                f"with {JOBS} running jobs in view: {share:.1%} of a processor, "
                f"{memory_mb(pid):.0f} MB (goal <= 5 %, 150 MB)"
            )
            browser.get(f"{url}jobs/{handles[0].job_id}")
            began_s, began = cpu_s(pid), time.monotonic()
            time.sleep(WATCHED_S)
            share = (cpu_s(pid) - began_s) / (time.monotonic() - began)
            print(f"with one of them in view: {share:.1%} of a processor, {memory_mb(pid):.0f} MB")
        finally:
            for handle in handles:
                handle.cancel(cleanup_timeout=0)
            for handle in handles:
                handle.wait()


if __name__ == "__main__":
    main()
