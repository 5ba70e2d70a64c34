"""The command ``vllm-commext``: a table of command modules, imported when they are named.

A command module has ``HELP``, ``add_arguments(parser)`` and ``run(args)``; the last returns the
exit status. It may have an ``EPILOG``, an example that stands under its help.
"""

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from vllm_commext import __version__
from vllm_commext.errors import CommextError

PROGRAM = "vllm-commext"
SERVE = "serve"
"""Hands what comes after ``--`` on: argparse would not take it behind options."""
COMMANDS: tuple[str, ...] = (SERVE, "doctor", "proxy", "drain", "tune", "bench")
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def _load(command: str) -> ModuleType:
    return importlib.import_module(f"vllm_commext.cli.{command}")


_REWORDED = (
    (re.compile(r"^argument "), ""),
    (re.compile(r"invalid int value: (.*)"), r"expected a whole number, got \1"),
    (re.compile(r"invalid float value: (.*)"), r"expected a number, got \1"),
    (re.compile(r"invalid choice: (.*) \(choose from (.*)\)"), r"expected one of \2, got \1"),
    (re.compile(r"one of the arguments (\S+) (\S+) is required"), r"expected \1 or \2, got none"),
    (re.compile(r"expected one argument"), "expected a value behind it, got none"),
)


class _Parser(argparse.ArgumentParser):
    """Says one sentence about an error, and no usage. Options are typed in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        for pattern, text in _REWORDED:
            message = pattern.sub(text, message)
        self.exit(EXIT_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: str) -> NoReturn:
        known = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        after = ", or one of vllm serve after ' -- '" if " -- " in (self.epilog or "") else ""
        meant = f", such as {known[0]}" if known else after
        got = "an unknown one" if unknown.startswith("-") else "a value without its option"
        self.error(f"{unknown}: expected an option of this command{meant}, got {got}")


def _build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=f"Serve a model with several vLLM engines. Options: {PROGRAM} COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        module = _load(command)
        subparser = choices.add_parser(
            command,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=getattr(module, "EPILOG", ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, or 2 for an error that it tells of."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _build_parser(COMMANDS).print_help()
        return EXIT_ERROR
    named = [arguments[0]] if arguments[0] in COMMANDS else list(COMMANDS)
    starts = arguments[0] in (SERVE, "bench")
    at = arguments.index("--") if starts and "--" in arguments else len(arguments)
    args, unknown = _build_parser(named).parse_known_args(arguments[:at])
    if unknown:
        args.parser.refuse(unknown[0])
    args.engine_args = arguments[at + 1 :]
    try:
        return args.run(args)
    except CommextError as error:
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
