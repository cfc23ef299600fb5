# requires: langgraph==1.2.24 langchain-openai==1.7.4
"""A graph of langgraph with langchain's model."""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([add])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([add]))
    graph.add_edge("__start__", "ask").add_edge("tools", "ask")
    graph.add_conditional_edges("ask", tools_condition)
    state = await graph.compile().ainvoke({"messages": task["messages"]})
    return state["messages"][-1].content
