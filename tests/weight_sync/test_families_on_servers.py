"""Real servers compute the models of families, whose weights come from a trainer alone."""

import functools
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.distributed_launch import run_ranks
from tests.engine.sglang.servers import make_server, running
from tests.policy.tiny_models import VOCAB_SIZE, make_model
from tests.weight_sync.ranks import sync_changed

pytestmark = [
    *(pytest.mark.sglang, pytest.mark.distributed, pytest.mark.slow, pytest.mark.exhaustive)
]

FAMILIES = ("gemma3_text", "glm4_moe", "llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe")
"""Those that SGLang's CPU build computes."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_computes_with_synced_weights_as_the_trainer_does(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "model", max_position_embeddings=512)
    words = WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(model)
    server = make_server(model, tmp_path / "server", awaits_weights=True)
    verified = {"verify": "every", "verify_tolerance": 1e-4, "timeout_s": 60, "method": "tensor"}
    with running(server):
        sync = functools.partial(sync_changed, factors=(1.5, 0.7))
        addresses, rollout = (server.address,), {"weight_sync": verified}
        for synced in run_ranks(sync, 1, model, addresses, rollout, tmp_path)[0]:
            assert (synced.error, synced.lost) == ("", {})
