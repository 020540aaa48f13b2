"""Declared data: the function receives a path, wherever it runs.

    python examples/data.py

The folder is sent once, by content: another call with the same data sends nothing. Files that the
function writes to its output folder are available after the call.
"""

import csv
import os
import tempfile
from pathlib import Path

import kinetic


def make_data(folder):
    for year in (2023, 2024, 2025):
        rows = [f"{month},{year % 100 + month}" for month in range(1, 13)]
        (folder / f"{year}.csv").write_text("\n".join(["month,sales", *rows]) + "\n")
    return folder


def add_up(folder, labels):
    totals = {}
    for file in sorted(os.listdir(folder)):
        with open(Path(folder) / file, newline="") as rows:
            totals[file.removesuffix(".csv")] = sum(
                int(row["sales"]) for row in csv.DictReader(rows)
            )
    report = Path(os.environ["KINETIC_OUTPUT_DIR"]) / "report.txt"
    report.write_text(
        "".join(f"{labels['title']} {year}: {total}\n" for year, total in totals.items())
    )
    return totals


def main():
    with tempfile.TemporaryDirectory() as folder:
        sales = kinetic.Data(make_data(Path(folder)))
        job = kinetic.run(accelerator="cpu")(add_up).run_async(sales, {"title": "Sales of"})
        print(job.result())
        print((Path(job.output_dir) / "report.txt").read_text(), end="")


if __name__ == "__main__":
    main()
