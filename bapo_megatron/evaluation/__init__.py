"""What is made of sampled responses: files, votes, estimates with intervals, comparisons."""
