"""Hold the budgets of `budgets.toml`: lines, files, words, options, imports, attributes.

`make lint` runs this. Exit status 1 and one sentence for each budget that is exceeded."""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
CODE = {".py", ".c", ".cpp", ".h", ".cu"}
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def lines(folder: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in _code(folder))


def files(folder: str) -> int:
    """Source files of a folder; every file of the results."""
    if folder == "benchmarks/results":
        return sum(path.is_file() for path in (ROOT / folder).rglob("*"))
    return len([path for path in _code(folder) if path.suffix == ".py"])


def words(folders: str) -> int:
    pages = [page for folder in folders.split(", ") for page in (ROOT / folder).rglob("*.md")]
    pages += [ROOT / name for name in PAGES]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def options(part: str) -> int:
    if part == "connector":
        from vllm_commext.nixl.config import KNOWN_KEYS

        return len(KNOWN_KEYS)
    from vllm_commext.cli.proxy import add_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return sum(action.help != argparse.SUPPRESS for action in parser._actions)


def arrows(package: str) -> int:
    return sum(map(len, _imports(package).values()))


def floors(package: str) -> int:
    imports = _imports(package)

    def floor(module: str) -> int:
        return 1 + max(map(floor, imports[module]), default=0)

    return max(map(floor, imports))


def _imports(package: str) -> dict[str, set[str]]:
    graph = grimp.build_graph("vllm_commext", cache_dir=None)
    modules = graph.find_descendants(package)
    return {one: graph.find_modules_directly_imported_by(one) & modules for one in modules}


def attributes(package: str) -> int:
    """Attributes of its widest class, but of those that cannot be written once they are made."""
    return max(len(fields | own) for _, fields, own in _classes(package))


def writers(package: str) -> int:
    """Most files that write one attribute. Its class is found by its name: one of the same file, or
    else the one that fewest write."""
    classes, strangers = _classes(package), dict[str, set[Path]]()
    for path in _code(package.replace(".", "/")):
        near = {name for of, fields, own in classes if of == path for name in fields | own}
        for name in _written(ast.parse(path.read_text()), of_self=False) - near:
            strangers.setdefault(name, set()).add(path)
    most = 0
    for name, files in strangers.items():
        known = [(of, own) for of, fields, own in classes if name in fields | own]
        every = [len(files | ({of} if name in own else set())) for of, own in known]
        most = max(most, min(every, default=0))
    return most


def _classes(package: str) -> list[tuple[Path, set[str], set[str]]]:
    """File of each class, its dataclass fields, and the attributes that its methods write."""
    found: list[tuple[Path, set[str], set[str]]] = []
    for path in _code(package.replace(".", "/")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                made = " ".join(map(ast.unparse, (*node.decorator_list, *node.bases)))
                typed = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                fields = {ast.unparse(one.target) for one in typed}
                if "frozen=True" not in made and "NamedTuple" not in made:
                    found.append((path, fields, _written(node, of_self=True)))
    return found


def _written(code: ast.AST, *, of_self: bool) -> set[str]:
    found = [one for one in ast.walk(code) if isinstance(one, ast.Attribute)]
    found = [one for one in found if isinstance(one.ctx, ast.Store)]
    return {one.attr for one in found if (ast.unparse(one.value) == "self") == of_self}


_COUNTED = lines, files, words, options, arrows, floors, attributes, writers
COUNTS = {one.__name__: one for one in _COUNTED}


def _code(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in CODE]


def main() -> int:
    """Say which budgets are exceeded; 1 if any is."""
    status = 0
    for what, by_folder in tomllib.loads((ROOT / "tools/budgets.toml").read_text()).items():
        for of, budget in by_folder.items():
            if (count := COUNTS[what](of)) > budget:
                status = 1
                print(
                    f"{of} has {count:,} {what}, its budget is {budget:,}: remove "
                    f"{count - budget:,}, or raise the number in tools/budgets.toml and say why",
                    file=sys.stderr,
                )
    return status


if __name__ == "__main__":
    sys.exit(main())
