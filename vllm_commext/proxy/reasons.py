"""Why a request takes the steps that it takes."""

from vllm_commext.reasons import Reason


class AtOnce(Reason):
    """How a request that takes two steps takes them: at once, or why one after the other."""

    STREAMED = "streamed", "both at once"
    OFF = "off", "it is off"
    NOT_KNOWN = "not_known", "the prefill engine has not said yet that it streams, and where"
    DECODE = "decode", "a decode engine does not say that it reads streams"
    SEVERAL = "several", "several side channels answer for the prefill engine"
    ONE_TOKEN = "one_token", "the answer is one token, for which nothing need be read"
    BUSY = "busy", "enough requests wait for the prefill engine already"
    AGAIN = "again", "the request is served anew"
    FAILED = "failed", "the decode engine failed after both at once; one after the other then"


class LocalPrefill(Reason):
    """Why a decode engine computes a prompt itself."""

    NO_PARAMETERS = "no_kv_transfer_params", "the prefill engine's answer has no parameters"
    PREFILL_AWAY = "prefill_away", "no prefill engine can be reached"
    PREFILL_FAILED = "prefill_failed", "prefill engines have failed"
    AFTER_FAILURE = "after_failure", "served anew, after a prefill engine's failure"
    SHORT_PROMPT = "short_prompt", "the prompt is shorter than --min-prompt-tokens"
    SEVERAL_SAMPLES = "several_samples", "parameters name the blocks of one sequence"
    BEAM_SEARCH = "beam_search", "beam search drops the parameters"
    NOT_ONE_PROMPT = "not_one_prompt", "parameters name the blocks of one sequence"
    PROMPT_LOGPROBS = "prompt_logprobs", "only the engine that computes the prompt knows them"
    TRUNCATION = "truncation", "with another max_tokens it may mean another prompt"
    NO_GENERATION = "no_generation", "no token is asked for"
