"""Evaluation of sampled responses: files, votes, estimates with intervals."""
