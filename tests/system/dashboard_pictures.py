"""Take the screenshots of the dashboard in the documentation, from jobs that run on this machine.

    python tests/system/dashboard_pictures.py docs/assets

Writes dashboard-jobs.png, dashboard-job.png, … to the folder. Needs Chromium and Pillow.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from dashboard_cases import PHONE, Page, open_browser, serve
from on_dashboard import pretrain
from PIL import Image

import kinetic
from kinetic._client.access import open_access

_LOGGED_S = 14.0
"""Seconds for which a job logs before its picture is taken, so that the curves have a shape."""


def evaluate(seed):
    if seed == 4:
        raise ValueError(f"no checkpoint for seed {seed}")
    time.sleep(0.2 if seed < 6 else 600)


def shoot(page: Page, path: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    page.resize(size, dark=dark)
    time.sleep(1.5)
    page.browser.save_screenshot(str(path))
    with Image.open(path) as picture:  # a smaller palette: a third of the size
        picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main(target: Path) -> None:
    os.environ |= {"KINETIC_BACKEND": "local", "KINETIC_SLICE_AWAY_S": "600"}
    with tempfile.TemporaryDirectory(prefix="kn-") as folder:
        os.environ["KINETIC_HOME"] = f"{folder}/home"
        end = Path(folder) / "end"
        batch = kinetic.run("cpu", name="evaluate")(evaluate).run_async_map(
            range(8), name="evaluate", max_concurrent=4
        )
        elastic = kinetic.run("tpu-v6e-8", slices=(1, 3), on_slice_loss="shrink", name="pretrain")
        job = elastic(pretrain).run_async(str(end))
        browser = open_browser(Path(folder) / "browser")
        try:
            with serve(open_access({})) as server:
                page = Page(browser, server.url)
                page.open(f"jobs/{job.job_id}").wait_for("step 50", "#lines")
                time.sleep(_LOGGED_S / 2)
                job.kill_hosts(slice=2)
                page.wait_for("lost slice 2", "#attempts")
                page.wait_for("step 50", "#lines")
                time.sleep(_LOGGED_S)
                shoot(page, target / "dashboard-job.png", (1280, 1180))
                shoot(page, target / "dashboard-dark.png", (1280, 1180), dark=True)
                shoot(page, target / "dashboard-phone.png", PHONE)
                shoot(page.open(), target / "dashboard-jobs.png", (1280, 640))
        finally:
            browser.quit()
            end.touch()
            batch.cancel()
            job.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
