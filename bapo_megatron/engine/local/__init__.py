"""A transformers model in this process, sampled by a decode loop that repeats bit for bit."""
