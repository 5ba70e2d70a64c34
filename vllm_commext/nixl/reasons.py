"""Reasons, as metrics and log lines name them."""

from vllm_commext.errors import Reason


class FirstToken(Reason):
    """The source of a request's first token, or the reason to compute it on the decode engine."""

    PREFILL = "prefill", "the prefill engine's"
    RESUMED = "resumed", "an answer that another decode engine has begun, and that goes on here"
    OFF = "off", "first tokens are not handed over here"
    ENGINE = "engine", "this engine speculates, or changes logits by rules of its own"
    NOT_OFFERED = "not_offered", "the prefill engine offers none"
    DIFFERS = "differs", "the prefill engine drew it by something else, or after another prompt"
    SEEDED = "seeded", "the second token depends on the generator that drew the first one"
    LOGPROBS = "logprobs", "its log probability is asked for"
    GRAMMAR = "grammar", "a grammar restricts it"
    PENALTIES = "penalties", "penalties change its logits"
    LOGIT_RULES = "logit_rules", "biases, or lists of allowed or bad tokens, change its logits"
    MIN_TOKENS = "min_tokens", "an end may not come yet"
    SAMPLES = "samples", "samples of one request are independent of one another"
    PROMPT = "prompt", "its prompt is not one of tokens alone"
    OTHER = "other", "a parameter that is not known here"


class Handover(Reason):
    """The way in which a request's KV cache is handed over, with its reason."""

    STREAMED = "streamed", "by chunks, while the prompt is computed"
    NO_KEY = "no_key", "its router gave no key"
    OFF = "off", "this engine does not do: set stream_chunks in its kv_connector_extra_config"
    LAYERS = "layers", "is not done for models of which no layer's blocks all stay until the end"
    HOST_COPY = "host_copy", "is not done with a copy of the cache in host memory"
    ZEROED = (
        "zeroed",
        "is not done for models whose blocks vLLM zeroes before it uses them, where all of "
        "these stay until the end",
    )
    NO_ROOM = "no_room", "all rows for streams are taken, or the prompt does not fit one"
    REPEATED_KEY = "repeated_key", "another request has the key"
    PROMPT = "prompt", "prompts of this kind are not streamed"
    NOT_FOUND = "not_found", "the prefill engine does not stream it, or did not begin with the key"


class NoReuse(Reason):
    """Reasons of an engine to reuse no blocks across engines."""

    OFF = "off", "it was not asked to"
    LAYERS = "layers", "this model's blocks do not all stay in one group until the end"
    HOST_COPY = "host_copy", "a copy of the cache is kept in host memory"
    ZEROED = "zeroed", "vLLM zeroes this model's blocks before it uses them"
    SPECULATION = (
        "speculation",
        "drafts have a KV cache of their own, which is not complete for the last tokens",
    )
    DIFFUSION = (
        "diffusion",
        "an answer may come of a last denoising step, whose KV no pass has computed anew",
    )
    POOL = ("pool", "this vLLM's block pool does not tell when a block is used again")
    STEPS = (
        "steps",
        "the engine's step is left as it is, so that failed reads could not be computed here",
    )
    ROLE = "role", "only engines that decode (kv_consumer, kv_both) go on with others' answers"
