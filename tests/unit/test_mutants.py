"""The mutation check: what it changes, and that its table speaks of what there is."""

import ast

import connector_mutants
from mutants import LEFT_OUT, ROOT, mutants_of, places_of
from mutants_table import CAPACITIES, CAPACITY, EQUIVALENT, TARGETS

TEXT = '''
@decorated(frozen=True)
def one(a: int = 7, *, b: bool = True) -> tuple[int, 3]:
    """Text 5."""
    if not a < 3 and b is not None or a in (1.5, "x"):
        raise ValueError(f"{a + 1} is wrong")
    a += max(a << 2, -a)
    return a // 6
'''


def all_of(text: str) -> list[str]:
    numbers = range(len(places_of(ast.parse(text))))
    return [mutant.change for mutant in mutants_of("one.py", text, numbers)]


def test_operators_constants_and_nothing_else_are_changed() -> None:
    changes = all_of(TEXT)
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
    assert LEFT_OUT == ("annotation", "returns", "decorator_list")


def test_a_mutant_differs_in_one_place_and_the_next_one_starts_from_the_original() -> None:
    original = ast.unparse(ast.parse(TEXT)).splitlines()
    for mutant in mutants_of("one.py", TEXT, range(18)):
        lines = mutant.of(TEXT).splitlines()
        assert len(lines) == len(original)
        assert sum(one != other for one, other in zip(original, lines, strict=True)) == 1


def test_what_is_said_to_be_equivalent_is_there() -> None:
    places: set[tuple[str, str, str]] = set()
    for path in {path for target in TARGETS.values() for path in target.files}:
        text = (ROOT / path).read_text()
        numbers = range(len(places_of(ast.parse(text))))
        places |= {(path, one.before, one.change) for one in mutants_of(path, text, numbers)}
    assert set(EQUIVALENT) <= places, set(EQUIVALENT) - places
    lines = {(path, line.partition(" = ")[0]) for path, line, _ in places}
    named = {(path, name) for path, names in CAPACITIES.items() for name in names}
    assert named <= lines, named - lines


def test_a_capacity_is_a_number_that_a_name_is_given_to_and_nothing_else() -> None:
    path = next(path for path, names in CAPACITIES.items() if "MAX_IDS" in names)
    for text, reasons in (
        ("MAX_IDS = 1 << 13", {"1 -> 2": CAPACITY, "13 -> 14": CAPACITY}),
        ("MOST_IDS = 13", {}),
        ("wait(MAX_IDS, 13)", {}),
    ):
        found = mutants_of(path, text, range(len(places_of(ast.parse(text)))))
        assert {one.change: one.reason for one in found if one.reason} == reasons


def test_the_tests_of_every_target_are_there() -> None:
    for target in TARGETS.values():
        assert [test for test in target.tests if not (ROOT / test).is_file()] == []


def test_the_connectors_defects_can_be_put_where_they_were() -> None:
    for defect in connector_mutants.MUTANTS:
        text = (ROOT / connector_mutants.NIXL / defect.file).read_text()
        assert text.count(defect.old) == 1, defect.name
