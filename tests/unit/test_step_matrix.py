"""Steps of a vLLM that is there as text alone."""

from pathlib import Path

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

import step_matrix

SCHEDULED = """
from dataclasses import dataclass

@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list

@dataclass
class CachedRequestData:
    req_ids: list
    num_computed_tokens: list

@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict
"""
OUTPUTS = """
from dataclasses import dataclass

@dataclass
class ModelRunnerOutput:
    req_ids: list
    req_id_to_index: dict
    sampled_token_ids: list
"""


def text_of_a_vllm(folder: Path, scheduled: str) -> Path:
    for name, text in (("v1/core/sched/output.py", scheduled), ("v1/outputs.py", OUTPUTS)):
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_classes_as_expected_are_served(tmp_path: Path) -> None:
    assert step_matrix.look_at(text_of_a_vllm(tmp_path, SCHEDULED), steps=200) == ""


def test_a_renamed_field_is_told(tmp_path: Path) -> None:
    renamed = SCHEDULED.replace("req_ids", "requests")
    problem = step_matrix.look_at(text_of_a_vllm(tmp_path, renamed), steps=1)
    assert problem == "CachedRequestData has no req_ids"


def test_a_step_that_arrives_changed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = step_matrix.Decoder.decode
    monkeypatch.setattr(
        step_matrix.Decoder, "decode", lambda self, record: (*decode(self, record), "more")
    )
    problem = step_matrix.look_at(text_of_a_vllm(tmp_path, SCHEDULED), steps=1)
    assert problem.startswith("step 0 arrived as")
