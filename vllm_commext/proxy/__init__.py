"""`vllm-commext proxy`: one OpenAI endpoint in front of prefill and decode engines.

Every request takes two steps: a prefill engine computes the prompt's KV cache and answers with
where it lies, then a decode engine pulls it and generates. What is decided about a request is
pure (`two_step`, `sse`, `engines`); what touches sockets is aiohttp (`upstream`, `health`,
`relay`, `app`, `server`), which the extra `vllm-commext[proxy]` brings and vLLM has anyway.
"""
