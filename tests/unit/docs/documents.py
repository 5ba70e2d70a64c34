"""The documents for a reader, and the shell commands in them: indented by four spaces or fenced."""

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
    """One command as a reader would paste it."""

    place: str  # document and line
    environment: dict[str, str]
    words: tuple[str, ...]


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return sorted([*found, *ROOT.glob("csrc/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Each block's lines with their numbers, without its indentation."""
    block: list[tuple[int, str]] = []
    fenced, before = False, ""
    for number, line in enumerate([*text.splitlines(), "."], 1):
        is_fence = FENCE.match(line.strip()) is not None
        is_indented = line.startswith("    ") and line.strip() and (block or not before.strip())
        if fenced and not is_fence:
            block.append((number, line))
        elif is_indented and not is_fence:
            block.append((number, line[4:]))
        elif block and line.strip():
            yield block
            block = []
        fenced ^= is_fence
        before = line


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
    try:
        words = shlex.split(REMARK.sub("", re.sub(r"(^|\s)#.*$", "", line)).strip())
    except ValueError:  # an apostrophe in something that a program printed
        return None
    environment: dict[str, str] = {}
    while words and (match := ASSIGNMENT.match(words[0])):
        environment[match[1]] = words.pop(0)[match.end() :]
    if not words or words[0] not in PROGRAMS:
        return None
    return Command(place, environment, tuple(words))


def commands(path: Path) -> Iterator[Command]:
    for block in blocks(path.read_text(encoding="utf-8")):
        for number, line in joined(block):
            command = parse(f"{name_of(path)}:{number}", line)
            if command is not None and not any("+--" in text for _, text in block):
                yield command
