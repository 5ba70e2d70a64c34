"""Every command in the documents is run by a named test, or named here as not run, with the reason.

Beyond that each is held against what it calls: targets and variables of the Makefile, the real
parsers of `vllm-commext`, the options in a script's source, toggles and connector settings.
"""

import argparse
import ast
import functools
import json
import os
import re
from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo
from tests.unit.docs.document_commands import ROOT, Command, commands, documents
from vllm_commext.cli import main
from vllm_commext.nixl.config import KNOWN_KEYS
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.settings import PREFIX, TOGGLES

NOT_RUN = "not run: "
GPUS = f"{NOT_RUN}needs GPUs"
MEASURES = f"{NOT_RUN}it measures; its results are in benchmarks/results"
DEMO = "tests/cpu/test_demo.py"
# The first pattern that fits a command (without the variables before it) says what covers it.
COVERAGE: tuple[tuple[str, str], ...] = (
    (r"make demo MODEL=llama$", f"{DEMO}::test_all_claims_hold"),
    (
        r"make demo$",
        f"{DEMO}::test_a_pretrained_model_answers_questions_and_reads_a_long_file",
    ),
    (r"make (test|unit / contract / cpu)$", ".ci/run"),
    (r"make long$", f"{DEMO}::test_a_hybrid_model_with_fewer_groups_than_decode_ranks"),
    (r"make chaos / fuzz$", "tests/chaos/test_fuzz.py"),
    (r"make attack$", "tests/unit/proxy/test_attacks.py"),
    (r"make mutants$", "tests/unit/test_mutants.py"),
    (r"make stress-shm / sanitize$", "tests/unit/shm/test_stress.py::test_in_short"),
    (r"make canary$", "tests/unit/test_sources.py::test_the_canary_says_what_a_vllm_costs"),
    (r"make matrix$", "tests/contract/test_api_matrix.py::test_text_and_import_agree"),
    (r"make nightly$", f"{NOT_RUN}hours: the targets that it names, each of them below or above"),
    (r"make test-matrix$", f"{NOT_RUN}makes an environment of each vLLM, some GB"),
    (r"make pythons$", f"{NOT_RUN}makes an environment of each Python, some GB"),
    (r"make wheels$", "tests/unit/test_build.py::test_two_sdists_are_the_same_to_the_byte"),
    (r"vllm-commext doctor$", "tests/unit/test_doctor_summary.py::test_the_verdict_comes_first"),
    (
        r"vllm-commext doctor --verbose$",
        "tests/unit/test_doctor.py::test_the_table_has_the_same_lines_as_the_json",
    ),
    (
        r"vllm-commext doctor --json$",
        "tests/contract/test_doctor.py::test_the_report_covers_vllm_its_apis_and_nixl",
    ),
    (r"vllm-commext doctor --(peer|listen) ", "tests/cpu/test_peer.py::test_all_is_well"),
    (
        r"vllm-commext proxy ",
        "tests/unit/proxy/test_proxy_process.py::"
        "test_sigterm_lets_a_running_stream_end_and_refuses_new_connections",
    ),
    (r"vllm-commext drain ", "tests/unit/test_drain.py"),
    (r"vllm-commext tune ", GPUS),
    (
        r"vllm-commext bench ",
        "tests/unit/bench/test_bench_command.py::test_the_table_ends_with_a_verdict",
    ),
    (
        r"vllm serve .*(CommextNixlConnector)",
        "tests/cpu/test_topologies.py::test_answers_are_the_decode_engines_own",
    ),
    (r"vllm serve .*\"NixlConnector\"", "tests/cpu/test_defects.py"),
    (
        r"vllm serve \.\.\. --tensor-parallel-size 2$",
        "tests/cpu/test_shm_queue.py::test_the_tokens_are_those_of_vllms_queue",
    ),
    (
        r"pip install ",
        "tests/unit/test_build.py::test_with_a_compiler_it_is_built_for_the_limited_api",
    ),
    (r"openssl rand ", f"{NOT_RUN}openssl's own; tests/unit/nixl/test_seal.py reads such a file"),
    (r"sudo ip6?tables ", f"{NOT_RUN}changes this host's firewall"),
    (r"export ", f"{NOT_RUN}the shell's own"),
    (r"python -m pytest tests/gpu", GPUS),
    (r"pytest tests/unit/shm/test_defects.py", "tests/unit/shm/test_defects.py"),
    (r"(make bench$|python benchmarks/)", MEASURES),
    (r"python -m tests.kit.tiny_model ", "tests/unit/test_tiny_model.py"),
    (r"examples/(cpu_demo|hybrid_hetero_tp)/run.sh", DEMO),
    (r"docker build ", "tests/unit/test_deploy.py"),
    (r"docker (tag|push) ", f"{NOT_RUN}needs a registry"),
    (r"docker run ", f"{NOT_RUN}needs a Docker daemon; the same command without an image is above"),
    (r"kubectl apply ", "tests/unit/test_deploy.py::test_a_manifest_fits_the_schema_of_kubernetes"),
    (r"(kubectl|curl) ", f"{NOT_RUN}needs a cluster"),
    (
        r"examples/1p1d/run.sh ",
        "tests/cpu/test_examples.py::test_one_prefill_and_one_decode_engine",
    ),
    (
        r"examples/multinode/run.sh ",
        "tests/cpu/test_examples.py::test_two_namespaces_stand_for_two_hosts",
    ),
    (
        r"(apt-get install prometheus|examples/dashboard/run.sh)",
        f"{NOT_RUN}needs Prometheus; run by hand, see expected_output.txt",
    ),
    (r"examples/xpyd/run.sh ", f"{NOT_RUN}six servers; run by hand, see expected_output.txt"),
)
# Variables of other programs that the documents set.
FOREIGN = {
    *("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "VLLM_HOST_IP"),
    *("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "UCX_TLS"),
}
SIDE_CHANNEL = {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
NAMED_VARIABLE = re.compile(r"\bVLLM_COMMEXT\w*|\bCOMMEXT_\w+")
RUN = re.compile(r"results/(\w+\.md)#([\w.-]+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
INLINE_MAKE = re.compile(r"`make ([a-z][a-z-]*)")
INLINE_COMMEXT = re.compile(r"`vllm-commext ([a-z]+)")
ALL = [command for path in documents() for command in commands(path)]


def called(command: Command) -> str:
    """The command's text from the program on, with the path of an example's script."""
    text = " ".join(command.words)
    folder = command.place.rpartition("/")[0]
    return text.replace("./run.sh", f"{folder}/run.sh")


def coverage(command: Command) -> str:
    """The test or the reason; empty where the table has neither."""
    text = called(command)
    return next((what for pattern, what in COVERAGE if re.match(pattern, text)), "")


def assert_run_by_a_test_or_named_as_not_run(command: Command) -> None:
    assert coverage(command), f"{command.text}: add it to COVERAGE, with its test or the reason"


def test_every_row_of_the_table_is_needed() -> None:
    used = [
        next(p for p, _ in COVERAGE if re.match(p, called(command)))
        for command in ALL
        if coverage(command)
    ]
    assert [pattern for pattern, _ in COVERAGE if pattern not in used] == []


@pytest.mark.parametrize("what", sorted({w for _, w in COVERAGE if not w.startswith(NOT_RUN)}))
def test_a_named_test_is_there(what: str) -> None:
    file, _, function = what.partition("::")
    tree = ast.parse((ROOT / file).read_text()) if file.endswith(".py") else None
    assert (ROOT / file).is_file()
    if tree is not None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        assert function in names or (
            not function and any(name.startswith("test_") for name in names)
        )


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def assert_targets_and_variables_in_the_makefile(command: Command) -> None:
    if command.words[0] != "make":
        return
    variables = [word.partition("=")[0] for word in command.words[1:] if "=" in word]
    targets = [word for word in command.words[1:] if "=" not in word and word != "/"]
    assert set(targets) <= make_targets()
    assert set(variables) <= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M))


def parse_with_the_real_parser(words: list[str]) -> argparse.Namespace:
    return main._build_parser(main.COMMANDS).parse_args(words)


def assert_our_own_parse(command: Command) -> None:
    words = list(command.words)
    if words[0] == "vllm-commext":
        parse_with_the_real_parser(words[1:])
    if called(command).startswith(("examples/cpu_demo/", "examples/hybrid_hetero_tp/")):
        demo.parser().parse_args(words[1:])


def assert_scripts_know_their_options(command: Command) -> None:
    words = called(command).split()
    if words[0].endswith(".sh"):
        script = ROOT / words[0]
        assert os.access(script, os.X_OK), f"{script} cannot be executed"
    paths = [word for word in words[1:] if re.match(r"(tests|tools|benchmarks)/", word)]
    for path in paths:
        assert (ROOT / path).exists() or "DATE" in path, f"{path} is not there"
    if words[0] == "python" and words[1].endswith(".py"):
        source = "\n".join(text.read_text() for text in sources_of(ROOT / words[1]))
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, f"{words[1]} has no option {option}"


def sources_of(script: Path) -> list[Path]:
    """A script, the packages beside it, and what it imports of the project."""
    names = re.findall(r"^(?:from|import) ([\w.]+)", script.read_text(), re.MULTILINE)
    files = [name.replace(".", "/") + ".py" for name in names]
    imported = [folder / file for folder in (script.parent, ROOT) for file in files]
    return [script, *script.parent.glob("*/*.py"), *filter(Path.exists, imported)]


def assert_variables_exist(command: Command) -> None:
    choices = {toggle.name: toggle.choices for toggle in TOGGLES}
    script = ROOT / called(command).split()[0]
    text = script.read_text() if script.suffix == ".sh" else ""
    for name, value in command.environment.items():
        if name.startswith(PREFIX):
            assert value in choices.get(name, ()), f"{name}={value}: expected {choices.get(name)}"
        else:
            is_known = name in FOREIGN | SIDE_CHANNEL or name in named_in_code()
            assert is_known or re.search(rf"\b{name}\b", text), f"nobody reads {name}"


def assert_configuration_is_taken(command: Command) -> None:
    words = list(command.words)
    if "--kv-transfer-config" not in words:
        return
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] in (CONNECTOR_NAME, "NixlConnector")
    assert given["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    assert set(given.get("kv_connector_extra_config", {})) <= set(KNOWN_KEYS)


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_a_command_is_covered_and_true_of_what_it_calls(command: Command) -> None:
    assert_run_by_a_test_or_named_as_not_run(command)
    assert_targets_and_variables_in_the_makefile(command)
    assert_our_own_parse(command)
    assert_scripts_know_their_options(command)
    assert_variables_exist(command)
    assert_configuration_is_taken(command)


@functools.cache
def named_in_code() -> set[str]:
    """Every COMMEXT_ variable in the package's, the tests' and the tools' text."""
    files = [
        path for top in ("vllm_commext", "tests", "tools") for path in (ROOT / top).rglob("*.py")
    ]
    here = Path(__file__)
    return {
        name
        for path in files
        if path != here
        for name in re.findall(r"\"(COMMEXT_\w+)\"", path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_links_and_short_commands_in_the_prose(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {toggle.name for toggle in TOGGLES} | named_in_code() | {"COMMEXT_NIXL_SECRET"}
    named = {name for name in NAMED_VARIABLE.findall(text) if not name.endswith("_")}
    assert named - known == set()
    for link in LINK.findall(text):
        assert (path.parent / link).exists(), f"{path.name} links to {link}, which is not there"
    for page, run in RUN.findall(text):
        assert f'<a id="{run}"></a>' in (ROOT / "benchmarks/results" / page).read_text()
    assert set(INLINE_MAKE.findall(text)) <= make_targets()
    assert set(INLINE_COMMEXT.findall(text)) <= set(main.COMMANDS)
