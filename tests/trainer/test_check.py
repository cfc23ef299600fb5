"""What is checked of references and teachers before anything starts."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.trainer.check import check_training

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.helpers import MakeConfig

REFERENCE, TEACHER = "algorithm.kl.reference", "algorithm.distillation.teacher"
ADDRESS = "http://a:1"


@pytest.fixture
def other_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The model in another directory."""
    shutil.copytree(model_dir, directory := tmp_path / "other")
    return directory


def with_reference(config: RunConfig, path: Path, **others: Any) -> RunConfig:
    kl = {"coefficient": 0.1, "reference": {"path": str(path)}}
    return changed(config, {"algorithm": {"kl": kl}, **others})


def with_teacher(
    config: RunConfig, path: Path, others: dict[str, Any] | None = None, **teacher: Any
) -> RunConfig:
    distillation = {"coefficient": 1, "teacher": {"path": str(path), **teacher}}
    return changed(config, {"algorithm": {"distillation": distillation}, **(others or {})})


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


@pytest.mark.parametrize("engine", ["", "local", "sglang"])
def test_models_that_suit_are_accepted(
    make_config: MakeConfig, other_dir: Path, engine: str
) -> None:
    config = make_config(server={"count": 2}, colocated=False)
    servers = [ADDRESS] if engine == "sglang" else []
    check_training(with_teacher(config, other_dir, engine=engine, servers=servers), 1)
    check_training(with_reference(config, other_dir), 1)
    if engine == "sglang":  # its weights are with the servers
        (other_dir / "model.safetensors").unlink()
        check_training(with_teacher(config, other_dir, engine=engine, servers=servers), 1)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"tensor": 3}, "parallel.tensor: must divide the model's num_attention_heads = "),
        ({"pipeline": 2, "virtual_pipeline": 4}, "parallel.pipeline: pipeline × virtual_pipeline"),
        ({"expert": 2}, "parallel.expert: needs a model with experts, got 2"),
    ],
)
def test_a_layout_into_which_the_model_does_not_divide_is_refused(
    make_config: MakeConfig, parallel: dict[str, int], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        check_training(changed(make_config(), {"parallel": parallel}), 6)


def test_a_directory_must_hold_a_model_and_its_tokenizer(
    make_config: MakeConfig, other_dir: Path, tmp_path: Path
) -> None:
    config, none = make_config(), tmp_path / "none"
    assert refusal(with_reference(config, none)).startswith(f"{REFERENCE}.path: no such directory")
    assert refusal(with_teacher(config, none)).startswith(f"{TEACHER}.path: no such directory")
    # The weights of a model in the trainer are on every node, its tokenizer on the first.
    (other_dir / "model.safetensors").unlink()
    for options in ({}, {"owns_files": False}):
        line = refusal(with_reference(config, other_dir), **options)
        assert line.startswith(f"{REFERENCE}.path: '{other_dir}' has no *.safetensors; save")
    check_training(with_teacher(config, none, engine="local"), 1, owns_files=False)
    (other_dir / "tokenizer_config.json").unlink()
    teacher = with_teacher(config, other_dir, engine="sglang", servers=[ADDRESS])
    assert refusal(teacher).startswith(
        f"{TEACHER}.path: '{other_dir}' has no tokenizer_config.json"
    )


@pytest.mark.parametrize("engine", ["reference", "", "local", "sglang"])
def test_another_vocabulary_is_refused_by_its_first_token(
    make_config: MakeConfig, other_dir: Path, engine: str
) -> None:
    content = json.loads((other_dir / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other_dir / "tokenizer.json").write_text(json.dumps(content))
    config = make_config()
    if engine == "reference":
        config, key = with_reference(config, other_dir), REFERENCE
    else:
        servers = [ADDRESS] if engine == "sglang" else []
        config, key = with_teacher(config, other_dir, engine=engine, servers=servers), TEACHER
    assert refusal(config).startswith(f"{key}.path: must have the policy's vocabulary, got id ")
    check_training(changed(config, {"replay": {"dumps": "dumps"}}), 1)


def test_what_is_not_used_is_not_checked(make_config: MakeConfig, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    algorithm = {"kl": {"reference": {"path": none}}, "distillation": {"teacher": {"path": none}}}
    check_training(changed(make_config(), {"algorithm": algorithm}), 1)


@pytest.mark.parametrize("address", ["a:1", "http://user@a:1"])
def test_addresses_of_teachers_follow_the_rules_of_servers(
    make_config: MakeConfig, other_dir: Path, address: str
) -> None:
    line = refusal(with_teacher(make_config(), other_dir, engine="sglang", servers=[address]))
    assert line.startswith(f"{TEACHER}.servers: must ")


def test_the_teacher_must_have_as_many_tokens_as_are_asked_of_it(
    make_config: MakeConfig, other_dir: Path
) -> None:
    vocab_size = json.loads((other_dir / "config.json").read_text())["vocab_size"]
    for top_k, is_refused in ((vocab_size, False), (vocab_size + 1, True)):
        distillation = {
            "coefficient": 1,
            "loss": "top_k",
            "top_k": top_k,
            "teacher": {"path": str(other_dir), "engine": "local"},
        }
        algorithm = {"distillation": distillation}
        chunked = changed(make_config(), {"ops": {"logits_chunk_tokens": 16}})
        config = changed(chunked, {"algorithm": algorithm})
        if is_refused:
            assert refusal(config) == (
                "algorithm.distillation.top_k: must be at most the teacher's vocab_size "
                f"{vocab_size}, got {top_k}; lower it"
            )
        else:
            check_training(config, 1)


@pytest.mark.parametrize("field", ["rope_theta", "intermediate_size"])
def test_a_reference_that_gets_the_policy_s_weights_must_be_such_a_model(
    make_config: MakeConfig, other_dir: Path, field: str
) -> None:
    content = json.loads((other_dir / "config.json").read_text())
    rope = content.get("rope_parameters")
    if field == "rope_theta" and isinstance(rope, dict):
        content["rope_parameters"] = {**rope, field: 2 * rope[field]}
    else:
        content[field] *= 2
    (other_dir / "config.json").write_text(
        json.dumps({**content, "max_position_embeddings": content["max_position_embeddings"] * 2})
    )
    for update_every in (0, 5):
        kl = {"coefficient": 1, "reference": {"path": str(other_dir), "update_every": update_every}}
        config = changed(make_config(), {"algorithm": {"kl": kl}})
        if update_every:
            line = refusal(config)
            assert line.startswith(f"{REFERENCE}.path: must be a model like the policy with ")
            assert f"got another {field} in '{other_dir}'" in line
        else:
            check_training(config, 1)


def test_a_server_of_the_policy_is_no_teacher(make_config: MakeConfig, other_dir: Path) -> None:
    config = make_config(servers=(ADDRESS, "http://b:1"))
    line = refusal(with_teacher(config, other_dir, engine="sglang", servers=[ADDRESS]))
    assert line.startswith(f"{TEACHER}.servers: must not be in rollout.servers")
    assert ADDRESS in line


def test_the_teacher_must_hold_the_longest_response(
    make_config: MakeConfig, other_dir: Path
) -> None:
    for num_tokens, is_refused in ((217, False), (218, True)):  # and 32 of the prompt
        rollout = {"max_response_tokens": num_tokens}
        budget = {"train": {"max_tokens_per_micro_batch": 512}, "rollout": rollout}
        config = with_teacher(make_config(), other_dir, budget, engine="sglang", servers=[ADDRESS])
        if is_refused:
            assert refusal(config).startswith(f"{TEACHER}.path: its 256 positions must hold")
        else:
            check_training(config, 1)


@pytest.mark.parametrize("key", [TEACHER, REFERENCE])
def test_a_frozen_model_in_the_trainer_must_hold_the_longest_response(
    make_config: MakeConfig, other_dir: Path, key: str
) -> None:
    content = json.loads((other_dir / "config.json").read_text())
    (other_dir / "config.json").write_text(json.dumps({**content, "max_position_embeddings": 64}))
    with_model = with_teacher if key == TEACHER else with_reference
    for num_tokens, is_refused in ((32, False), (33, True)):  # and 32 of the prompt
        config = changed(make_config(), {"rollout": {"max_response_tokens": num_tokens}})
        if is_refused:
            assert refusal(with_model(config, other_dir)) == (
                f"{key}.path: its 64 positions must hold data.max_prompt_tokens + "
                "rollout.max_response_tokens = 65; lower one of them, or choose another model"
            )
        else:
            check_training(with_model(config, other_dir), 1)


def test_servers_can_be_left_out_only_to_serve_them(
    make_config: MakeConfig, other_dir: Path
) -> None:
    line = refusal(with_teacher(make_config(), other_dir, engine="sglang"))
    assert line == (
        "algorithm.distillation.teacher.servers: must be given with engine: sglang, got none; "
        "start them with serve --teacher (docs/rollout.md), or change engine"
    )
    with pytest.raises(ValueError, match="servers must be left out unless engine is sglang"):
        with_teacher(make_config(), other_dir, engine="local", servers=[ADDRESS])


def test_a_local_teacher_must_be_a_model_that_the_engine_has(
    make_config: MakeConfig, other_dir: Path
) -> None:
    content = json.loads((other_dir / "config.json").read_text())
    (other_dir / "config.json").write_text(json.dumps({**content, "model_type": "gemma"}))
    line = refusal(with_teacher(make_config(), other_dir, engine="local"))
    assert line.startswith(f"{TEACHER}.path: with {TEACHER}.engine=local, model_type must be")
