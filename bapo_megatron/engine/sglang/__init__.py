"""SGLang servers: all code that depends on SGLang."""

SHARED_FILES = ("sglang_loads_*", "sem.mp-*")
"""SGLang's load metrics, and semaphores of Python's multiprocessing, in /dev/shm."""
