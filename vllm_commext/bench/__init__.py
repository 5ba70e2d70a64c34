"""Load for OpenAI endpoints and what they make of it: workloads, an open-loop client, figures."""
