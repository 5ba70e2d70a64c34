"""Our all-reduce inside a real vLLM: the same tokens, and decode throughput against vLLM's order.

    python benchmarks/allreduce_engine.py --tp 2 --out benchmarks/results/mine

A dense model with seeded random weights is made on the spot. One engine at a time serves the same
prompts: with the toggle off and on, with vLLM's all-reduce fusion pass off and on, with CUDA graphs
and, under ``--eager``, without. Prints throughput, the share of equal tokens and, from the engine's
log, which backends served. Tokens may part where two logits are nearly equal, for the sums are
added in another order; the first token of every prompt is compared by its log probability.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, WORDS, TOKENS, ROUNDS = 16, 64, 256, 7
MARK = "OUTCOME "
ENVIRON = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less to start
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
Outcome = dict[str, Any]


def serve(args: argparse.Namespace) -> Outcome:
    """One engine: its tokens, first log probabilities and tokens a second."""
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(cudagraph_capture_sizes=[PROMPTS])
    compilation.pass_config.fuse_allreduce_rms = args.fusion
    engine = LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
        enforce_eager=args.eager,
        max_model_len=1024,
        seed=0,
        gpu_memory_utilization=0.5,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=False,
        compilation_config=compilation,
    )
    prompts: Any = [
        {"prompt_token_ids": [(7 * word + 13 * prompt) % 31000 + 10 for word in range(WORDS)]}
        for prompt in range(PROMPTS)
    ]
    wanted = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = engine.generate(prompts, wanted, use_tqdm=False)
    rates: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        rates.append(PROMPTS * TOKENS / (time.perf_counter() - start))
    first = [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "first_logprobs": first,
        "rate": sorted(rates)[len(rates) // 2],
    }


def run_one(args: argparse.Namespace, model: Path, *, on: bool, fusion: bool) -> Outcome:
    toggle = {"VLLM_COMMEXT_ALLREDUCE": "1" if on else "0"}
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--tp", str(args.tp), "--model", str(model)]
    command += ["--serve", *(["--fusion"] if fusion else []), *(["--eager"] if args.eager else [])]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRON, **toggle, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=args.timeout,
        check=False,
    )
    text = done.stdout
    if done.returncode:
        raise SystemExit(f"the engine failed:\n{text[-4000:]}")
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    outcome = json.loads(lines[-1].removeprefix(MARK))
    outcome["log"] = [line for line in text.splitlines() if "commext: allreduce" in line][:12]
    return outcome


def equal_share(one: Outcome, other: Outcome) -> float:
    pairs = [
        mine == theirs
        for tokens, others in zip(one["tokens"], other["tokens"], strict=True)
        for mine, theirs in zip(tokens, others, strict=True)
    ]
    return sum(pairs) / len(pairs)


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    mode = "eager" if args.eager else "graphs"
    file = args.out / f"allreduce_engine_tp{args.tp}_{mode}.json"
    file.write_text(json.dumps(rows, indent=1) + "\n")


def compare(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(CONFIG))
        for fusion in (False, True) if args.both else (False,):
            off, on = (run_one(args, model, on=on, fusion=fusion) for on in (False, True))
            pairs = zip(off["first_logprobs"], on["first_logprobs"], strict=True)
            row = {
                "fusion pass": fusion,
                "eager": args.eager,
                "tokens a second, off": round(off["rate"], 1),
                "tokens a second, on": round(on["rate"], 1),
                "on / off": round(on["rate"] / off["rate"], 4),
                "equal tokens": round(equal_share(off, on), 4),
                "first log probability, largest difference": max(abs(a - b) for a, b in pairs),
                "log": on["log"],
            }
            rows.append(row)
            print(json.dumps(row, indent=1), flush=True)
            write(args, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--both", action="store_true", help="also with vLLM's fusion pass on")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for each engine")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fusion", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        outcome = serve(args)
        print("\n" + MARK + json.dumps(outcome), flush=True)
        return 0
    compare(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
