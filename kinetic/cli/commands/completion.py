"""`kinetic completion`: a script for each shell, and the answers to its questions.

In: the name of a shell; a command line up to the cursor. Out: the script that the shell loads;
lines that the script reads: kind, word and meaning, separated by tabs.

click computes the completions. Only the scripts and the format of the answers are our own: with
click's scripts bash completes nothing after a colon or an equals sign (3 of the 13 lines that
tests/system/test_completion.py types), zsh replaces the whole of `--state=fa`, and fish cuts
meanings at the first comma and loses the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from kinetic._client.board import text
from kinetic.cli import output

_HELP = """Print a script that makes a shell complete `kinetic` commands: options, ids of jobs,
accelerators and profiles.

\b
To switch it on permanently:
  bash   kinetic completion bash >> ~/.bashrc
  zsh    kinetic completion zsh > "${fpath[1]}/_kinetic"
  fish   kinetic completion fish > ~/.config/fish/completions/kinetic.fish

\b
Example, for this shell only:
  source <(kinetic completion bash)
"""
_ASSIGNMENT = re.compile(r"\w+=")
_BASH = r"""_kinetic() {
    local line=${COMP_LINE:0:COMP_POINT} before kind word
    # bash splits words at : and =, and replaces only the last part
    before=${line##*[[:space:]]}
    before=${before%"$2"}
    COMPREPLY=()
    while IFS=$'\t' read -r kind word _; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            *) COMPREPLY+=("${word#"$before"}") ;;
        esac
    done < <("$1" completion bash --line="$line" 2>/dev/null)
}
complete -o nosort -F _kinetic kinetic
"""
_ZSH = r"""#compdef kinetic
_kinetic() {
    local answer kind word meaning line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a bare described
    for answer in ${(f)"$(kinetic completion zsh --line="$line" 2>/dev/null)"}; do
        IFS=$'\t' read -r kind word meaning <<< "$answer"
        if [[ $kind == (file|dir) ]]; then
            [[ $PREFIX == -*=* ]] && compset -P '*='
            if [[ $kind == dir ]]; then _files -/; else _files; fi
            return
        elif [[ -n $meaning ]]; then
            described+=("${word//:/\\:}:$meaning")
        else
            bare+=("$word")
        fi
    done
    (( $#described )) && _describe -V kinetic described
    (( $#bare )) && compadd -V kinetic -a bare
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _kinetic "$@"
else
    compdef _kinetic kinetic
fi
"""
_FISH = r"""function __kinetic_complete
    for answer in (kinetic completion fish --line=(commandline -cp | string collect) 2>/dev/null)
        set -l part (string split \t -- $answer)
        switch $part[1]
            case file
                __fish_complete_path (commandline -ct)
            case dir
                __fish_complete_directories (commandline -ct)
            case '*'
                printf '%s\t%s\n' $part[2] "$part[3]"
        end
    end
end
complete --command kinetic --no-files --keep-order --arguments '(__kinetic_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@click.command(
    "completion", help=_HELP, short_help="Print a script for shell completion of `kinetic`."
)
@click.argument("shell", metavar="{bash|zsh|fish}", type=click.Choice(tuple(_SCRIPTS)))
@click.option(
    "--line",
    hidden=True,
    help="Used by the script: print completions for the end of this line.",
)
@click.pass_context
def completion(ctx: click.Context, /, *, shell: str, line: str | None) -> None:
    """Print the script, or completions for it."""
    if line is None:
        return output.line(_SCRIPTS[shell].rstrip())
    for answer in list_answers(ctx.find_root().command, line):
        output.line(answer)
    return None


def list_answers(root: click.Command, line: str) -> Iterator[str]:
    """Yield completions for the end of the line; nothing if the line is already wrong."""
    from click.exceptions import ClickException
    from click.shell_completion import ShellComplete

    args, prefix = _split_line(line)
    option = f"{prefix.partition('=')[0]}=" if prefix.startswith("-") and "=" in prefix else ""
    try:
        items = ShellComplete(root, {}, "kinetic", "").get_completions(args, prefix)
    except ClickException:
        return
    for item in items:
        word = (
            item.value
            if item.type != "plain" or item.value.startswith(option)
            else f"{option}{item.value}"
        )
        yield f"{item.type}\t{word}\t{text.printable(item.help or '')}"


def _split_line(line: str) -> tuple[list[str], str]:
    """Split the line into the complete words after the command's name, and the one being typed."""
    from click.shell_completion import split_arg_string

    words = split_arg_string(line)
    prefix = words.pop() if words and not line[-1:].isspace() else ""
    while words and _ASSIGNMENT.match(words[0]):  # NAME=value kinetic …
        del words[0]
    return words[1:], prefix
