# requires: mini-swe-agent==2.4.6
"""mini-swe-agent, whose one tool is bash."""

import os
from typing import Any

os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return what the policy submits."""
    place = {"api_base": base_url, "api_key": api_key}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=place, cost_tracking="ignore_errors"
    )
    templates = {"system_template": "Use bash.", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates)
    return agent.run(task["messages"][-1]["content"])["submission"]
