"""`kinetic compile`: compiles a function for a TPU slice without a TPU.

The exit code is 1 if the function does not fit.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import DURATION, json_option
from kinetic.errors import KineticError, UsageError

if TYPE_CHECKING:
    from kinetic._compile.report import CompileReport

_HELP = """Compile a function for a TPU slice on this machine, without a TPU.

BUILD is FILE.py:FUNCTION or MODULE:FUNCTION. It names a function without arguments that returns
the function to compile and its arguments: arrays, or their shapes. While it runs,
`kinetic.make_mesh` creates meshes of the slice's devices.

Print whether the function fits, its memory, the communication between chips, and a lower bound of
its run time, as the TPU compiler reports them. Exit with 1 if the function does not compile or fit.

With --fit, try the sizes of the accelerator family, smallest first, until one fits.

\b
Examples:
  kinetic compile -a tpu-v6e-16 train.py:build
  kinetic compile -a tpu-v6e-256 --slices 2 --json mypackage.train:build
  kinetic compile -a tpu-v6e-16 --fit train.py:build
"""

_OWN_FILES = (str(Path(__file__).parents[2]), "<frozen importlib")
"""Frames of these files are dropped from the top of a traceback, which then begins in user code."""


@click.command(
    "compile",
    help=_HELP,
    short_help="Check without a TPU whether a function compiles for a slice and fits.",
)
@click.option(
    "-a",
    "--accelerator",
    required=True,
    metavar="NAME",
    shell_complete=complete_with("accelerators"),
    help="TPU slice to compile for.",
)
@click.option(
    "--slices", type=click.IntRange(min=1), default=1, help="Number of slices. [default: 1]"
)
@click.option(
    "--fit",
    is_flag=True,
    help="Find the smallest size of this family that fits.",
)
@click.option(
    "--most-sizes",
    type=click.IntRange(min=1),
    default=12,
    help="With --fit: maximum number of sizes to try. [default: 12]",
)
@click.option(
    "--within",
    type=DURATION,
    default="1h",
    help="With --fit: time limit for all sizes. [default: 1h]",
)
@click.option(
    "--timeout", type=DURATION, default="10m", help="Time limit for one size. [default: 10m]"
)
@json_option
@click.argument("build", metavar="BUILD")
def compile_(
    *,
    build: str,
    accelerator: str,
    slices: int,
    fit: bool,
    most_sizes: int,
    within: float,
    timeout: float,
    as_json: bool,
) -> int:
    """Compile the function and print the compiler's report. Return the exit code."""
    from kinetic._client.compiling import compile_for
    from kinetic._compile.slice import call_build

    target = compile_for(accelerator, slices=slices, timeout=timeout)
    try:
        # Keep the output of the caller's code out of the JSON document.
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            function = find_function(build)
            if fit:
                reports = target.find_fit(function, most_sizes=most_sizes, within=within)
            else:
                with target:
                    compiled, *arguments = call_build(function)
                    reports = [target.compile(compiled, *arguments)]
    except KineticError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by the caller's code
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            trace = trace.tb_next
        output.traceback_of(error.with_traceback(trace or error.__traceback__))
        return exit_codes.USAGE
    _print_reports(reports, is_search=fit, as_json=as_json)
    return exit_codes.OK if reports[-1].fits else exit_codes.FAILED


def find_function(reference: str) -> Callable[[], Any]:
    """Import the function that FILE.py:FUNCTION or MODULE:FUNCTION names.

    Raises:
        UsageError: the file, module or function does not exist.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(
            f"The function must be named FILE.py:FUNCTION or MODULE:FUNCTION; got {reference!r}."
        )
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        own = [
            candidate
            for candidate, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        candidates = f" Its functions are: {', '.join(own)}." if own else ""
        raise UsageError(f"{place} has no function {name!r}.{candidates}")
    return function


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"The file {path} does not exist. Check its path.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    from kinetic._source.project import current_folder

    sys.path.insert(0, str(current_folder()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"The module {name!r} does not exist. For a file, write {name}.py."
        ) from error


def _print_reports(reports: list[CompileReport], *, is_search: bool, as_json: bool) -> None:
    if as_json:
        documents = [report.summary() for report in reports]
        output.json_document(documents if is_search else documents[0])
        return
    from kinetic._compile.report import summarize

    for report in reports[:-1]:
        output.line(f"{report.accelerator}: {summarize(report)}")
    if len(reports) > 1:
        output.line()
    output.line(reports[-1].text(output.width()))
