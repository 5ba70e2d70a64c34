"""Engines' speed, learned from the times of tokens. Pure: every time is an argument."""

FORGETTING = 0.99
"""Weight of a sample after one more: about the last 100 decide."""
SHARED_SAMPLES = 30.0
"""Weight of all engines' prompts: one that computes short prompts does not know long ones."""
_SWEEPS = 12
MAX_RATIO = 3.0
"""Upper bound of a time, as a multiple of the expected one."""
_KNOWN_SAMPLES = 8
Features = tuple[float, float, float]


class LeastSquares:
    """Non-negative linear model of three features that forgets older samples, by normal equations,
    so that each operation takes a fixed time. base: used while this one has few samples, and as
    *shared* samples after that."""

    def __init__(self, base: "LeastSquares | None" = None, shared: float = 0.0) -> None:
        # Products of the features, 00 01 02 11 12 22, and of each with the value.
        self._sums = [0.0] * 9
        self._base, self._shared, self.num_samples = base, shared, 0.0
        self.solution: Features | None = None

    def add(self, features: Features, value: float, weight: float = 1.0) -> None:
        if self.num_samples > _KNOWN_SAMPLES and (expected := self.predict(features)) > 0.0:
            value = min(value, MAX_RATIO * expected)
        self._learn(features, value, weight)
        if self._base is not None:
            self._base._learn(features, value, weight)

    def _learn(self, features: Features, value: float, weight: float) -> None:
        a, b, c = features
        x, y, z = a * weight, b * weight, c * weight
        new = (x * a, x * b, x * c, y * b, y * c, z * c, x * value, y * value, z * value)
        self._sums = [old * FORGETTING + one for old, one in zip(self._sums, new, strict=True)]
        self.num_samples = self.num_samples * FORGETTING + 1.0
        self.solution = None

    @property
    def is_known(self) -> bool:
        return self.num_samples > 0.0 or (self._base is not None and self._base.is_known)

    def predict(self, features: Features) -> float:
        (x, y, z), (a, b, c) = self.solution or self.solved(), features
        return x * a + y * b + z * c

    def solved(self) -> Features:
        """Solve by coordinate descent, the last features from zero."""
        if (base := self._base) is not None and self.num_samples <= _KNOWN_SAMPLES:
            return base.solution or base.solved()  # not kept: others add to it
        sums = self._with_shared(base) if base is not None and self._shared else self._sums
        aa, ab, ac, bb, bc, cc, a, b, c = sums
        x = y = z = 0.0
        for _ in range(_SWEEPS):
            before = x, y, z
            x = (a - ab * y - ac * z) / aa if aa > 0.0 else 0.0
            x = x if x > 0.0 else 0.0
            y = (b - ab * x - bc * z) / bb if bb > 0.0 else 0.0
            y = y if y > 0.0 else 0.0
            z = (c - ac * x - bc * y) / cc if cc > 0.0 else 0.0
            z = z if z > 0.0 else 0.0
            if (x, y, z) == before:
                break
        self.solution = x, y, z
        return self.solution

    def _with_shared(self, base: "LeastSquares") -> list[float]:
        """Sums with the base's, whose values are scaled to this engine's by least squares."""
        aa, ab, ac, bb, bc, cc, a, b, c = self._sums
        x, y, z = base.solution or base.solved()
        squares = x * (x * aa + 2 * (y * ab + z * ac)) + y * (y * bb + 2 * z * bc) + z * z * cc
        share = min(1.0, self._shared / base.num_samples)
        larger = (x * a + y * b + z * c) / squares if squares > 0.0 else 1.0
        weights = (*[share] * 6, *[share * larger] * 3)
        three = zip(self._sums, base._sums, weights, strict=True)
        return [own + weight * of_all for own, of_all, weight in three]


class SharedSpeed:
    """Models that engines share, of which a new one begins with steps of *step* seconds."""

    def __init__(self, step: float) -> None:
        self.prefill, self.steps = LeastSquares(), LeastSquares()
        self.steps.solution = step, 0.0, 0.0  # until one is seen without prompts


class Mean:
    def __init__(self) -> None:
        self.value = self._weight = 0.0

    def add(self, value: float) -> None:
        self._weight = self._weight * FORGETTING + 1.0
        self.value += (value - self.value) / self._weight


class EngineSpeed:
    def __init__(self, shared: SharedSpeed) -> None:
        self._prefill = LeastSquares(shared.prefill, SHARED_SAMPLES)
        self._steps = LeastSquares(shared.steps)

    @property
    def is_known(self) -> bool:
        return self._prefill.is_known

    @property
    def knows_steps(self) -> bool:
        return self._steps.is_known

    def prefill_seconds(self, new_tokens: float, held_tokens: float) -> float:
        each, area, any_prompt = self._prefill.solution or self._prefill.solved()
        return any_prompt + each * new_tokens / 1000.0 + area * area_of(new_tokens, held_tokens)

    def note_prefill(self, new: float, area: float, seconds: float) -> None:
        """Learn from prompts of *new* tokens in all, with `area_of` *area*."""
        weight = (1000.0 / (new + 512.0)) ** 1.5  # errors count between seconds and shares
        self._prefill.add((new / 1000.0, area, 1.0), seconds, weight)

    def step_seconds(self, answers: float, context_tokens: float) -> float:
        return self.steps_seconds(answers, context_tokens, 0.0)[0]

    def steps_seconds(self, answers: float, context: float, tokens: float) -> tuple[float, float]:
        """Seconds of a step, and of one that also gives an answer to a prompt of *tokens*."""
        alone, each, before = self._steps.solution or self._steps.solved()
        step = alone + each * answers / 16.0 + before * context / 65536.0
        return step, step + each / 16.0 + before * tokens / 65536.0

    def note_steps(self, answers: float, context_tokens: float, seconds: float) -> None:
        self._steps.add((1.0, answers / 16.0, context_tokens / 65536.0), seconds)


def area_of(new_tokens: float, held_tokens: float) -> float:
    """Cost of attention: millions of pairs of tokens."""
    return new_tokens * (held_tokens + new_tokens / 2.0) / 1e6
