"""Our all-reduce inside a real vLLM: the same tokens, and decode throughput against vLLM's order.

    python benchmarks/allreduce_engine.py --tp 2 --both --out benchmarks/results/mine

A dense model with seeded random weights is made on the spot. Engines with the toggle off and on
share the GPUs, and take turns round after round to serve the same prompts; under ``--both`` there
are two more, with vLLM's all-reduce fusion pass on. Under ``--eager``, without CUDA graphs, one
engine serves with our dispatcher taken out and put back each round, so that both sides have the
same processes: one engine may be slower than another by several percent.

Prints throughput, the share of equal tokens and, from an engine's log, which backends serve. Tokens
may part where two logits are nearly equal, for the sums are added in another order; the first token
of every prompt is compared by its log probability.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vllm_commext.testing import gpu_ranks

ROOT = Path(__file__).parents[1]
PROMPTS, WORDS, TOKENS = 16, 64, 256
READY, OUTCOME = "READY", "OUTCOME "
OFF, ON = "off", "on"
ANSWER_SECONDS = 60.0
KV_BYTES = 2 << 30
ENVIRON = {
    **gpu_ranks.ENVIRON,
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less to start
}
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 4096, 11008, 8, 32, 8, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def write_model(folder: Path) -> None:
    """Seeded weights, large enough that the tokens depend on the prompt."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(7)
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        made = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        weights[f"{name}.weight"] = made.to(torch.bfloat16).cpu()

    def ones(name: str) -> None:
        weights[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)

    add("model.embed_tokens", VOCABULARY, HIDDEN)
    add("lm_head", VOCABULARY, HIDDEN)
    ones("model.norm")
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for part in ("q_proj", "o_proj"):
            add(f"{at}.self_attn.{part}", HIDDEN, HIDDEN)
        for part in ("k_proj", "v_proj"):
            add(f"{at}.self_attn.{part}", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        for part in ("gate_proj", "up_proj"):
            add(f"{at}.mlp.{part}", INTERMEDIATE, HIDDEN)
        add(f"{at}.mlp.down_proj", HIDDEN, INTERMEDIATE)
        ones(f"{at}.input_layernorm")
        ones(f"{at}.post_attention_layernorm")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def use_ours(worker: Any, wanted: bool) -> None:
    """In a worker: take our dispatcher out of the communicator, or put it back."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_commext.compat.allreduce import ATTRIBUTE

    del worker
    kept, parts = f"{ATTRIBUTE}_kept", vars(get_tp_group().device_communicator)
    here, there = (kept, ATTRIBUTE) if wanted else (ATTRIBUTE, kept)
    if here in parts:
        parts[there] = parts.pop(here)


def serve(args: argparse.Namespace) -> None:
    """One engine: for every line of its input, a line with tokens and seconds."""
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(cudagraph_capture_sizes=[PROMPTS])
    compilation.pass_config.fuse_allreduce_rms = args.fusion
    engine = LLM(
        args.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
        enforce_eager=args.eager,
        max_model_len=1024,
        seed=0,
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=KV_BYTES,
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
    print(f"\n{READY}", flush=True)
    for line in sys.stdin:
        if args.eager:
            engine.collective_rpc(use_ours, args=(line.strip() == ON,))
        start = time.perf_counter()
        outputs = engine.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
        first = [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
        answer = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "first_logprobs": first,
            "rate": PROMPTS * TOKENS / seconds,
        }
        print(f"\n{OUTCOME}{json.dumps(answer)}", flush=True)


class Engine:
    """A process that serves; its output is read by a thread."""

    def __init__(self, args: argparse.Namespace, model: Path, *, on: bool, fusion: bool) -> None:
        self.name = f"toggle {ON if on else OFF}, fusion pass {ON if fusion else OFF}"
        self.fusion = fusion
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        toggle = {"VLLM_COMMEXT_ALLREDUCE": "1" if on else "0", "PYTHONPATH": python_path}
        command = [sys.executable, __file__, "--tp", str(args.tp), "--model", str(model)]
        command += [*(["--fusion"] if fusion else []), *(["--eager"] if args.eager else [])]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRON, **toggle},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._read = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify()

    def await_line(self, mark: str, seconds: float) -> str:
        """The next line that begins with `mark`."""
        end = time.monotonic() + seconds
        with self._news:
            while time.monotonic() < end:
                for index in range(self._read, len(self.lines)):
                    if self.lines[index].startswith(mark):
                        self._read = index + 1
                        return self.lines[index].removeprefix(mark)
                if self.process.poll() is not None:
                    break
                self._news.wait(0.5)
        text = "\n".join(self.lines)[-4000:]
        raise SystemExit(f"{self.name}: expected {mark} within {seconds:.0f} s, got\n{text}")

    def generate(self, setting: str) -> dict[str, Any]:
        """The tokens and the rate of one round; without graphs the setting counts."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{setting}\n")
        self.process.stdin.flush()
        return json.loads(self.await_line(OUTCOME, ANSWER_SECONDS))

    def log(self) -> list[str]:
        """What ours says of itself."""
        return [line for line in self.lines if "commext: allreduce" in line][:12]


Pair = tuple[Engine, Engine]


@contextlib.contextmanager
def engines(args: argparse.Namespace, model: Path) -> Iterator[list[Pair]]:
    """For each setting of the fusion pass, the engine that is off and the one that is on."""
    made: list[Engine] = []

    def start(*, on: bool, fusion: bool) -> Engine:
        made.append(Engine(args, model, on=on, fusion=fusion))
        return made[-1]

    try:
        if args.eager:
            one = start(on=True, fusion=False)
            pairs = [(one, one)]
        else:
            settings = (False, True) if args.both else (False,)
            pairs = [(start(on=False, fusion=f), start(on=True, fusion=f)) for f in settings]
        for engine in made:
            engine.await_line(READY, args.timeout)
        yield pairs
    finally:
        for engine in made:
            engine.process.kill()
            engine.process.wait(30)


def equal_share(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = [
        mine == theirs
        for tokens, others in zip(one["tokens"], other["tokens"], strict=True)
        for mine, theirs in zip(tokens, others, strict=True)
    ]
    return sum(pairs) / len(pairs)


def row_of(engine: Engine, rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds of two engines, or of two settings of one, come to."""
    (first_off, first_on), (again, _) = rounds[:2]
    logprobs = zip(first_off["first_logprobs"], first_on["first_logprobs"], strict=True)
    rates = [[answers[index]["rate"] for answers in rounds] for index in (0, 1)]
    off, on = (statistics.median(of) for of in rates)
    ratios = sorted(b / a for a, b in zip(*rates, strict=True))
    return {
        "fusion pass": engine.fusion,
        "tokens a second, off": round(off, 1),
        "tokens a second, on": round(on, 1),
        "on / off, median of rounds": round(statistics.median(ratios), 4),
        "on / off, smallest and largest": [round(ratios[0], 4), round(ratios[-1], 4)],
        "equal tokens": round(equal_share(first_off, first_on), 4),
        "equal tokens, two rounds with the toggle off": round(equal_share(first_off, again), 4),
        "different answers": len({tuple(tokens) for tokens in first_on["tokens"]}),
        "first log probability, largest difference": max(abs(a - b) for a, b in logprobs),
        "log": engine.log(),
    }


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        with engines(args, model) as pairs:
            rounds = [
                [(off.generate(OFF), on.generate(ON)) for off, on in pairs]
                for _ in range(args.rounds + 1)
            ][1:]  # the first warms up
            return [
                row_of(on, [answers[index] for answers in rounds])
                for index, (_, on) in enumerate(pairs)
            ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="number of GPUs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--both", action="store_true", help="also with vLLM's fusion pass on")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds to start")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fusion", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        serve(args)
        return 0
    rows = compare(args)
    print(json.dumps(rows, indent=1))
    args.out.mkdir(parents=True, exist_ok=True)
    mode = "eager" if args.eager else "graphs"
    file = args.out / f"allreduce_engine_tp{args.tp}_{mode}.json"
    file.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
