"""Finds the shell commands in the documents: in blocks, indented by four spaces or fenced."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = (
    *("make", "python", "python3", "pytest", "pip", "vllm", "vllm-commext", "./run.sh", "bash"),
    *("curl", "openssl", "docker", "kubectl", "sudo", "ip", "mkdir", "export"),
)
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
FENCE = re.compile(r"^```(\w*)$")
# What may stand behind a command without a '#': two spaces and a sentence, as in a table.
REMARK = re.compile(r"(?<=\S)\s{2,}(?=[^\s\\-]).*$")


@dataclass(frozen=True)
class Command:
    """One command as a reader would paste it.

    Attributes:
        place: document and line, for messages.
        text: without remark and prompt, lines that go on joined.
        environment: what stands before it, ``NAME=value``.
        words: the program and its arguments.
    """

    place: str
    text: str
    environment: dict[str, str]
    words: tuple[str, ...]


def documents() -> list[Path]:
    """Every document with commands for a reader."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Each block's lines with their numbers, without its indentation."""
    block: list[tuple[int, str]] = []
    fenced, before = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line.strip()):
            fenced = not fenced
            if block:
                yield block
            block = []
        elif fenced:
            block.append((number, line))
        elif line.startswith("    ") and line.strip() and (block or not before.strip()):
            block.append((number, line[4:]))
        elif block and line.strip():
            yield block
            block = []
        before = line
    if block:
        yield block


def joined(block: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines that end in a backslash, with those that they go on in."""
    start, whole = 0, ""
    for number, line in block:
        start, whole = (number, line) if not whole else (start, f"{whole} {line.strip()}")
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip()
            continue
        yield start, whole
        whole = ""


def parse(place: str, line: str) -> Command | None:
    """The command on a line, None where it holds none."""
    text = REMARK.sub("", re.sub(r"(^|\s)#.*$", "", line)).strip()
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in something that a program printed
        return None
    environment: dict[str, str] = {}
    while words and (match := ASSIGNMENT.match(words[0])):
        environment[match[1]] = words.pop(0)[match.end() :]
    if not words or words[0] not in PROGRAMS:
        return None
    return Command(place, text, environment, tuple(words))


def commands(path: Path) -> list[Command]:
    """Every command of a document; a chain by ``&&`` is one."""
    name = path.relative_to(ROOT).as_posix()
    found: list[Command] = []
    for block in blocks(path.read_text(encoding="utf-8")):
        if any("+--" in line for _, line in block):
            continue  # a drawing
        for number, line in joined(block):
            command = parse(f"{name}:{number}", line)
            if command is not None:
                found.append(command)
    return found
