"""Agents: programs that speak the OpenAI protocol, their calls recorded token for token."""
