"""`vllm-commext proxy`: one OpenAI endpoint in front of prefill and decode engines."""
