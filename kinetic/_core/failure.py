"""Build the exception that the caller sees from a verdict. Pure.

In: an `Outcome` that is not a success, with the records that explain it. Out: an exception, ready
to be raised.
"""

from __future__ import annotations

import re

from kinetic import errors
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, RemoteError, Verdict, name_hosts, name_of
from kinetic._core.session import KEPT_IS_GONE
from kinetic._core.values import dataclass
from kinetic.errors import JobFailed

_TAIL_LINES = 12
_TRACEBACK_LINES = 60
_STACK_LINES = 40
_DETAIL_CHARS = 2000
_OTHERS, _OTHER_CHARS = 5, 200
_NOT_PREPARED, _NOT_LOADED = (
    "The host could not be prepared: ",
    "The function cannot be unpickled on this host: ",
)
"""Prefixes of a host's detail that are cut off in the headline, which says the same."""
_NOISE = re.compile(
    r'^ *File "(?:[^"]*(?:/kinetic/(?:_host|_system|runner)|/(?:site|dist)-packages|/python3\.\d+)/'
    r'[^"]*|<frozen [^"]*)", line \d+ in .*\n|^Extension modules: .*\n|'
    r"^kinetic: attempt \d+(?: of \d+)? (?:failed|begins).*\n",
    re.MULTILINE,
)
"""Lines of Python's fault handler about frames of the runner and of libraries, which in a crash of
JAX are hundreds, below the line that says why; and what the agent logs between two attempts."""
_IDLE_THREAD = re.compile(r"^Thread 0x\w+ .*\(most recent call first\):\n\n?(?! )", re.MULTILINE)
_FRAME = re.compile(r'^ +(?:File )?("[^"]+"|Cell In\[\d+\]), line (\d+), in (.+)$', re.MULTILINE)
"""A line of a traceback that names a file, or a cell of a notebook."""
_GLOO_TIMEOUT = "Gloo context initialization failed: DEADLINE_EXCEEDED"
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]python3\.\d+[/\\]|<frozen ")
_CONTROL_FLOW = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that would end the caller's process or loop if they were raised again there."""


_NO_CLASS = "its class cannot be unpickled here"


@dataclass(frozen=True)
class Evidence:
    """The facts that explain the failure of a job.

    Attributes:
        job_id: the job.
        name: display name of the job.
        outcome: the outcome with the verdict.
        original: the exception that the blamed host raised, rebuilt in this process; None if it
            raised none or it cannot be rebuilt.
        unreadable: why `original` cannot be rebuilt; "" if its class is the reason.
        tail: the last lines that the blamed host printed, unless the caller has read them.
        stacks: the hosts' stacks, if the gang hung.
    """

    job_id: str
    name: str
    outcome: Outcome
    original: BaseException | None = None
    unreadable: str = ""
    tail: str = ""
    stacks: str = ""


def exception_of(evidence: Evidence) -> BaseException:
    """Return the exception to raise: the function's own if it can be rebuilt, else a `JobFailed`
    that explains the failure."""
    first, original = evidence.outcome.first, evidence.original
    if (
        first is not None
        and first.exit is Exit.RAISED
        and original is not None
        and not isinstance(original, _CONTROL_FLOW)
    ):
        return _add_notes(original, evidence, first)
    failure = _choose_class(evidence.outcome)(
        "\n".join(_build_message(evidence, first)),
        job_id=evidence.job_id,
        hosts=evidence.outcome.blamed,
        remote_traceback=first.error.traceback
        if first is not None and first.error is not None
        else "",
    )
    failure.__cause__ = original
    if original is not None and first is not None and first.exit.kind.has_traceback:
        original.with_traceback(None)
    return failure


def _choose_class(outcome: Outcome) -> type[JobFailed]:
    first = outcome.first
    if outcome.verdict is Verdict.CANCELLED:
        return errors.JobCancelled
    if outcome.supervisor_lost and (first is None or first.exit.kind.hearsay):
        return errors.SupervisorLost
    if first is None:  # Without reports the function never began: a call whose session has ended.
        return errors.ResultUnavailable if outcome.reports else errors.JobFailed
    if outcome.given_up and first.exit in (Exit.REFORMED, Exit.STOPPED):
        return errors.HostLost  # The next attempt could not start without the lost host.
    return first.exit.kind.error


def _add_note(error: BaseException, note: str) -> None:
    """Add a note, even to an exception whose class is a frozen dataclass."""
    vars(error).setdefault("__notes__", []).append(note)


def _add_notes(original: BaseException, evidence: Evidence, first: HostReport) -> BaseException:
    """Add notes to the function's own exception: where it was raised, and how to read more."""
    assert first.error is not None
    where = f"Remote traceback ({_name_host(evidence, first)}, {evidence.job_id})"
    if original.__traceback__ is None and first.error.traceback.startswith("Traceback"):
        trace = _shorten_lines(first.error.traceback.rstrip(), _TRACEBACK_LINES)
        _add_note(original, f"{where}:\n{trace}")
    else:  # The exception has its remote frames, so Python prints them without a note.
        _add_note(original, f"{where}: as above{_describe_site(first.error.traceback)}.")
    if first.error.consequence:
        _add_note(original, _explain_echo(evidence, first.error))
        _cut_to_own(original)
    explanations = (*_name_others(evidence, first), *_name_loss(evidence), *_quote(evidence, first))
    for note in (*explanations, _hint(evidence, first)):
        _add_note(original, note)
    return original


def _explain_echo(evidence: Evidence, error: RemoteError) -> str:
    """Explain a collective that broke although no host failed by itself."""
    ended = [report.host for report in evidence.outcome.reports if report.ok]
    if not ended and _GLOO_TIMEOUT in error.message:
        return (
            "JAX on CPUs waits 30 s for the slowest host when it first connects the hosts for a "
            "collective. No host has ended: the hosts were more than 30 s apart. Is this machine "
            "too busy for so many hosts, or does one of them compile or load for longer?"
        )
    if not ended:
        return (
            "A collective between the hosts failed although no host had ended; the message above "
            f"says why. Output of each host: kinetic jobs logs {evidence.job_id} --all-hosts"
        )
    have, them = ("has", "it") if len(ended) == 1 else ("have", "them")
    return (
        f"{name_hosts(ended)} {have} returned; the other hosts probably waited for {them} in a "
        "collective."
    )


def _cut_to_own(error: BaseException) -> None:
    """End the traceback of a broken collective at the user's own line; logs have all frames."""
    at, last = error.__traceback__, None
    while at is not None:
        last = at if not _LIBRARY.search(at.tb_frame.f_code.co_filename) else last
        at = at.tb_next
    if last is not None:
        last.tb_next = None


def _describe_site(traceback: str) -> str:
    """Return the end of a sentence that names the last line of the user's code in a formatted
    traceback; "" if unknown."""
    frames = _FRAME.findall(traceback)
    if not frames:
        return ""
    file, line, function = next(
        (frame for frame in reversed(frames) if not _LIBRARY.search(frame[0])), frames[-1]
    )
    name = file.strip('"').rpartition("/")[2]
    return f", raised at {name}:{line} in {function}"


def _build_message(evidence: Evidence, first: HostReport | None) -> list[str]:
    lines = [f"{evidence.name} ({evidence.job_id}): {_build_headline(evidence, first)}"]
    if first is None:
        return [*lines, *_name_loss(evidence), f"More: kinetic jobs status {evidence.job_id}"]
    if first.exit.kind.has_traceback and first.error is not None and first.error.traceback:
        title = f"Remote traceback ({_name_host(evidence, first)}):"
        lines += [
            title,
            _indent_lines(_shorten_lines(first.error.traceback.rstrip(), _TRACEBACK_LINES)),
        ]
    if first.exit is Exit.HANG and evidence.stacks:
        lines += [
            "Stacks of the hosts:",
            _indent_lines(_shorten_lines(evidence.stacks.rstrip(), _STACK_LINES)),
        ]
        lines += [f"Full stacks: kinetic jobs stacks {evidence.job_id}"]
    lines += [*_name_others(evidence, first), *_name_loss(evidence), *_quote(evidence, first)]
    return [*lines, _hint(evidence, first)]


def _build_headline(evidence: Evidence, first: HostReport | None) -> str:
    """Return one sentence that says which host failed, and how."""
    outcome = evidence.outcome
    if _choose_class(outcome) is errors.SupervisorLost:
        why = outcome.reason or "the job's supervisor was killed"
        return f"{_punctuate(why)} The job has ended, and any value is lost. Run it again."
    if outcome.given_up:
        return _punctuate(_lower_first(outcome.given_up))
    if first is None:
        return _punctuate(outcome.reason or "the job left no value")
    detail = _cut_detail(first.detail)
    who = _name_host(evidence, first)
    were = "were" if len(_list_alike(evidence, first)) > 1 else "was"
    maybe = "probably " if first.guessed else ""
    sentences = {
        Exit.RAISED: f"{who} raised {_describe_error(first)}"
        f"{'' if evidence.original else f' ({evidence.unreadable or _NO_CLASS})'}.",
        Exit.SYS_EXIT: f"{_lower_first(_describe_exit(first))} on {who}.",
        Exit.OUT_OF_MEMORY: f"{who} {maybe}ran out of memory. {detail} Use a larger machine, or "
        "smaller batches.",
        Exit.AGENT_LOST: f"{who} {were} lost. {_punctuate(detail[:1].upper() + detail[1:])}",
        Exit.EVICTED: f"{who} {were} lost. {_punctuate(detail[:1].upper() + detail[1:])}",
        Exit.SETUP_FAILED: f"{who} could not be prepared: {detail.removeprefix(_NOT_PREPARED)}",
        Exit.UNPICKLE_FAILED: f"{who} could not load the function: "
        f"{detail.removeprefix(_NOT_LOADED)}",
        Exit.RESULT_UNPICKLABLE: "the function returned, but its value cannot be loaded here. "
        f"{detail}",
    }
    if first.exit in (Exit.SIGNAL, Exit.OS_EXIT):
        return f"{who} died. {detail}"
    return sentences.get(first.exit) or _punctuate(outcome.reason or detail or first.exit)


def _lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _describe_exit(first: HostReport) -> str:
    return first.detail.rstrip(".") or f"The function called sys.exit({first.exit_code})"


def _punctuate(text: str) -> str:
    return text if text.rstrip().endswith((".", "!", "?")) else f"{text}."


def _describe_error(first: HostReport) -> str:
    if first.error is None:
        return _cut_detail(first.detail)
    return (
        f"{first.error.type_name}: {_cut_detail(first.error.message)}"
        if first.error.message
        else first.error.type_name
    )


def _list_alike(evidence: Evidence, first: HostReport) -> list[int]:
    """Return the blamed hosts that failed in the same way as the first one."""
    return sorted(
        r.host
        for r in evidence.outcome.reports
        if r.host in evidence.outcome.blamed and r.is_like(first)
    )


def _name_host(evidence: Evidence, first: HostReport) -> str:
    return name_of(_list_alike(evidence, first), len(evidence.outcome.reports))


def _name_others(evidence: Evidence, first: HostReport) -> list[str]:
    """Return a line about the blamed hosts that failed in another way than the first host."""
    alike = _list_alike(evidence, first)
    others = [
        r
        for r in evidence.outcome.reports
        if r.host in evidence.outcome.blamed and r.host not in alike
    ]
    if not others or first.exit.kind.of_the_job:
        return []
    texts = [
        f"host {r.host}: {_shorten((r.detail or r.exit).splitlines()[0]).rstrip('.')}"
        for r in others[:_OTHERS]
    ]
    more = len(others) - len(texts)
    rest = [f"{more} more host{'s' if more > 1 else ''}"] if more else []
    return [f"Also failed: {'; '.join([*texts, *rest])}."]


def _name_loss(evidence: Evidence) -> list[str]:
    return [KEPT_IS_GONE] if evidence.outcome.ends_world else []


def _shorten(line: str) -> str:
    """Shorten a line between two words, or within a very long word."""
    if len(line) <= _OTHER_CHARS:
        return line
    words = line[:_OTHER_CHARS].rpartition(" ")[0]
    return f"{words if len(words) > _OTHER_CHARS // 2 else line[:_OTHER_CHARS]} …"


def _quote(evidence: Evidence, first: HostReport) -> list[str]:
    tail = "" if first.exit.kind.of_the_job else last_lines(evidence.tail, first.host)
    return [tail] if tail else []


def last_lines(printed: str, host: int) -> str:
    """Return the last lines that a host printed, with a title; "" if it printed nothing, except
    frames of the runner and of libraries. A progress bar is one line."""
    text = _IDLE_THREAD.sub("", _NOISE.sub("", printed.rstrip() + "\n")).rstrip()
    lines = [f"  {_read_state(line)[:400]}" for line in text.split("\n")[-_TAIL_LINES:]]
    return "\n".join([f"Last lines of host {host}:", *lines]) if text else ""


def _read_state(line: str) -> str:
    """Return the last state of a line that carriage returns overwrite, as progress bars do. States
    of blanks only do not count: a bar that is cleared, or the end of a line on Windows."""
    return next((state for state in reversed(line.split("\r")) if state.strip()), "")


def _hint(evidence: Evidence, first: HostReport) -> str:
    if first.exit is Exit.NEVER_JOINED:  # Nothing has run, so only the gang's records help.
        return f"More: kinetic jobs status {evidence.job_id}"
    return name_logs(evidence.job_id, first.host)


def name_logs(job_id: str, host: int) -> str:
    """Return a line with the command that prints all output of a host."""
    return f"More: kinetic jobs logs {job_id}" + (f" --host {host}" if host else "")


def _cut_detail(text: str) -> str:
    return (
        text
        if len(text) <= _DETAIL_CHARS
        else f"{text[:_DETAIL_CHARS]}… ({len(text):,} characters)"
    )


def _shorten_lines(text: str, most: int) -> str:
    """Return at most `most` lines of a text, a third of them from its beginning and the others from
    its end, with a line about those left out."""
    lines = [line[:400] for line in text.splitlines()]
    if len(lines) <= most:
        return "\n".join(lines)
    head, tail = most // 3, most - most // 3
    return "\n".join([*lines[:head], f"  … {len(lines) - most} lines left out …", *lines[-tail:]])


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
