"""A real language model of 135M parameters, trained on a laptop without a GPU."""
