"""The policy: a Megatron-core GPTModel that is read from and written to Hugging Face weights."""
