"""Servers of `completions_server` as processes, and small weights for them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import urllib3
from safetensors.torch import load_file, save_file
from support.plain_llama import PlainLlama

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("completions_server.py")
RESTART = Path(__file__).with_name("restart_server.py")
STOP, ROWS = 2, 17
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_hidden_layers": 1,
    "vocab_size": ROWS,
    "hidden_size": 16,
    "intermediate_size": 32,
}


def make_weights(folder: Path, seed: int) -> Path:
    """A folder of Hugging Face with random weights, whose distributions differ from position to position."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(seed)
    shapes = PlainLlama(folder).shapes
    weights = {
        name: 1 + 0.2 * torch.randn(shape, generator=random)
        if len(shape) == 1
        else 0.5 * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def randomized(folder: Path) -> Path:
    """The folder with other weights of the same shapes."""
    random = torch.Generator().manual_seed(0)
    path = folder / "model.safetensors"
    weights = {name: torch.randn(value.shape, generator=random) for name, value in load_file(path).items()}
    save_file(weights, path)
    return folder


@dataclass
class RunningServer:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def plan(self, **faults: int) -> None:
        """Faults to come: kind (with _ for spaces) and how often."""
        planned = {kind.replace("_", " "): times for kind, times in faults.items()}
        assert _ask("POST", f"{self.url}/faults", planned) == {}

    def seen(self) -> dict[str, Any]:
        """What was asked of it: `counts`, and `order` of what changes it."""
        return _ask("GET", f"{self.url}/seen")


def _ask(method: str, url: str, body: Any = None) -> Any:
    content = None if body is None else json.dumps(body)
    return json.loads(urllib3.PoolManager().request(method, url, body=content, retries=False).data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_process(kind: str, folder: Path, port: int) -> subprocess.Popen:
    """A process that will serve; it may not yet."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), kind, str(folder), str(port)],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def running(kind: str, folder: Path, port: int = 0) -> Iterator[RunningServer]:
    """A server while the block runs."""
    port = port or free_port()
    server = RunningServer(f"http://127.0.0.1:{port}", start_process(kind, folder, port))
    try:
        for _ in range(600):
            assert server.process.poll() is None, "the server has ended"
            try:
                server.seen()
                break
            except urllib3.exceptions.HTTPError:
                time.sleep(0.05)
        yield server
    finally:
        server.kill()
