"""What mixes the tokens of a layer, one kind per file; ``base`` says what a kind is."""
