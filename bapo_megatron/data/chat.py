"""Rendering questions by the tokenizer's chat template, tokenised exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Message = dict[str, str]
"""A chat message: ``role`` and ``content``."""


def load_tokenizer(model_path: Path) -> Any:
    """Load the tokenizer of a local Hugging Face model directory.

    Raises:
        ValueError: The directory holds no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer  # seconds to import; not needed to read prompts

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{model_path}: no usable tokenizer ({reason}); save the model's tokenizer there"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model_path}: the tokenizer has no chat template; "
            "put a chat_template.jinja beside tokenizer_config.json"
        )
    return tokenizer


class ChatRenderer:
    """Turns messages into the text and the token ids that the engine is given."""

    def __init__(self, tokenizer: Any, system_prompt: str = "", prompt_suffix: str = "") -> None:
        """Keep the tokenizer and what is put around each question.

        Args:
            tokenizer: A Hugging Face tokenizer with a chat template.
            system_prompt: Put first as a system message, unless empty.
            prompt_suffix: Appended as it is to the last message, unless empty.
        """
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._prompt_suffix = prompt_suffix

    def messages(self, question: str | Sequence[Message]) -> list[Message]:
        """The whole conversation for a question.

        Raises:
            ValueError: The question has a system message and ``system_prompt`` is set as well.
        """
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        messages = [dict(message) for message in question]
        messages[-1]["content"] += self._prompt_suffix
        if self._system_prompt:
            if messages[0]["role"] == "system":
                raise ValueError("has a system message of its own; set data.system_prompt to ''")
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    def render(self, conversations: Sequence[list[Message]]) -> list[tuple[str, tuple[int, ...]]]:
        """Text and token ids of each conversation, ready for the assistant's turn.

        The template writes every special token itself, so tokenisation adds none.
        """
        if not conversations:
            return []
        texts = [
            self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
            for conversation in conversations
        ]
        token_ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [(text, tuple(ids)) for text, ids in zip(texts, token_ids, strict=True)]
