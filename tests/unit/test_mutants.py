"""The mutation check changes operators and constants, one at a time, in files that are there."""

import ast

from mutants import TARGETS, matching, mutants_of, places_of

TEXT = '''
BOUND = 5
@decorated(frozen=True)
def one(a: int = 7, *, b: bool = True) -> tuple[int, 3]:
    """Text 5."""
    if not a < 3 and b is not None or a in (1.5, "x"):
        raise ValueError(f"{a + 1} is wrong")
    a += max(a << 2, -a)
    return a // 6
'''


def test_operators_constants_and_nothing_else_are_changed() -> None:
    numbers = range(len(places_of(ast.parse(TEXT))))
    changes = [mutant.change for mutant in mutants_of("one.py", TEXT, numbers)]
    for change in (
        "a < 3 -> a <= 3",
        "a < 3 -> a >= 3",
        "3 -> 4",
        "not a < 3 -> not not a < 3",
        "b is not None -> b is None",
        "a in (1.5, 'x') -> a not in (1.5, 'x')",
        "1.5 -> 2.5",
        "a += max(a << 2, -a) -> a -= max(a << 2, -a)",
        "max(a << 2, -a) -> min(a << 2, -a)",
        "a << 2 -> a >> 2",
        "-a -> +a",
        "a // 6 -> a * 6",
        "7 -> 8",
        "True -> False",
    ):
        assert changes.count(change) == 1, change
    assert len(changes) == len(set(changes)) == 18


def test_a_mutant_differs_in_one_place_and_the_next_one_starts_from_the_original() -> None:
    original = ast.unparse(ast.parse(TEXT)).splitlines()
    for mutant in mutants_of("one.py", TEXT, range(18)):
        lines = mutant.of(TEXT).splitlines()
        assert len(lines) == len(original)
        assert sum(one != other for one, other in zip(original, lines, strict=True)) == 1


def test_the_files_and_tests_of_every_target_are_there() -> None:
    for files, tests in TARGETS.values():
        assert matching(files)
        assert matching(tests, "tests/unit/")
