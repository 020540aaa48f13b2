"""Training steps of 1, 8 and 70 billion parameters on five slices according to the slices'
compilers: the table of docs/how-to/tpu-compile.md.

    python benchmarks/transformer_table.py [--write] [1B] [8B] [70B]

Needs libtpu. Prints the table; `--write` writes it into the page. Results stay in kinetic's cache,
so that an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import transformers

import kinetic
from kinetic import CompileReport
from kinetic._compile.report import CompileVerdict

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/tpu-compile.md"
BEGIN, END = "<!-- benchmarks/transformer_table.py -->", "<!-- end of the table -->"
SLICES = (
    ("tpu-v5e-16", 1),
    ("tpu-v6e-16", 1),
    ("tpu-v6e-256", 1),
    ("tpu-v5p-128", 1),
    ("tpu-v6e-256", 2),
)
TENSOR = 4
COLUMNS = (
    *("Model", "Slices", "Fits?", "Parameters and optimizer", "Temporaries"),
    *("Total, of available", "Sent over ICI", "DCN", "A step takes at least", "Bound by"),
)


def compile_step(model: str, accelerator: str, slices: int, timeout: str) -> CompileReport:
    """Compile a model's training step for slices."""
    with kinetic.compile_for(accelerator, slices=slices, timeout=timeout) as target:
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": TENSOR})
        with jax.set_mesh(mesh):
            step, *arguments = transformers.build(model, mesh)
            return target.compile(step, *arguments)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes else "–"


def cells_of(model: str, report: CompileReport) -> Iterator[str]:
    """Yield the cells of one row of the table."""
    memory = report.memory
    yield model
    yield f"{report.slices} x {report.accelerator}" if report.slices > 1 else report.accelerator
    yield str(report.verdict)
    yield gib(memory.arguments)
    yield gib(memory.temporaries)
    yield f"{gib(memory.total)} of {gib(report.hbm_bytes_there)}" if memory.total else "–"
    for crosses in (False, True):
        sent = (one.wire_bytes for one in report.collectives if one.between_slices is crosses)
        yield gib(sum(sent))
    yield f"{report.step_s * 1e3:.0f} ms" if report.fits else "–"
    yield report.bound if report.fits else "–"


def draw(rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(row) for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def put_in(page: str, table: str) -> str:
    """Return the page with the table between its marks."""
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert marked.search(page), f"the page has no line {BEGIN}"
    return marked.sub(lambda _: f"{BEGIN}\n{table}\n{END}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("models", nargs="*", default=list(transformers.SIZES), metavar="MODEL")
    parser.add_argument("--timeout", default="3h", help="time limit of one compile")
    options = parser.parse_args()
    rows, versions, missing = [], "", []
    for model in options.models:
        for accelerator, slices in SLICES:
            report = compile_step(model, accelerator, slices, options.timeout)
            if report.verdict is CompileVerdict.NOT_COMPILED:
                missing.append(f"{model} on {slices} x {report.accelerator}")
                continue
            versions = report.versions
            rows.append(list(cells_of(model, report)))
            print(*rows[-1], f"({report.took_s:.0f} s)", sep="  ", flush=True)
            if report.detail:
                print(report.detail, file=sys.stderr)
    table = f"{draw(rows)}\n\n{datetime.date.today():%B %Y}, {versions}."
    if missing:
        table += f" Not compiled within {options.timeout}: {', '.join(missing)}."
    print(table)
    if options.write:
        PAGE.write_text(put_in(PAGE.read_text(), table))


if __name__ == "__main__":
    main()
