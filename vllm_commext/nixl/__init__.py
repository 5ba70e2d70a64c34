"""The NIXL KV connector: a decode engine pulls the KV cache of a prompt from a prefill engine.
docs/architecture.md has its nouns, each with its file."""
