"""Each command in a document is true of what it calls: targets and variables of the Makefile, the
parsers of `vllm-commext`, toggles and connector settings."""

import functools
import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

from tests.unit.docs.documents import ROOT, Command, commands, documents, name_of
from vllm_commext.cli import main
from vllm_commext.nixl.config import KNOWN_KEYS
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.settings import PREFIX, TOGGLES

# Variables of other programs that the documents set.
FOREIGN = {
    *("CUDA_VISIBLE_DEVICES", "OTEL_EXPORTER_OTLP_ENDPOINT", "PYTHONPATH", "VLLM_HOST_IP"),
    *("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "UCX_TLS"),
    *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
NAMED_VARIABLE = re.compile(r"\bVLLM_COMMEXT\w*|\bCOMMEXT_\w+")
INLINE_MAKE = re.compile(r"`make ([a-z][a-z-]*)")
INLINE_COMMEXT = re.compile(r"`vllm-commext ([a-z]+)")
ALL = [command for path in documents() for command in commands(path)]
CURRENT = [path for path in documents() if path.name != "CHANGELOG.md"]


def called(command: Command) -> str:
    folder = command.place.rpartition("/")[0]
    return " ".join(command.words).replace("./run.sh", f"{folder}/run.sh")


def assert_targets_and_variables_in_the_makefile(command: Command) -> None:
    if command.words[0] != "make":
        return
    variables = {word.partition("=")[0] for word in command.words[1:] if "=" in word}
    assert {word for word in command.words[1:] if "=" not in word and word != "/"} <= TARGETS
    assert variables <= set(re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE))


def assert_our_own_parse(command: Command) -> None:
    words = list(takewhile("--".__ne__, command.words))  # the rest is vLLM's
    if words[0] == "vllm-commext":
        main._build_parser(main.COMMANDS).parse_args(words[1:])


def assert_variables_exist(command: Command) -> None:
    choices = {toggle.name: toggle.choices for toggle in TOGGLES}
    script = ROOT / called(command).split()[0]
    text = script.read_text() if script.suffix == ".sh" else ""
    for name, value in command.environment.items():
        if name.startswith(PREFIX):
            assert value in choices.get(name, ()), f"{name}={value}: expected {choices.get(name)}"
        else:
            is_known = name in FOREIGN or name in named_in_code()
            assert is_known or re.search(rf"\b{name}\b", text), f"{name} is read nowhere"


def assert_configuration_is_taken(command: Command) -> None:
    words = list(command.words)
    if "--kv-transfer-config" not in words:
        return
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] in (CONNECTOR_NAME, "NixlConnector")
    assert given["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    assert set(given.get("kv_connector_extra_config", {})) <= set(KNOWN_KEYS)


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_a_command_is_true_of_what_it_calls(command: Command) -> None:
    assert_targets_and_variables_in_the_makefile(command)
    assert_our_own_parse(command)
    assert_variables_exist(command)
    assert_configuration_is_taken(command)


@functools.cache
def named_in_code() -> set[str]:
    """Every COMMEXT_ variable in the package's, the tests' and the tools' text."""
    tops = ("vllm_commext", "tests", "tools")
    files = {path for top in tops for path in (ROOT / top).rglob("*.py")} - {Path(__file__)}
    texts = [path.read_text(encoding="utf-8") for path in files]
    return {name for text in texts for name in re.findall(r"\"(COMMEXT_\w+)\"", text)}


@pytest.mark.parametrize("path", CURRENT, ids=name_of)
def test_variables_targets_and_commands_in_the_prose_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {toggle.name for toggle in TOGGLES} | named_in_code() | {"COMMEXT_NIXL_SECRET"}
    named = {name for name in NAMED_VARIABLE.findall(text) if not name.endswith("_")}
    assert named - known == set()
    assert set(INLINE_MAKE.findall(text)) <= TARGETS
    assert set(INLINE_COMMEXT.findall(text)) <= set(main.COMMANDS)
