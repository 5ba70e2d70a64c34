"""What `benchmarks/proxy.py` measures with: paced engines, clients, baselines, processor time."""
