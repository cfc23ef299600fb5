"""Agents that play episodes through the OpenAI protocol."""
