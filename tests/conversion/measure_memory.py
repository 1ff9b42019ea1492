"""Measures peak memory and speed of `tepo-nemo convert`, both ways, on a model of 1.24 billion weights.

    python tests/conversion/measure_memory.py FOLDER

makes a model of the sizes of Llama 3.2 1B with random bf16 weights in FOLDER (which has to have 12 GB left),
converts it to a NeMo folder and back, compares every weight, and prints a line a conversion.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.weights import huggingface_shapes

GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def make_model(folder: Path) -> int:
    """Write the model in files of a few layers; its size in bytes."""
    folder.mkdir(parents=True)
    text = json.dumps(CONFIG)
    (folder / "config.json").write_text(text)
    shapes = huggingface_shapes(Architecture.of(text.encode(), "config.json"))
    names, place, size = list(shapes), {}, 0
    for first in range(0, len(names), 40):
        part = names[first : first + 40]
        tensors = {name: torch.randn(shapes[name], dtype=torch.bfloat16) for name in part}
        size += sum(tensor.nbytes for tensor in tensors.values())
        file = f"model-{first:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return size


# Of this program alone: what the system keeps of an ended child counts its parent, too.
CONVERT = """
import sys
from tepo_nemo import cli
code = cli.main(["convert", *sys.argv[1:]])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
sys.exit(code)
"""


def measure(source: Path, output: Path, size: int) -> None:
    """Convert in a process of its own, and print what it took."""
    started = time.monotonic()
    command = [sys.executable, "-c", CONVERT, str(source), str(output)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    said, peak = answer.stdout.splitlines()
    print(
        f"{said}\n  {seconds:.1f} s with the start of Python, at most {int(peak) * 1024 / GIB:.2f} GiB "
        f"resident; the model has {size / GIB:.2f} GiB",
        flush=True,
    )


def compare(one: Path, other: Path) -> None:
    """Every weight to the bit."""
    places = [
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for folder in (one, other)
    ]
    assert places[0].keys() == places[1].keys()
    for name in places[0]:
        values = []
        for folder, place in zip((one, other), places, strict=True):
            with safe_open(folder / place[name], "pt") as opened:
                values.append(opened.get_tensor(name))
        assert torch.equal(*values), name
    print(f"all {len(places[0])} weights came back to the bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    root = parser.parse_args().folder
    size = make_model(root / "model")
    try:
        measure(root / "model", root / "nemo", size)
        measure(root / "nemo", root / "back", size)
        compare(root / "model", root / "back")
    finally:
        for name in ("model", "nemo", "back"):
            shutil.rmtree(root / name, ignore_errors=True)
        if not os.listdir(root):
            root.rmdir()


if __name__ == "__main__":
    main()
