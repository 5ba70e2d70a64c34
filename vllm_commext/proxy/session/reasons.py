"""Reasons why requests go the way they go: labels of metrics."""

from vllm_commext.errors import Reason


class LocalPrefill(Reason):
    """Reason why a decode engine computes a prompt itself."""

    NO_PARAMETERS = "no_kv_transfer_params", "the prefill engine's answer has no parameters"
    PREFILL_AWAY = "prefill_away", "no prefill engine can be reached"
    PREFILL_FAILED = "prefill_failed", "prefill engines have failed"
    AFTER_FAILURE = "after_failure", "served anew, after a prefill engine's failure"
    PLACEMENT = "placement", "so it is placed: see commext_proxy_placements"
    NO_READER = "no_reader", "no other engine can be asked than the one that has computed it"
    SHORT_PROMPT = "short_prompt", "the prompt is shorter than --min-prompt-tokens"
    SEVERAL_SAMPLES = "several_samples", "parameters name the blocks of one sequence"
    BEAM_SEARCH = "beam_search", "beam search drops the parameters"
    NOT_ONE_PROMPT = "not_one_prompt", "parameters name the blocks of one sequence"
    PROMPT_LOGPROBS = "prompt_logprobs", "only the engine that computes the prompt knows them"
    TRUNCATION = "truncation", "with another max_tokens it may mean another prompt"
    NO_GENERATION = "no_generation", "no token is asked for"


class AtOnce(Reason):
    """Label of a two-step request: both at once, or the reason against it."""

    STREAMED = "streamed", "both at once"
    OFF = "off", "it is off"
    NOT_KNOWN = "not_known", "the prefill engine has not said yet that it streams, and where"
    DECODE = "decode", "a decode engine does not say that it reads streams"
    SEVERAL = "several", "several side channels answer for the prefill engine"
    ONE_TOKEN = "one_token", "the answer is one token, for which nothing need be read"
    BUSY = "busy", "enough requests wait for the prefill engine already"
    AGAIN = "again", "the request is served anew"
    FAILED = "failed", "the decode engine failed after both at once; one after the other then"
    ALONE = "alone", "the prefill engine was lost, and the decode engine went on without it"


class Resume(Reason):
    """Label of a stream whose decode engine is lost, gives it up, or drains."""

    RESUMED = "resumed", "it went on at another decode engine"
    OFF = "off", "it is off"
    ENDPOINT = "endpoint", "it is neither a completion nor a chat"
    SAMPLES = "samples", "it holds more than one answer"
    ECHO = "echo", "it begins with the prompt's text"
    NO_ROOM = "no_room", "more than 16 MiB were to be kept of it, or it had the most of 256 MiB"
    NOT_TOLD = "not_told", "its engine does not tell every token's id, or tells what is not known"
    DIFFERS = "differs", "what the other engine answered is not what the client had"
    FAILED = "failed", "no other engine could go on with it"
    ENDING = "ending", "it is about to end where it is"
    ANEW = "anew", "another engine would begin it anew, for longer than it may pause"
