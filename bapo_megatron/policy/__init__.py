"""The policy: a Megatron-core GPTModel that is read from and written to Hugging Face weights.

Megatron decorates functions with ``torch.compile`` when it is imported, which loads the compiler: a
third of a process's start. A CPU build of torch does without: it calls none of them.
"""

from unittest import mock

import torch

if torch.version.cuda is None:
    with mock.patch.object(torch, "compile", lambda function: function):
        import megatron.core  # noqa: F401
