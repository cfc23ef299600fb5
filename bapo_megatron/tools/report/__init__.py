"""One HTML page about one run or several: what was trained, how it went, and what was sampled."""
