"""How an all-reduce is done: each backend, what it can take, and the memory that it needs."""
