"""The care that NIXL and UCX need: the agent, posting, sweeps, pauses, logs, the self-probe."""
