"""Why a draft of n-grams has one token: what SGLang's verification makes of a padded one."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.exhaustive

_DRAFTS = """
import json, sys
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

size = int(sys.argv[1])
corpus = NgramCorpus(draft_token_num=size)
tokens, mask = corpus.batch_get(["request"], [[7, 8, 9]], [3])
print(json.dumps([tokens.tolist(), mask.reshape(size, size).tolist()]))
"""


def _first_token_V(p_V: np.ndarray, siblings: list[int]) -> np.ndarray:
    """The distribution that ``TreeSpeculativeSamplingTargetOnly`` gives the first token.

    It goes through the drafts of a position, with one uniform coin: a draft is accepted once the
    sum of their probabilities exceeds the coin. After that it samples what was no draft.
    """
    sampled_V, total = np.zeros_like(p_V), 0.0
    for token in siblings:
        before, total = total, total + p_V[token]
        sampled_V[token] += min(total, 1.0) - min(before, 1.0)
    rest_V = p_V.copy()
    rest_V[siblings] = 0.0
    return sampled_V + (1.0 - min(total, 1.0)) * rest_V / rest_V.sum()


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize(
    ("num_draft_tokens", "expected_V"),
    [(2, [0.1, 0.3, 0.6]), (8, [0.7, 0.1, 0.2])],  # 8 − 1 copies: 7 × 0.1
)
def test_copies_of_token_0_that_fill_up_a_draft_are_each_accepted(
    num_draft_tokens: int, expected_V: list[float]
) -> None:
    command = [sys.executable, "-c", _DRAFTS, str(num_draft_tokens)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    tokens, mask = json.loads(answer.stdout.splitlines()[-1])
    # Nothing was seen before, so there is no draft: the last token, and children of it.
    assert tokens == [9] + [0] * (num_draft_tokens - 1)
    assert all(sum(row) == 2 and row[0] for row in mask[1:])
    sampled_V = _first_token_V(np.array([0.1, 0.3, 0.6]), tokens[1:])
    np.testing.assert_allclose(sampled_V, expected_V, rtol=1e-12)
