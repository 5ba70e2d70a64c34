"""Takes from a process what it knows of vLLM's source, so that every part has to test itself."""

WITHHOLD = "from tests.kit.untested import withhold_evidence; withhold_evidence()\n"
VERSION = "0.34.0"
ENVIRON = {"VLLM_COMMEXT_UNTESTED": "self"}


def withhold_evidence() -> None:
    """From now on this vLLM is a version that nobody has tested, and reads unlike all others.
    Before parts are let in."""
    import vllm

    from vllm_commext.compat import parts

    vllm.__version__ = VERSION
    named = parts.known_sources()
    unlike = {part: dict.fromkeys(symbols, {}) for part, symbols in named.items()}
    parts.known_sources = lambda: unlike
