"""What is checked of references and teachers before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.trainer.check import check_training
from tests.engine.helpers import MakeConfig

REFERENCE, TEACHER = "algorithm.kl.reference", "algorithm.distillation.teacher"
ADDRESS = "http://a:1"
SERVED = {"engine": "sglang", "servers": [ADDRESS]}
FROZEN: list[tuple[str, dict[str, Any]]] = [
    (REFERENCE, {}),
    (TEACHER, {}),
    (TEACHER, {"engine": "local"}),
    (TEACHER, SERVED),
]
"""Every place of a frozen model."""
every_place = pytest.mark.parametrize(
    ("key", "fields"), FROZEN, ids=["reference", "teacher", "local engine", "servers"]
)


@pytest.fixture
def other_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The model in another directory."""
    shutil.copytree(model_dir, directory := tmp_path / "other")
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **changes}))


def with_frozen(
    config: RunConfig,
    key: str,
    path: Path,
    fields: dict[str, Any],
    algorithm: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> RunConfig:
    """The configuration with a reference or a teacher, and other changes."""
    name = "reference" if key == REFERENCE else "teacher"
    section = {"coefficient": 1, name: {"path": str(path), **fields}, **(algorithm or {})}
    place = "kl" if key == REFERENCE else "distillation"
    return changed(config, {"algorithm": {place: section}, **sections})


def changed(config: RunConfig, sections: dict[str, dict[str, Any]]) -> RunConfig:
    content = config.model_dump(mode="json")
    for name, values in sections.items():
        content[name] |= values
    return RunConfig.model_validate(content)


def refusal(config: RunConfig, **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        check_training(config, 1, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@every_place
def test_models_that_suit_are_accepted(
    make_config: MakeConfig, other_dir: Path, key: str, fields: dict[str, Any]
) -> None:
    config = make_config(server={"count": 2}, colocated=False)
    check_training(with_frozen(config, key, other_dir, fields), 1)
    if fields == SERVED:  # its weights are with the servers
        (other_dir / "model.safetensors").unlink()
        check_training(with_frozen(config, key, other_dir, fields), 1)


@pytest.mark.parametrize(
    ("section", "values", "text"),
    [
        ("parallel", {"tensor": 3}, "tensor: must divide the model's num_attention_heads = "),
        ("parallel", {"pipeline": 2, "virtual_pipeline": 4}, "pipeline: pipeline × virtual_"),
        ("parallel", {"expert": 2}, "expert: needs a model with experts, got 2"),
        ("algorithm", {"router_replay": "rollout"}, "router_replay: must be none for a model wit"),
    ],
)
def test_settings_that_the_model_does_not_have_or_divide_into_are_refused(
    make_config: MakeConfig, section: str, values: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.{text}"):
        check_training(changed(make_config(), {section: values}), 6)


@pytest.mark.parametrize(
    ("key", "fields", "lacks", "owns_files", "words"),
    [
        (REFERENCE, {}, "", True, "no such directory"),
        (TEACHER, {}, "", True, "no such directory"),
        # The weights of a model in the trainer are on every node, its tokenizer on the first.
        (REFERENCE, {}, "model.safetensors", True, "has no *.safetensors"),
        (REFERENCE, {}, "model.safetensors", False, "has no *.safetensors"),
        (TEACHER, SERVED, "tokenizer_config.json", True, "has no tokenizer_config.json"),
        (TEACHER, {"engine": "local"}, "", False, None),
    ],
)
def test_a_directory_must_hold_a_model_and_its_tokenizer(
    make_config: MakeConfig,
    other_dir: Path,
    key: str,
    fields: dict[str, Any],
    lacks: str,
    owns_files: bool,
    words: str | None,
) -> None:
    (other_dir / lacks).unlink() if lacks else shutil.rmtree(other_dir)
    config = with_frozen(make_config(), key, other_dir, fields)
    if words is None:
        check_training(config, 1, owns_files=owns_files)
        return
    line = refusal(config, owns_files=owns_files)
    assert line.startswith(f"{key}.path: ")
    assert words in line


@every_place
def test_another_vocabulary_is_refused_by_its_first_token(
    make_config: MakeConfig, other_dir: Path, key: str, fields: dict[str, Any]
) -> None:
    content = json.loads((other_dir / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other_dir / "tokenizer.json").write_text(json.dumps(content))
    config = with_frozen(make_config(), key, other_dir, fields)
    assert refusal(config).startswith(f"{key}.path: must have the policy's vocabulary, got id ")
    check_training(changed(config, {"replay": {"dumps": "dumps"}}), 1)


def test_what_is_not_used_is_not_checked(make_config: MakeConfig, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    algorithm = {"kl": {"reference": {"path": none}}, "distillation": {"teacher": {"path": none}}}
    check_training(changed(make_config(), {"algorithm": algorithm}), 1)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (["a:1"], "must "),
        (["http://user@a:1"], "must "),
        (["http://b:1"], "must not be in rollout.servers, whose weights change, got http://b:1"),
        ([], "must be given with engine: sglang"),  # left out only to serve them
    ],
)
def test_servers_of_a_teacher_are_others_than_the_policy_s_by_the_same_rules(
    make_config: MakeConfig, other_dir: Path, servers: list[str], words: str
) -> None:
    config = make_config(servers=(ADDRESS, "http://b:1"))
    line = refusal(with_frozen(config, TEACHER, other_dir, {**SERVED, "servers": servers}))
    assert line.startswith(f"{TEACHER}.servers: {words}")
    with pytest.raises(ValueError, match="servers must be left out unless engine is sglang"):
        with_frozen(config, TEACHER, other_dir, {**SERVED, "engine": "local"})


def test_the_teacher_must_have_as_many_tokens_as_are_asked_of_it(
    make_config: MakeConfig, other_dir: Path
) -> None:
    vocab_size = json.loads((other_dir / "config.json").read_text())["vocab_size"]

    def asking_for(top_k: int) -> RunConfig:
        chunks = {"logits_chunk_tokens": 16}
        top = {"loss": "top_k", "top_k": top_k}
        engine = {"engine": "local"}
        return with_frozen(make_config(), TEACHER, other_dir, engine, algorithm=top, ops=chunks)

    check_training(asking_for(vocab_size), 1)
    line = refusal(asking_for(vocab_size + 1))
    assert line.startswith("algorithm.distillation.top_k: must be at most ")
    assert f"vocab_size {vocab_size}, got {vocab_size + 1}" in line


@pytest.mark.parametrize("field", ["rope_theta", "intermediate_size"])
def test_a_reference_that_gets_the_policy_s_weights_must_be_such_a_model(
    make_config: MakeConfig, other_dir: Path, field: str
) -> None:
    content = json.loads((other_dir / "config.json").read_text())
    rope = content.get("rope_parameters")
    if field == "rope_theta" and isinstance(rope, dict):
        other = {"rope_parameters": {**rope, field: 2 * rope[field]}}
    else:
        other = {field: 2 * content[field]}
    positions = 2 * content["max_position_embeddings"]  # which may differ
    edit_config(other_dir, **other, max_position_embeddings=positions)
    check_training(with_frozen(make_config(), REFERENCE, other_dir, {}), 1)
    line = refusal(with_frozen(make_config(), REFERENCE, other_dir, {"update_every": 5}))
    assert line.startswith(f"{REFERENCE}.path: must be a model like the policy with ")
    assert f"got another {field} in '{other_dir}'" in line


@pytest.mark.parametrize(
    ("key", "fields", "num_positions", "max_tokens"),
    # And 32 of the prompt; a server reserves seven.
    [(REFERENCE, {}, 64, 32), (TEACHER, {}, 64, 32), (TEACHER, SERVED, 256, 217)],
)
def test_a_frozen_model_must_hold_the_longest_response(
    make_config: MakeConfig,
    other_dir: Path,
    key: str,
    fields: dict[str, Any],
    num_positions: int,
    max_tokens: int,
) -> None:
    edit_config(other_dir, max_position_embeddings=num_positions)

    def sampling(num_tokens: int) -> RunConfig:
        rollout, budget = {"max_response_tokens": num_tokens}, {"max_tokens_per_micro_batch": 512}
        sections = {"rollout": rollout, "train": budget}
        return with_frozen(make_config(), key, other_dir, fields, **sections)

    check_training(sampling(max_tokens), 1)
    line = refusal(sampling(max_tokens + 1))
    assert line.startswith(f"{key}.path: its {num_positions} positions must hold ")
    assert f"rollout.max_response_tokens = {max_tokens + 33}" in line


def test_a_local_teacher_must_be_a_model_that_the_engine_has(
    make_config: MakeConfig, other_dir: Path
) -> None:
    edit_config(other_dir, model_type="gemma")
    line = refusal(with_frozen(make_config(), TEACHER, other_dir, {"engine": "local"}))
    assert line.startswith(f"{TEACHER}.path: with {TEACHER}.engine=local, model_type must be")
