"""The NIXL KV connector: a decode engine pulls the KV cache of a prompt from a prefill engine.

Pure (numpy only, no I/O): ``topology``, ``regions``, ``descriptors``, ``plan``, ``leases``,
``compatibility``. I/O: ``agent`` (NIXL), ``side_channel`` (ZMQ), ``io_thread`` (the one thread
that touches both). vLLM's interface: ``connector`` (the facade), ``scheduler``, ``worker``,
``metadata``, ``stats``.
"""
