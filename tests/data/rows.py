"""Rows of well-known data sets in their own schemas, and files of rows."""

import json
from pathlib import Path
from typing import Any

SKYWORK = {
    "data_source": "train-math-numinamath1.5_olympiads",
    "prompt": [{"role": "user", "content": "What is $1+1$?"}],
    "ability": "math",
    "reward_model": {"ground_truth": '["2"]', "style": "rule"},
    "extra_info": {
        "index": 7,
        "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": 3, "DeepSeek-R1-Distill-Qwen-7B": 0},
    },
}
"""Skywork-OR1-RL-Data: the accepted answers are a JSON list inside a text."""

DAPO_PROCESSED = {
    "prompt": "What is $1+1$?",
    "solution": "2",
    "data_source": "math_dapo",
    "source_prompt": [{"content": "Solve: What is $1+1$?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
"""open-r1/DAPO-Math-17k-Processed: the bare question as text."""

GSM8K = {"question": "What is 1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}

MATH = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"First $\boxed{1}$, then $1+1=\boxed{2}$.",
}
"""Hendrycks' MATH."""

MATH_500 = {
    "problem": "What is $1+1$?",
    "solution": r"It is \boxed{2}, of course.",
    "answer": "2",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/1.json",
}


def write_jsonl(path: Path, *lines: Any) -> Path:
    """A file with a line per row; texts are lines as they are."""
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def rendered(question: str) -> str:
    """A question in the template of ``tokenizer_dir``."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
