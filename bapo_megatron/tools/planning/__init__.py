"""What a run will need, computed from its configuration and the model's config.json alone."""
