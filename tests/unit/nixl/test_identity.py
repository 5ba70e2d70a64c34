"""Two engines' prompts count as equal exactly where both compute with the same weights and the same
adapter, whatever was loaded, overwritten and evicted before."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.stream_requests import request
from tests.kit.tiny_lora import write_named
from vllm_commext.nixl import identity
from vllm_commext.nixl.identity import Identity, digest_of_weights
from vllm_commext.nixl.reuse import root_of
from vllm_commext.nixl.wire.prompt import digests

CONTENTS = ("x", "yy", "zzz")
METHODS = ("update_weights", "finish_weight_update")
FILES = (["x", "x"], ["x", "y"], ["x", ""], ["", ""])  # that two engines started with


def lora_of(name: str, path: Path | str, *, in_place: bool = False, number: int = 1) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=in_place
    )


def told(files: str = "") -> Identity:
    made = Identity(files=files)
    made.adapters.is_told = True
    return made


def load(engine: Identity, lora: Any) -> None:
    """As an engine's workers load an adapter."""
    settle = engine.adapters.begin_load(lora)
    if settle is not None:
        settle()


def digests_of(engine: Identity, lora: Any, **changes: Any) -> dict[str, str]:
    return digests(engine.prompt_of(request("r", "", 8, lora_request=lora, **changes)), 8)


@dataclass
class World:
    """One engine, and what its workers really compute with.

    Attributes:
        on_disk: content of the adapter's files.
        loaded: content of the adapter that the workers have.
        weights: changes since the start.
        is_changed: the files are not those that were loaded.
    """

    folder: Path
    engine: Identity = field(default_factory=told)
    on_disk: str = ""
    loaded: str = ""
    weights: list[str] = field(default_factory=list[str])
    is_changed: bool = False

    def write(self, content: str) -> None:
        self.is_changed = content != self.on_disk or self.is_changed
        if content != self.on_disk:
            self.on_disk = content
            write_named(self.folder, content)

    def load(self) -> None:
        load(self.engine, lora_of("a", self.folder, in_place=True))
        self.loaded, self.is_changed = self.on_disk, False

    def evict(self) -> None:
        """The workers load the adapter again with its next request."""
        self.loaded = self.on_disk

    def touch(self) -> None:
        load(self.engine, lora_of("a", self.folder))

    def change(self, method: str) -> None:
        self.engine.begin_new_weights(method, (), {})()
        self.weights.append(method)

    def run(self, steps: Sequence[tuple[str, str]]) -> None:
        for name, value in steps:
            getattr(self, name)(*([value] if value else []))


STEPS = st.lists(
    st.tuples(st.just("write"), st.sampled_from(CONTENTS))
    | st.tuples(st.sampled_from(["load", "evict", "touch"]), st.just(""))
    | st.tuples(st.just("change"), st.sampled_from(METHODS)),
    max_size=5,
)


@given(STEPS, STEPS | st.none(), st.sampled_from(["", "salt"]), st.sampled_from(FILES))
@settings(max_examples=120, deadline=None)
def test_nothing_crosses_between_worlds_that_differ_and_everything_between_equal_ones(
    here: list[tuple[str, str]], there: list[tuple[str, str]] | None, salt: str, files: list[str]
) -> None:
    with TemporaryDirectory() as folder:
        names = zip(("here", "there"), files, strict=True)
        worlds = [World(Path(folder) / name, told(started)) for name, started in names]
        for world, steps in zip(worlds, (here, here if there is None else there), strict=True):
            world.write("x")
            world.load()
            world.run(steps)
        one, two = (
            digests_of(world.engine, lora_of("a", world.folder), cache_salt=salt)
            for world in worlds
        )
        roots = {root_of("facts", 4, one), root_of("facts", 4, two)}
        assert (one == two) == (len(roots) == 1)
        is_equal = worlds[0].weights == worlds[1].weights and worlds[0].loaded == worlds[1].loaded
        is_equal = is_equal and files[0] == files[1]
        is_known = not any(world.is_changed for world in worlds)
        assert (one == two) == (is_equal and is_known)
        marks = [
            world.engine.mark_of(request("r", "", 8, lora_request=lora_of("a", world.folder)))
            for world in worlds
        ]
        assert (marks[0] == marks[1]) == (one == two)
        assert {part for part in one if one[part] != two.get(part)} <= {"lora", "weights", "files"}
        assert one != digests_of(worlds[0].engine, lora_of("a", worlds[0].folder), cache_salt="no")


@given(st.lists(st.binary(min_size=1, max_size=400), min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_weight_files_elsewhere_are_the_same_and_a_changed_part_is_noticed(
    contents: list[bytes], data: st.DataObject
) -> None:
    """Where it is as long as samples are apart; files that vLLM does not read do not count."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "NUM_SAMPLES", 16)
        patch.setattr(identity, "SAMPLE_BYTES", 8)
        places = [Path(folder) / name for name in ("here", "there")]
        for place in places:
            place.mkdir()
            assert digest_of_weights(place) == ""
            for number, content in enumerate(contents):
                (place / f"model-{number}.safetensors").write_bytes(content)
        (places[1] / "pytorch_model.bin").write_text("only here")
        first = digest_of_weights(places[0])
        assert first == digest_of_weights(places[1]) != ""
        number = data.draw(st.integers(0, len(contents) - 1))
        old, path = contents[number], places[1] / f"model-{number}.safetensors"
        apart = min(len(old), max(8, len(old) * len(contents) // 16))
        begin = data.draw(st.integers(0, len(old) - apart))
        changed = bytes(one ^ 1 for one in old[begin : begin + apart])
        for new in (old[:begin] + changed + old[begin + apart :], old + b"0", old[:-1]):
            path.write_bytes(new)
            assert digest_of_weights(places[1]) != first
            assert digest_of_weights(path) != digest_of_weights(places[0] / path.name)


def test_weights_and_salts_count_without_an_adapter_and_cost_nothing_more() -> None:
    one, two = told(), told()
    assert digests_of(one, None).keys() == {"tokens"}
    assert digests_of(one, None) == digests_of(two, None)
    assert 0 < one.mark_of(request("r", "", 8)) == two.mark_of(request("r", "", 8)) < 1 << 64
    one.begin_new_weights(lambda worker: None, (), {})()
    assert digests_of(one, None) != digests_of(two, None)
    assert digests_of(two, None, cache_salt="s").keys() == {"tokens", "cache_salt"}


def test_an_engine_joins_the_others_by_the_label_of_its_weights() -> None:
    old, restarted = told(), told()
    for method in METHODS:
        old.begin_new_weights(method, (), {})()
    old.note_version("default")  # as vLLM calls them at the start
    assert digests_of(old, None) != digests_of(restarted, None)
    restarted.begin_new_weights("reload_weights", (), {})()
    for one in (old, restarted):
        one.note_version("step 57")
    assert digests_of(old, None) == digests_of(restarted, None)
    old.begin_new_weights("update_weights", (), {})()
    old.note_version("step 57")
    assert digests_of(old, None) != digests_of(restarted, None)


def test_a_checkpoint_counts_by_its_files(tmp_path: Path) -> None:
    def reloaded(content: str, *before: str) -> dict[str, str]:
        engine = told()
        for method in before:
            engine.begin_new_weights(method, (), {})()
        if (tmp_path / "model.safetensors").read_text() != content:
            (tmp_path / "model.safetensors").write_text(content)
        engine.begin_new_weights("reload_weights", (), {"weights_path": str(tmp_path)})()
        return digests_of(engine, None)

    (tmp_path / "model.safetensors").write_text("one")
    first = reloaded("one")
    assert first == reloaded("one", "update_weights")
    assert first != reloaded("other")
    engine = told()
    settle = engine.begin_new_weights("reload_weights", (None, str(tmp_path)), {})
    during = digests_of(engine, None)
    (tmp_path / "model.safetensors").write_text("meanwhile")
    settle()
    assert digests_of(engine, None) == during != reloaded("meanwhile")


def test_the_same_files_elsewhere_are_the_same_adapter(tmp_path: Path) -> None:
    paths = [write_named(tmp_path / name, "content") for name in ("one", "two")]
    (paths[1] / "README.md").write_text("only here")
    engines = [told() for _ in paths]
    for number, (engine, path) in enumerate(zip(engines, paths, strict=True), 1):
        load(engine, lora_of("a", path, number=number))
    found = [
        digests_of(engine, lora_of("a", path, number=number))
        for number, (engine, path) in enumerate(zip(engines, paths, strict=True), 1)
    ]
    assert found[0] == found[1]
    other = lora_of("b", paths[0], number=7)
    load(engines[0], other)
    assert digests_of(engines[0], other) != found[0]


def test_other_content_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    path = write_named(tmp_path, "one")
    engine = told()
    load(engine, lora_of("a", path))
    first = digests_of(engine, lora_of("a", path))
    time.sleep(0.02)  # file systems tell times apart by their clock's tick
    write_named(tmp_path, "two")
    assert digests_of(engine, lora_of("a", path)) not in (first, None)
    load(engine, lora_of("a", path, in_place=True))
    assert digests_of(engine, lora_of("a", path)) != first


@pytest.mark.parametrize("case", ["gone", "never there", "no weights", "no object", "not told"])
def test_what_cannot_be_read_equals_nothing_and_is_said(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, engine = tmp_path / "a", told()
    if case != "never there":
        write_named(path, "content")
    if case == "no weights":
        (path / identity.ADAPTER_WEIGHTS[0]).unlink()
    if case == "no object":
        (path / identity.ADAPTER_CONFIG).write_text("[]")
    engine.adapters.is_told = case != "not told"
    lora = lora_of("a", path)
    load(engine, lora)
    if case == "gone":  # what was loaded is known
        first = digests_of(engine, lora)
        for file in path.iterdir():
            file.unlink()
        assert digests_of(engine, lora) == first
        return
    assert digests_of(engine, lora) != digests_of(engine, lora)
    assert "LoRA adapter 'a'" in caplog.text
    assert "computed at both engines" in caplog.text


def test_a_load_that_fails_or_goes_on_is_equal_to_nothing(tmp_path: Path) -> None:
    path, engine = write_named(tmp_path, "content"), told()
    lora = lora_of("a", path, in_place=True)
    settle = engine.adapters.begin_load(lora)
    plain = lora_of("a", path)
    assert digests_of(engine, plain) != digests_of(engine, plain)
    assert settle is not None
    settle()
    assert digests_of(engine, plain) == digests_of(engine, plain)
    assert digests_of(engine, lora) != digests_of(engine, lora)  # loaded anew with each step
    elsewhere = lora_of("a", write_named(tmp_path / "b", "content"))
    assert digests_of(engine, elsewhere) != digests_of(engine, elsewhere)


def test_an_adapter_that_comes_with_its_first_request_is_known_soon(tmp_path: Path) -> None:
    path, engine = write_named(tmp_path, "content"), told()
    lora = lora_of("a", path)
    end = time.monotonic() + 10.0
    while digests_of(engine, lora) != digests_of(engine, lora):
        assert time.monotonic() < end
    loaded = told()
    load(loaded, lora)
    assert digests_of(engine, lora) == digests_of(loaded, lora)


def test_how_many_adapters_are_known_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MAX_ADAPTERS", 3)
    path, engine = write_named(tmp_path, "content"), told()
    for number in range(1, 9):
        load(engine, lora_of(f"a{number}", path, number=number))
    assert list(engine.adapters._loaded) == [6, 7, 8]
