"""A tiny task, its tokenizer and a warmed-up 100k-parameter Qwen2, made on the spot."""
