"""Find long sentences in pages: ``python tools/sentences.py README.md``. `make lint` runs this.

Code, addresses of links and marks count no words. A cell or an item ends a sentence.
"""

import re
import sys
from pathlib import Path

MOST_WORDS = 30
CODE = re.compile(r"^```.*?^```$|(?<=\n\n)(?: {4}[^\n]*\n+)+", re.MULTILINE | re.DOTALL)
MARKS = re.compile(r"\]\([^)]*\)|<[^>]+>|[\[\]*]")
# A full stop before a capital or a code, a cell, an item, a heading, an empty line.
END = re.compile(
    r"(?<=[.?!])\)?\s+(?=\(?(?:[A-Z`]|vLLM))|\s\|\s|\n\s*\n|^\s*(?:[-|#]|\d+\.)", re.MULTILINE
)


def long_sentences(page: str) -> list[str]:
    """Sentences of more than `MOST_WORDS` words in a page of Markdown."""
    pieces = END.split(MARKS.sub("", CODE.sub("\n", page)))
    return [
        " ".join(one.split()) for one in pieces if len(re.findall(r"\S*\w\S*", one)) > MOST_WORDS
    ]


def main(paths: list[str]) -> int:
    found = [(path, one) for path in paths for one in long_sentences(Path(path).read_text("utf-8"))]
    for path, sentence in found:
        print(f"{path}: expected at most {MOST_WORDS} words a sentence, got: {sentence}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
