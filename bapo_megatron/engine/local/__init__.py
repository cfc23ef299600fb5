"""The transformers model in this process, sampling by a decode loop that repeats bit for bit."""
