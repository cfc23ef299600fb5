"""SGLang servers: all code that depends on SGLang."""
