"""Chunk streaming: a prompt's KV cache is read chunk by chunk while it is still computed."""
