"""`kinetic run`: runs a script, a module or a command on every host of a slice.

Prints the program's output and exits with its exit code; with --detach, prints the id of the job.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kinetic._client.board import text
from kinetic._core.option_rows import Flag, Option, Takes
from kinetic._core.options import TABLE
from kinetic._source.project import current_folder
from kinetic.cli import exit_codes, output
from kinetic.cli import program as programs
from kinetic.cli.commands.output import print_failure
from kinetic.cli.context import PLACES, AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import ASSIGNMENT, DURATION, SLICES, json_option
from kinetic.cli.program import Program, ProgramKind
from kinetic.errors import KineticError, UsageError

_FIRST = ("accelerator", "env", "timeout", "detach")
_CLUSTER_OPTIONS = (
    *("queue", "priority", "reservation", "local_storage", "network_devices", "service_account"),
    *("cpu", "memory", "shm", "privileged", "pathways_flags", *PLACES),
)
_ONE_HOST_FLAG, _ONE_HOST = "--once", ("--accelerator", "cpu", "--slices", "1")
_HELP = """Run a program on every host of an accelerator slice, and print the leader's output.

\b
  kinetic run [OPTIONS] SCRIPT [ARGS]...     a file, like python SCRIPT
  kinetic run [OPTIONS] -m MODULE [ARGS]...  a module, like python -m MODULE
  kinetic run [OPTIONS] -- CMD [ARGS]...     any command

The project that contains the script (or the current folder) is sent with the job, without the files
listed in .gitignore and .kineticignore. The exit code is that of the program on the host that
failed first. Ctrl-C leaves the job running and prints the command to stop it.

\b
Examples:
  kinetic run -a tpu-v6e-16 train.py --epochs 3
  kinetic run -a cpu:4 --env SEED=1 --secret HF_TOKEN -m mypackage.train
  kinetic run -a tpu-v6e-8 --all-hosts -- hostname
  kinetic run --session dev train.py      on slices of `kinetic session start`
  id=$(kinetic run -a gpu-l4 --detach train.py); kinetic jobs logs -f "$id"
"""

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kinetic._client.handle import JobHandle
    from kinetic._client.plan_view import PlanView
    from kinetic._core.outcome import Outcome

F = TypeVar("F", bound=Callable[..., Any])
_MOST_FILES = 20


class _RunCommand(click.Command):
    """A command whose options end at the program: all later words belong to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split off the program and its arguments, so that click does not parse them as options."""
        options = [param for param in self.params if isinstance(param, click.Option)]
        with_values = {name for option in options if not option.is_flag for name in option.opts}
        words, program = programs.split(args, with_values)
        ctx.meta["kinetic.program"] = program
        programs.refuse_late(program, words)
        if _ONE_HOST_FLAG in words:
            words += _ONE_HOST
        return super().parse_args(ctx, list(words))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the program after the options."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] {SCRIPT | -m MODULE | -- CMD} [ARGS]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List common options first, and options for clusters last."""
        rows = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        clusters = [rows.pop(name) for name in _CLUSTER_OPTIONS]
        listed = [*(rows.pop(name) for name in _FIRST), *rows.values()]
        for title, records in (("Options", listed), ("Options for clusters", clusters)):
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, or files for the program and its arguments."""
        from click.shell_completion import CompletionItem

        if ctx.meta.get("kinetic.program") is None and incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(incomplete, type="file")]


def table_options(*names: str) -> Callable[[F], F]:
    """Return a decorator that adds the flags of these options of `kinetic.run`. Without names, it
    adds the flags of all options that have one."""

    def add(command: F) -> F:
        for row in reversed(TABLE.values()):
            if row.flag is not None and (row.name in names or not names):
                command = _table_option(row, row.flag)(command)
        return command

    return add


def _table_option(row: Option, flag: Flag) -> Callable[[F], F]:
    collect = _COLLECT.get(flag.takes)

    def check_value(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
        value = value if collect is None else collect(value)
        if value is not None and not ctx.resilient_parsing:
            row.check(flag.names[0], value)
        return value

    is_switch = flag.takes is Takes.SWITCH
    return click.option(
        *flag.names,
        row.name,
        metavar=None if is_switch else flag.metavar,
        type=_TYPES[flag.takes],
        is_flag=is_switch,
        multiple=collect is not None,
        **({} if collect or flag.required else {"default": row.default}),
        callback=check_value,
        shell_complete=complete_with(flag.offers) if flag.offers else None,
        help=f"{row.help} Repeatable." if collect else row.help + _OR_SESSION * flag.required,
    )


_OR_SESSION = " By default that of the session."
_TYPES: dict[Takes, Any] = {
    Takes.TEXT: str,
    Takes.NAMES: str,
    Takes.COUNT: int,
    Takes.SLICES: SLICES,
    Takes.DURATION: DURATION,
    Takes.VARIABLES: ASSIGNMENT,
    Takes.SWITCH: bool,
}
_COLLECT: dict[Takes, Callable[[Any], Any]] = {Takes.VARIABLES: dict, Takes.NAMES: list}
"""Types that collect the values of options that may be given several times."""


@click.command(
    "run",
    cls=_RunCommand,
    help=_HELP,
    short_help="Run a script, a module or a command on an accelerator slice.",
)
@table_options()
@click.option("--detach", "-d", is_flag=True, help="Submit the job, print its ID and exit.")
@click.option(
    "--all-hosts",
    is_flag=True,
    help='Print the output of all hosts, each line with the prefix "[host N] ".',
)
@click.option(
    _ONE_HOST_FLAG,
    is_flag=True,
    expose_value=False,
    help="Run the program on one host without chips, whatever -a is: for programs that allocate "
    "the machines of a Ray cluster themselves, such as those with a JaxTrainer.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the plan and the files that would be sent, largest first. Run nothing.",
)
@click.option(
    "--output",
    "-o",
    "form",
    type=click.Choice(["yaml", "json"]),
    help="With --dry-run: print only the cluster objects, in a format for kubectl.",
)
@json_option
@click.option("--module", "-m", metavar="MODULE", hidden=True, expose_value=False)
@pass_app
@click.pass_context
def run(
    ctx: click.Context,
    app: AppContext,
    /,
    *,
    detach: bool,
    all_hosts: bool,
    dry_run: bool,
    as_json: bool,
    form: str | None,
    **options: Any,
) -> int:
    """Submit the program, then print its output. Return the exit code."""
    if options["accelerator"] is None:
        options |= _slices_of_session(app, ctx, options["session"])
    program = programs.check(ctx.meta["kinetic.program"])
    if program.kind is ProgramKind.COMMAND and options["hang_timeout"] is not None:
        raise UsageError(
            "--hang-timeout works only for Python code: kinetic cannot tell whether a command "
            "makes progress. Use --timeout."
        )
    _check_elastic(options)
    if detach and all_hosts:
        raise UsageError(
            "--all-hosts has no effect with --detach, which prints no output. Remove it, and read "
            "the output with `kinetic jobs logs --follow --all-hosts JOB`."
        )
    if as_json and not dry_run:
        raise UsageError("--json needs --dry-run: without it, the program's output is printed.")
    if form is not None and (as_json or not dry_run):
        raise UsageError(f"-o {form} works only with --dry-run and without --json.")
    function = programs.make_function(program, current_folder())
    if dry_run:
        view = app.plan(function, _arguments(program, options))
        if form is None:
            return _print_plan(view, as_json=as_json)
        return _print_documents(view, form)
    handle = app.submit(function, _arguments(program, options))
    if detach:
        output.line(handle.job_id)
        return exit_codes.OK
    return _follow(handle, program, all_hosts, checks=bool(options["compile_check"]))


def _slices_of_session(app: AppContext, ctx: click.Context, name: str | None) -> dict[str, Any]:
    """Return the accelerator and the number of slices of the session that runs the program.

    Raises:
        UsageError: no option and no setting names a session.
        NotFound: no session has this name.
    """
    if not name:
        from kinetic._config import settings

        name = settings.load().session
    if not name:
        program = ctx.meta["kinetic.program"]
        raise UsageError(programs.explain_missing_accelerator(program))
    held = app.find_session(name).status()
    return {"accelerator": held.accelerator, "slices": held.slices}


def _check_elastic(options: Mapping[str, Any]) -> None:
    """Refuse elastic options that have no effect with a single controller."""
    rules = ("max_failures", "slice_timeout", "start_wait", "on_slice_loss")
    option = next((name for name in rules if options[name] is not None), None)
    if option is not None and options["controller"] == "single":
        raise UsageError(
            f"--{option.replace('_', '-')} has no effect with --controller single, where the "
            "program itself must recover from a lost slice, for example with pathwaysutils' "
            "elastic_retry. Remove the option and configure the program instead."
        )


def _print_plan(view: PlanView, *, as_json: bool) -> int:
    files = [
        (os.fsencode(path).decode(errors="replace"), size_bytes) for path, size_bytes in view.files
    ]
    if as_json:
        named = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in files]
        documents = [dict(document) for document in view.documents]
        output.json_document(
            {
                "plan": view.plan.to_json(),
                "documents": documents,
                "warnings": list(view.warnings),
                "files": named,
            }
        )
        return exit_codes.OK
    output.line(repr(dataclasses.replace(view, files=())))
    if files:
        output.line()
        output.table(
            ("FILE", "SIZE"),
            [(path, text.size(size)) for path, size in files[:_MOST_FILES]],
            right=("SIZE",),
        )
    if len(files) > _MOST_FILES:
        rest = sum(size_bytes for _, size_bytes in files[_MOST_FILES:])
        output.line(
            f"… and {len(files) - _MOST_FILES:,} smaller files ({text.size(rest)}). --json lists "
            "all of them."
        )
    return exit_codes.OK


def _print_documents(view: PlanView, form: str) -> int:
    from kinetic.cli.manifests import Format, format_documents

    for warning in view.warnings:
        output.notice(f"kinetic: {warning}")
    output.line(format_documents(view.documents, Format(form)))
    return exit_codes.OK


def _arguments(program: Program, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `kinetic.run`, made from these command-line options."""
    joins = "program" if program.kind is ProgramKind.COMMAND else "lazy"
    return options | {"name": options["name"] or program.name, "joins_jax": joins}


def _follow(handle: JobHandle[Any], program: Program, all_hosts: bool, *, checks: bool) -> int:
    """Print the output as it arrives, then report the end of the program. Return the exit code."""
    from kinetic._client.result import name_files

    if os.isatty(2):
        output.notice(f"{handle.job_id}: {program.name}")
    try:
        _print_output(handle, all_hosts)
        outcome = handle.outcome() or handle.wait()
    except KeyboardInterrupt:
        output.notice(
            f"\n{handle.job_id} keeps running. To follow it again: kinetic jobs logs -f "
            f"{handle.job_id}\n"
            f"To stop it: kinetic jobs cancel {handle.job_id}"
        )
        return exit_codes.INTERRUPTED
    try:
        return exit_codes.OK if outcome.ok else _report_failure(handle, outcome, program, all_hosts)
    finally:
        name_files(handle.job_id, [outcome])
        if checks:
            _print_compile_report(handle)


def _print_compile_report(handle: JobHandle[Any]) -> None:
    try:
        report = handle.compile_report()
    except KineticError as error:
        output.error(f"compile-check: {error}")
    except KeyboardInterrupt:
        pass  # The handle has already printed how to continue.
    else:
        output.notice(report.text(output.width()))


def _print_output(handle: JobHandle[Any], all_hosts: bool) -> None:
    from kinetic._backends.base import LogRequest
    from kinetic._client.board.line_prefix import Prefixer

    request = LogRequest(hosts=None if all_hosts else (0,), follow=True, failures=False)
    chunks = handle.chunks(request, output.notice)
    try:
        output.copy_output(chunks, Prefixer(hosts=all_hosts), Prefixer(hosts=all_hosts))
    except BrokenPipeError:  # The reader closed the pipe (`| head`); still return the exit code.
        output.silence_stdout()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        output.silence_stdout()
        output.notice(
            "kinetic: The disk that the output is written to is full. See the output with `kinetic "
            f"jobs logs {handle.job_id}`."
        )


def _report_failure(
    handle: JobHandle[Any], outcome: Outcome, program: Program, all_hosts: bool
) -> int:
    from kinetic._core.exits import Exit

    first = outcome.first
    if first is not None and first.exit is Exit.SYS_EXIT:
        # The program has printed the reason, but perhaps on a host whose output was not shown here.
        where = (
            "" if len(outcome.reports) == 1 else f" on host {first.host} of {len(outcome.reports)}"
        )
        was_printed = all_hosts or not first.host
        details = [] if was_printed else _read_last_lines(handle, first.host, outcome)
        details += getattr(handle.error(), "__notes__", ())
        output.error(
            f"{program.name} exited with code {first.exit_code}{where} ({handle.job_id}).",
            "\n".join(details),
        )
    else:
        print_failure(handle, is_printed=True)
    return exit_codes.of_program(outcome)


def _read_last_lines(handle: JobHandle[Any], host: int, outcome: Outcome) -> list[str]:
    """Return the last lines of a host's output, and the command that shows all of it."""
    from kinetic._client.result import read_tail
    from kinetic._core import failure

    last_lines = failure.last_lines(read_tail(handle.chunks, host, outcome.attempt), host)
    return [last_lines, failure.name_logs(handle.job_id, host)] if last_lines else []
