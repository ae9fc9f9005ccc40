"""``distman completion``: the script by which bash, zsh or fish completes this command, made from its parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from distman._cli.parser import CommandParser, commands, make_parser, options

_PATHS = ("FILE", "DIR")
"""What stands for a path in help texts: such values are completed as files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman completion SHELL"
    parser.description = (
        "Print the script by which a shell completes this command, its options and their values. For this shell only: "
        'eval "$(distman completion bash)", the same with zsh, or distman completion fish | source.'
    )
    parser.add_argument("shell", choices=list(_WRITERS), metavar="SHELL", help=", ".join(_WRITERS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print("\n".join(_WRITERS[arguments.shell](list(commands(make_parser())))))
    return 0


_Commands = Sequence[tuple[str, str, CommandParser]]


def _bash(every: _Commands) -> Iterator[str]:
    yield "_distman() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} options='' valued='' i"
    yield "    COMPREPLY=()"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f"        options={shlex.quote(' '.join(['help', *(name for name, _, _ in every), *_TOP]))}"
    yield "    fi"
    yield '    [ "$before" != = ] || before=${COMP_WORDS[COMP_CWORD - 2]}'
    yield '    [ "$word" != = ] || { before=${COMP_WORDS[COMP_CWORD - 1]} word=; }'
    yield '    case "${COMP_WORDS[1]} $before" in'
    yield f"        'help '*) options={shlex.quote(' '.join(name for name, _, _ in every))} ;;"
    for name, _, parser in every:
        for action, _ in options(parser):
            pattern = " | ".join(shlex.quote(f"{name} {flag}") for flag in action.option_strings)
            if action.choices:
                words = shlex.quote(" ".join(map(str, action.choices)))
                yield f'        {pattern}) mapfile -t COMPREPLY < <(compgen -W {words} -- "$word"); return ;;'
            elif _takes_path(action):
                yield f"        {pattern}) return ;;"
            elif action.nargs != 0:
                yield f"        {pattern}) compopt +o default; return ;;"
    yield "    esac"
    yield '    [ "$COMP_CWORD" -eq 1 ] || case ${COMP_WORDS[1]} in'
    for name, _, parser in every:
        flags = [flag for action, _ in options(parser) for flag in action.option_strings]
        valued = [flag for action, _ in options(parser) if action.nargs != 0 for flag in action.option_strings]
        words = shlex.quote(" ".join([*flags, *_words_of(parser)]))
        yield f"        {name}) options={words} valued={shlex.quote(' '.join(['', *valued, '']))} ;;"
    yield "    esac"
    yield "    for ((i = 2; i < COMP_CWORD; i++)); do  # what follows a script is the script's"
    yield "        case ${COMP_WORDS[i]} in"
    yield '            -*) [[ $valued != *" ${COMP_WORDS[i]} "* ]] || ((i += 1)) ;;'
    yield "            = | help) ((i += 1)) ;;"
    yield f"            *) case ${{COMP_WORDS[1]}} in {_with_script(every)}) options='' ;; esac ;;"
    yield "        esac"
    yield "    done"
    yield '    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")'
    yield "}"
    yield "complete -o default -F _distman distman"


def _zsh(every: _Commands) -> Iterator[str]:
    yield "#compdef distman"
    yield "_distman() {"
    yield "    local context state state_descr line"
    yield "    typeset -A opt_args"
    yield "    _arguments -C '(- *)'{-h,--help}'[say what it does]' '(- *)'{-V,--version}'[say which version it is]' \\"
    yield "        '1: :->command' '*:: :->rest'"
    yield "    case $state in"
    yield "        command)"
    yield "            local -a every=("
    for name, summary, _ in every:
        yield f"                {shlex.quote(f'{name}:{summary}')}"
    yield "                'help:say more of a command'"
    yield "            )"
    yield "            _describe command every ;;"
    yield "        rest)"
    yield "            case $line[1] in"
    for name, _, parser in every:
        yield f"                {name})"
        yield "                    _arguments \\"
        for action, text in options(parser):
            yield from (f"                        {spec} \\" for spec in _zsh_options(action, text))
        yield f"                        {_zsh_rest(parser)} ;;"
    yield f"                help) _values command {' '.join(name for name, _, _ in every)} ;;"
    yield "            esac ;;"
    yield "    esac"
    yield "}"
    yield 'if [ "$funcstack[1]" = _distman ]; then _distman "$@"; else compdef _distman distman; fi'


def _zsh_options(action: argparse.Action, text: str) -> Iterator[str]:
    escaped = text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = ""
    if action.nargs != 0:
        name = str(action.metavar or action.dest).lower()
        value = f":{name}:({' '.join(map(str, action.choices))})" if action.choices else f":{name}:"
        value += "_files" if _takes_path(action) else ""
    for flag in action.option_strings:
        sign = "=" if value and flag.startswith("--") else ""
        yield shlex.quote(f"{flag}{sign}[{escaped}]{value}")


def _zsh_rest(parser: CommandParser) -> str:
    words = _words_of(parser)
    if words:
        return f"'1:word:({' '.join(words)})'"
    return "'*::script:_files'" if _has_script(parser) else ""


def _fish(every: _Commands) -> Iterator[str]:
    yield "complete -c distman -f -n __fish_use_subcommand -s h -l help -d 'say what it does'"
    yield "complete -c distman -f -n __fish_use_subcommand -s V -l version -d 'say which version it is'"
    yield "complete -c distman -f -n __fish_use_subcommand -a help -d 'say more of a command'"
    names = " ".join(name for name, _, _ in every)
    yield f"complete -c distman -f -n '__fish_seen_subcommand_from help' -a '{names}'"
    for name, summary, parser in every:
        yield f"complete -c distman -f -n __fish_use_subcommand -a {name} -d {_fish_quoted(summary)}"
        start = f"complete -c distman -n '__fish_seen_subcommand_from {name}'"
        if not _has_script(parser):
            yield f"{start} -f -a {_fish_quoted(' '.join(_words_of(parser)))}"
        for action, text in options(parser):
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings
            )
            value = ""
            if action.choices:
                value = f" -x -a {_fish_quoted(' '.join(map(str, action.choices)))}"
            elif action.nargs != 0:
                value = " -r -F" if _takes_path(action) else " -x"
            yield f"{start} {flags}{value} -d {_fish_quoted(text)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _takes_path(action: argparse.Action) -> bool:
    return action.metavar in _PATHS


def _words_of(parser: CommandParser) -> list[str]:
    """Return the words that a command takes beside options."""
    return [str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()]


def _has_script(parser: CommandParser) -> bool:
    return any(action.nargs == argparse.REMAINDER for action in parser._actions)


def _with_script(every: _Commands) -> str:
    return " | ".join(name for name, _, parser in every if _has_script(parser))


_TOP = ("-h", "--help", "-V", "--version")
_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
