"""`tepo-nemo plan`, as a login node runs it."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tepo_nemo import cli
from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.presets import choices, config_folder

MODELS = [name for name in choices()["model"] if name != "toy"]
HARDWARE = [name for name in choices()["hardware"] if name != "cpu"]
HEAVY = ["torch", "nemo", "nemo_aligner", "megatron", "lightning", "transformers", "tensorrt_llm"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint, no prompt set: a plan needs none."""
    monkeypatch.chdir(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def figure(text: str, row: str) -> float:
    """The first number of a row of a table."""
    return float(re.search(rf"^ +{re.escape(row)} +([\d,.]+)", text, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize(("model", "hardware"), [*product(MODELS, HARDWARE)])
def test_every_model_on_all_hardware(capsys, model, hardware):
    text = planned(capsys, f"experiment=paper_{model}", f"hardware={hardware}")
    nodes = int(hardware.removeprefix("h100x")) // 8
    assert f" on {nodes} x 8" in text
    assert figure(text, "while generating") < figure(text, "there beside what is reserved")
    words = f"experiment=paper_{model} hardware={hardware}"
    assert f"start    tepo-nemo submit {words}\n" in text
    assert (
        f"start    srun --nodes={nodes} --ntasks-per-node=8 --gpus-per-node=8 python examples/train_tepo.py "
        f"{words}\n"
    ) in text
    assert (f"start    tepo-nemo train {words}\n" in text) == (nodes == 1)


def test_without_torch_and_host(tmp_path):
    program = (
        f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
        "from tepo_nemo.cli import main\nsys.exit(main(['plan', '--fit', 'experiment=paper_qwen3_14b']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(config_folder().parent)},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "14,768,307,200" in answer.stdout


def test_the_figures_of_a_plan(capsys):
    """7.6 B parameters, a quarter on a GPU, 2 + 4 + 12 / 2 bytes each; 72 steps on 8 GPUs."""
    text = planned(capsys, "experiment=paper_qwen2_5_7b")
    assert figure(text, "model") == 7_615_616_512
    quarter = 7.6156 / 4 * 1e9 / 2**30
    for row, size in {"weights": 2, "gradients": 4, "optimizer state": 6}.items():
        assert figure(text, row) == pytest.approx(size * quarter, abs=0.01)
    assert figure(text, "72 steps, GPU-hours") == pytest.approx(
        72 * 8 * figure(text, "step, s") / 3600, rel=0.02
    )
    assert "nothing of this has been measured on a GPU" in text


def test_missing_files_are_named_and_stop_nothing(capsys, tmp_path):
    text = planned(capsys, "experiment=paper_qwen2_5_7b")
    assert f"missing  model.restore_from_path={tmp_path}/models/qwen2_5_7b: no such checkpoint" in text
    assert f"missing  data.train={tmp_path}/math/dapo_math_17k.jsonl: no such file" in text


def test_stages_have_columns_of_their_own(capsys):
    text = planned(
        capsys, "experiment=paper_qwen2_5_7b", "hardware=h100x16", "model.pipeline_model_parallel_size=4"
    )
    assert "GPU of stage 1   GPU of stage 2   GPU of stage 4" in text
    assert "4 tensor x 4 pipeline x 1 data" in text


def test_a_proposal_stands_in_the_line_that_starts_the_run(capsys):
    text = planned(capsys, "--fit", "experiment=paper_qwen2_5_7b", "output=my runs/a")
    proposed = re.search(r"^fits     (.+)$", text, re.MULTILINE)[1]
    assert "model.tensor_model_parallel_size=2" in proposed
    assert f"start    tepo-nemo train experiment=paper_qwen2_5_7b 'output=my runs/a' {proposed}\n" in text


def test_what_does_not_fit_is_shown_and_refused(capsys):
    assert cli.main(["plan", "experiment=paper_qwen2_5_7b", "hardware.device_memory_gib=40"]) == 2
    output = capsys.readouterr()
    assert "start" not in output.out and "keys and values" in output.out
    assert re.fullmatch(
        r"tepo-nemo: error: hardware.device_memory_gib=40: a rollout takes [\d.]+ GiB of a GPU, and 35.0 GiB "
        r"are there .*\n",
        output.err,
    )


def test_what_is_not_known_or_not_counted_is_said(capsys):
    text = planned(
        capsys, "experiment=paper_qwen2_5_7b", "hardware.device_memory_gib=null", "rollout.batch_size=null"
    )
    assert "hardware.device_memory_gib=null, so that nothing is compared" in text
    assert "benchmarks, which rollout.batch_size=null answers as a whole" in text
    assert "would fit" not in text and "there beside" not in text


def test_a_saved_configuration(capsys, tmp_path):
    config = load_config(["experiment=paper_qwen2_5_7b"], files=False)
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    text = planned(capsys, "--config", "saved.yaml", "rollout.batch_size=64")
    assert "start    tepo-nemo train --config saved.yaml rollout.batch_size=64\n" in text
    assert text.count("start ") == 1  # submit and srun take overrides


def test_a_plan_for_cpus_is_a_layout(capsys):
    text = planned(capsys, "experiment=toy_cpu")
    assert "2 = 2 tensor x 1 pipeline x 1 data" in text
    # 529,280 parameters of 4 + 8 bytes
    assert "6.1 MiB each, 2 kept, and 2.0 MiB of weights" in text
    assert "GiB" not in text and "start    tepo-nemo train experiment=toy_cpu\n" in text


def test_a_mistake_in_the_configuration_is_refused(capsys):
    assert cli.main(["plan", "experiment=paper_qwen2_5_7b", "model.tensor_model_parallel_size=8"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "model.num_attention_heads=28" in output.err
