"""A tiny MiniMax-M2 in real vLLM, with our norm and with vLLM's: the same tokens?

    python tests/gpu/reduce_rms_minimax.py --tp 2 --out DIR [--eager-only]

writes a seeded model, lets transformers continue some prompts with it, then vLLM: with the toggle
off and on, eagerly and with CUDA graphs. Exits with 0 where all agree and the log shows that our op
ran. Needs this package's entry point, that is, its metadata, on the path.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.kit.servers import NO_MULTICAST
from tests.kit.tiny_minimax import VOCABULARY, write_minimax

ROOT = Path(__file__).parents[2]
TOGGLE = "VLLM_COMMEXT_REDUCE_RMS"
PROMPT_LENGTHS = (3, 9, 17, 40, 120, 300, 7, 5)
NEW_TOKENS = 16
CHILD_SECONDS = 200
MARK = "RESULT "


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prompts() -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(n)] for n in PROMPT_LENGTHS]


def by_transformers(folder: Path) -> dict[str, Any]:
    """Greedy tokens and the first logits' spread."""
    import torch
    from transformers import AutoModelForCausalLM

    place = device()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place)
    tokens: list[list[int]] = []
    spreads: list[float] = []
    with torch.no_grad():
        for prompt in prompts():
            ids = torch.tensor([prompt], device=place)
            logits = model(ids).logits[0, -1].float()
            assert bool(logits.isfinite().all()), "transformers' logits are not finite"
            spreads.append(float(logits.std()))
            for _ in range(NEW_TOKENS):
                following = model(ids).logits[0, -1].argmax().view(1, 1)
                ids = torch.cat([ids, following], dim=1)
            tokens.append(ids[0, len(prompt) :].tolist())
    return {"tokens": tokens, "spreads": spreads}


def by_vllm(folder: Path, tp: int, eager: bool) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        str(folder),
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,
        dtype="bfloat16",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    answers = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts()], params)
    outs = [answer.outputs[0] for answer in answers]
    logprobs = [
        [
            float(step[token].logprob)
            for step, token in zip(out.logprobs, out.token_ids, strict=True)
        ]
        for out in outs
    ]
    return {"tokens": [list(out.token_ids) for out in outs], "logprobs": logprobs}


def run_child(name: str, folder: Path, args: argparse.Namespace, toggle: str) -> dict[str, Any]:
    """One engine in a process of its own; its log is kept."""
    environ = {
        **os.environ,
        TOGGLE: toggle,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CACHE_ROOT": str(args.out / "cache"),
        **NO_MULTICAST,
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less to start
        "VLLM_HOST_IP": "127.0.0.1",
    }
    command = [sys.executable, __file__, "--child", name, "--out", str(args.out)]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--tp", str(args.tp)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    log = args.out / f"{name}_{toggle}.log"
    log.write_text(done.stdout)
    say(f"{name}, {TOGGLE}={toggle}: {time.monotonic() - start:.0f} s")
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    if not lines:
        raise SystemExit(f"{name} gave no result:\n{done.stdout[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].partition(MARK)[2])
    result["ran"] = "reduce_rms ran for MiniMax-M2" in done.stdout
    return result


def same_until(mine: list[int], theirs: list[int]) -> int:
    """How many tokens agree from the first on."""
    pairs = zip(mine, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine))


def compare(name: str, mine: list[list[int]], theirs: list[list[int]], needed: int) -> bool:
    agree = [same_until(a, b) for a, b in zip(mine, theirs, strict=True)]
    say(f"{name}: tokens that agree, of {NEW_TOKENS}: {agree}")
    return min(agree) >= needed


def run_all(args: argparse.Namespace) -> int:
    args.out = args.out.resolve()
    folder = args.out / "model"
    write_minimax(folder, device())
    reference = by_transformers(folder)
    say(f"transformers: {reference['tokens'][:3]}, std of logits {reference['spreads'][:3]}")
    distinct = len({tuple(tokens[:2]) for tokens in reference["tokens"]})
    say(f"{distinct} different beginnings for {len(PROMPT_LENGTHS)} prompts")
    good = distinct > len(PROMPT_LENGTHS) // 2
    for name in ["eager"] if args.eager_only else ["eager", "graphs"]:
        stock, ours = (run_child(name, folder, args, toggle) for toggle in "01")
        say(f"{name}: our op ran with the toggle off: {stock['ran']}, on: {ours['ran']}")
        good &= ours["ran"] and not stock["ran"]
        good &= compare(f"{name}, on and off", ours["tokens"], stock["tokens"], NEW_TOKENS)
        if device() == "cuda":
            wanted = reference["tokens"]
            good &= compare(f"{name}, on and transformers", ours["tokens"], wanted, 1)
        worst = max(
            abs(a - b)
            for mine, theirs in zip(ours["logprobs"], stock["logprobs"], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        say(f"{name}: largest difference of log probabilities, on and off: {worst:.4f}")
        good &= math.isfinite(worst)
    say("same" if good else "DIFFERENT")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eager-only", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = by_vllm(args.out / "model", args.tp, args.child == "eager")
        say(MARK + json.dumps(result))
        return 0
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
