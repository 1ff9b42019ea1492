import subprocess
import sys

MODULES = """
tepo_nemo.runs.files tepo_nemo.runs.directory tepo_nemo.runs.metrics tepo_nemo.runs.summary
tepo_nemo.runs.samples tepo_nemo.runs.console tepo_nemo.runs.plots tepo_nemo.runs.tensorboard
tepo_nemo.data.prompts tepo_nemo.data.order tepo_nemo.data.toy tepo_nemo.data.char_tokenizer
tepo_nemo.data.prepare tepo_nemo.data.overlap
tepo_nemo.reward.result tepo_nemo.reward.exact_answer tepo_nemo.reward.grading
""".split()


def test_runs_data_and_reward_import_neither_torch_nor_the_stack():
    """They work on a login node, also inside a SLURM job."""  # faults 33
    heavy = ["torch", "transformers", "tensorflow", "nemo", "nemo_aligner", "megatron", "pytorch_lightning"]
    code = (
        f"import sys; import {', '.join(MODULES)}; print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.stdout == "[]\n", result.stderr
