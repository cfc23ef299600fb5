"""Runs programs that a model wrote, under limits and without access to anything of the run."""
