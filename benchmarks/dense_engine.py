"""An engine with a model of random weights, and how long its tokens take."""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit import gpu_ranks

ENVIRON = {  # of its process
    **gpu_ranks.ENVIRON,
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process less to start
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on CPUs: two workers on one NUMA node
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
BATCHES = (1, 16, 64)  # requests at a time
# What an engine is asked for, beside numbers of requests.
FIRST, TOKENS = "first token", "tokens"
PROMPT = 64  # tokens
COMPARED = 64  # requests whose tokens are compared
SAMPLES = 3
KV_BYTES = 1 << 30
# To try a script on CPUs.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def write_model(folder: Path, shape: Mapping[str, Any], layers: int, positions: int) -> None:
    """A configuration, shaped as Llama's if `shape` names no other; its weights are random."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


class DenseEngine:
    """The engine of this process.

    Args:
        args: ``model``, ``tp``, ``chunk`` (tokens of the long prompt), ``output`` (tokens of an
            answer), ``cpu``.
        vocabulary: of the model.
        more: further arguments of vLLM's.

    Attributes:
        llm: vLLM's.
    """

    def __init__(self, args: argparse.Namespace, vocabulary: int, **more: Any) -> None:
        from vllm import LLM

        self._vocabulary, self._chunk, self._output = vocabulary, args.chunk, args.output
        if args.cpu:
            more |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
        else:
            graphs = {"cudagraph_capture_sizes": list(BATCHES)}
            more |= {"compilation_config": graphs, "kv_cache_memory_bytes": KV_BYTES}
            more |= {"gpu_memory_utilization": 0.1}  # of which so much must be free as it starts
        self.llm: Any = LLM(
            args.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=args.tp,
            max_model_len=args.chunk + 16,
            max_num_batched_tokens=args.chunk,
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
            seed=0,
            **more,
        )

    def answer(self, cell: str) -> Any:
        """What is asked for: the tokens of `COMPARED` requests, or milliseconds: of the first token
        of a chunk, or an output token of so many requests; the median of `SAMPLES`, after one that
        wakes up an engine whose turn it was not."""
        if cell == TOKENS:
            return self.generate(COMPARED, PROMPT, self._output)[1]
        sample = self._first_token if cell == FIRST else lambda: self._output_token(int(cell))
        sample()
        return statistics.median(sample() for _ in range(SAMPLES)) * 1e3

    def _first_token(self) -> float:
        return self.generate(1, self._chunk, 1)[0]

    def _output_token(self, requests: int) -> float:
        short, long = (self.generate(requests, PROMPT, count)[0] for count in (1, 1 + self._output))
        return (long - short) / self._output

    def generate(self, requests: int, prompt: int, output: int) -> tuple[float, list[list[int]]]:
        """Seconds that so many requests take together, and the tokens of each.

        Args:
            requests: all begun at once.
            prompt: tokens of each, and `output` those of its answer.
        """
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        prompts = [
            {
                "prompt_token_ids": [
                    (7 * word + 13 * request) % (self._vocabulary - 10) + 5
                    for word in range(prompt)
                ]
            }
            for request in range(requests)
        ]
        begun = time.perf_counter()
        answers = self.llm.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return seconds, [list(answer.outputs[0].token_ids) for answer in answers]
