"""A browser, dashboard pages in it, and stores full of jobs that no host runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gangs import wait_until
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from kinetic._backends.base import LogRequest, Status
from kinetic._client.access import JobAccess
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.events import GangEvent
from kinetic._core.exits import Exit
from kinetic._core.log_format import LogChunk, Position
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._dashboard.server import DashboardServer
from kinetic._store.base import folder_of
from kinetic._store.local import LocalStore

BROWSERS, DRIVER = ("chromium", "google-chrome", "chromium-browser"), "chromedriver"
_TEXT = """
const found = document.querySelector(arguments[0]);
// Lines out of view are not laid out, and have no innerText.
if (found?.classList.contains("lines"))
  return [...found.children].map((line) => line.textContent).join("\\n");
if (found?.closest(".lines")) return found.textContent;
return found?.innerText ?? "";
"""
WIDE, PHONE = (1280, 900), (390, 800)


def missing_programs() -> list[str]:
    """List the programs that are needed to drive a browser and missing on this machine."""
    return [
        names[0] for names in (BROWSERS, (DRIVER,)) if not any(shutil.which(name) for name in names)
    ]


def open_browser(folder: Path) -> webdriver.Chrome:
    """Start a browser whose files are in the folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    switches = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage")
    for switch in (*switches, "no-first-run", f"user-data-dir={folder}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # The browser outlives the test. Without these variables, it does not count as a leftover.
    env = {k: v for k, v in os.environ.items() if k != "TMPDIR" and "KINETIC" not in k}
    service = webdriver.ChromeService(shutil.which(DRIVER), env=env | {"HOME": str(folder)})
    return webdriver.Chrome(options=options, service=service)


class Page:
    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        self.url = url
        self.resize(WIDE)

    def resize(self, size: tuple[int, int], *, dark: bool = False) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**metrics, "mobile": size == PHONE}
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, path: str = "") -> Page:
        self.browser.get(self.url + path)
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        """Return the text of the first matching element in one call, because the page may replace
        elements between two calls."""
        return str(self.run(_TEXT, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click an element as soon as it exists."""
        wait_until(lambda: self.count(selector), f"there is no {selector}")
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, key: str) -> None:
        """Press a key on the focused element."""
        ActionChains(self.browser).send_keys(key).perform()

    def wait_for(self, words: str, selector: str = "body") -> None:
        try:
            wait_until(lambda: words in " ".join(self.text(selector).split()), "")
        except AssertionError:
            text = self.text(selector) or self.text()
            raise AssertionError(f"{words!r} is not in {selector}: {text}") from None

    def complaints(self) -> list[str]:
        """Return the errors in the browser's console, such as blocked scripts."""
        log = self.browser.get_log("browser")
        return [each["message"] for each in log if each["level"] == "SEVERE"]


class StillBackend:
    """A backend that runs nothing: a test sets the phase and the output of its jobs."""

    name = "still"

    def __init__(self) -> None:
        self.output: dict[str, list[bytes]] = {}
        self.cancelled: list[str] = []
        self.phase = JobStatus.RUNNING

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        return {ref.job_id: Status(self.phase) for ref in refs}

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        at = 0
        for data in self.output.get(ref.job_id, []):
            at += len(data)
            chunk = LogChunk(0, 1, 10**18, data, Position(1, at))
            if request.hosts in (None, (0,)) and chunk.end > request.after.get(0, Position(0)):
                yield chunk

    def cancel(self, ref: JobRef) -> None:
        self.cancelled.append(ref.job_id)


class Showcase:
    """A store full of records of jobs, none of which runs anywhere."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self.backend = StillBackend()
        self.access = JobAccess(self.store, lambda _: self.backend, self._open)  # type: ignore[arg-type]

    def _open(self, ref: JobRef) -> JobHandle[Any]:
        return JobHandle(ref, self.backend, self.store)  # type: ignore[arg-type]

    def _write(self, key: str, document: dict[str, Any]) -> None:
        """Write a document faster than the store does, because tests need thousands of them."""
        path = folder_of(self.store) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))

    def add(
        self,
        number: int,
        *,
        verdict: Verdict | None = None,
        events: Sequence[GangEvent] = (),
        reason: str = "",
        **changes: Any,
    ) -> JobRef:
        """Add a job with a number to the store; without a verdict, the job is running."""
        created_at = time.time() - 100_000 + number
        ref = JobRef(
            f"job-{number:08x}", Place("still"), "cpu", "f", "train", created_at, self.store.uri
        )
        ref = replace(ref, **changes)
        self._write(layout.JobKeys(ref.job_id).ref, ref.to_json())
        if verdict is not None:
            exit = Exit.RETURNED if verdict is Verdict.SUCCEEDED else Exit.RAISED
            reports = (HostReport(0, exit, reason, started_at=created_at + 1),)
            ended_at = created_at + 60
            outcome = Outcome(verdict, reports=reports, reason=reason, ended_at=ended_at)
            self._write(layout.JobKeys(ref.job_id).outcome, outcome.to_json())
        if events:
            lines = [json.dumps(each.to_json()) for each in events]
            self.store.put(layout.JobKeys(ref.job_id).events, "\n".join(lines).encode() + b"\n")
        return ref


@contextlib.contextmanager
def serve(access: JobAccess, *, is_framed: bool = False) -> Iterator[DashboardServer]:
    """Serve a dashboard of these jobs."""
    server = DashboardServer(access, is_framed=is_framed)
    server.start()
    try:
        yield server
    finally:
        server.close()
