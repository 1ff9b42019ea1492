"""What is refused of `rollout=server` before anything is started."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.errors import UserError

NO_FILES = ("model.restore_from_path=null",)


def config(*overrides: str):
    return load_config(["rollout=server", *NO_FILES, *overrides], files=False)


def test_the_preset_is_a_server_of_this_machine() -> None:
    rollout = config().rollout
    assert rollout.backend == "server" and rollout.server.urls == ["http://127.0.0.1:8000"]


@pytest.mark.parametrize("model", ["qwen2_5_7b", "qwen3_14b", "mistral_7b_instruct", "r1_distill_llama_8b"])
def test_models_of_the_paper_are_taken(model: str) -> None:
    """All of a step is asked for at once, whatever fits a copy of the model."""
    taken = load_config([f"model={model}", "hardware=h100x8", "rollout=server"], files=False)
    assert taken.rollout.backend == "server" and taken.rollout.batch_size is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["rollout.server.urls=[]"], "rollout.server.urls=[]: rollout.backend=server needs a server"),
        (["rollout.server.urls=[localhost]"], "rollout.server.urls=localhost: is no address of a server"),
        (["rollout.server.urls=['http://a:port']"], "rollout.server.urls=http://a:port: is no address"),
        (["rollout.server.urls=['ftp://a']"], "rollout.server.urls=ftp://a: is no address"),
        (["rollout.server.urls=['http://']"], "rollout.server.urls=http://: is no address"),
        (
            ["rollout.server.urls=['http://a:1','http://a:1/']"],
            "rollout.server.urls=http://a:1/: is named twice",
        ),
        (["rollout.server.attempts=0"], "rollout.server.attempts=0: must be at least 1"),
        (["rollout.server.backoff=0"], "rollout.server.backoff=0: must be greater than 0"),
        (["rollout.server.engine=sglang"], "rollout.server.engine=sglang: must be one of vllm, trtllm_serve"),
        (
            ["rollout.server.engine=trtllm_serve"],
            "rollout.server.restart_command=null: trtllm-serve reads weights when it is started",
        ),
        (
            [
                "rollout.server.engine=trtllm_serve",
                "rollout.server.restart_command=x",
                "rollout.server.sleep=true",
            ],
            "rollout.server.sleep=true: trtllm-serve cannot give its memory away",
        ),
        (
            [
                "rollout.server.engine=trtllm_serve",
                "rollout.server.restart_command=x",
                "rollout.temperature=0.6",
            ],
            "rollout.temperature=0.6: trtllm-serve tells log-probs at temperature 1",
        ),
        (["rollout.backend=megatron"], "rollout.server.urls=['http://127.0.0.1:8000']: has no effect with"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as mistake:
        config(*overrides)
    assert str(mistake.value).startswith(line) and "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.server.sleep=true",
        "rollout.server.requests_at_once=1",
        "rollout.server.handover_folder=/dev/shm/a",
        "rollout.server.restart_command=x",
    ],
)
def test_keys_of_servers_are_refused_without_servers(override: str) -> None:
    with pytest.raises(UserError, match="has no effect with rollout.backend=megatron .*rollout=server"):
        load_config([*NO_FILES, override], files=False)
