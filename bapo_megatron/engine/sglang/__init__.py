"""SGLang servers: everything that knows SGLang."""
