"""The NIXL KV connector: a decode engine pulls the KV cache of a prompt from a prefill engine.

connector, scheduler, worker   vLLM's interface: the facade and its two sides
metadata, requests             what the two sides tell each other
transfer_thread                the one thread that owns a worker's NIXL agent
vllm_cache, engine_facts       from vLLM's tensors and settings to layouts and facts
reuse                          blocks without a lease, read by hash
mapped                         reads through a mapping of a prefill worker's GPU memory
recorder, prometheus           counters, and their Prometheus form
geometry/                      pure: layouts, lanes, plans, block lists
decode/                        remote requests, their reads, and the peers they come from
stream/                        prompts that are read while they are computed
prefill/                       held requests, leases, fences, the side channel's server
wire/                          messages, request parameters, seals, the side channel's client
transport/                     the care that NIXL and UCX need, tables that peers read
"""
