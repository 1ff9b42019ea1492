"""A dumped rollout gives, from the same weights, the same updates as the step that it was dumped by."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_run import PROMPTS, Recording, make_objective, make_run, world_group
from support.torch_policy import VOCAB_SIZE, TorchPolicy

from tepo_nemo.errors import UserError
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.training.dumps import BAD_UPDATES_KEPT, RolloutDumps, find_dumps, read_dump, write_dump
from tepo_nemo.training.replay import read_dumps

# What a rollout goes through: groups alone, the whole step's tokens and a reference policy, draws by step.
METHODS = {
    "tepo": dict(preset="tepo"),
    "erpo": dict(preset="erpo"),
    "clip_cov": dict(preset="clip_cov", covariance_low=0.05, covariance_high=2.0, selected_fraction=0.1),
}


class Dumping(Recording):
    """Writes every rollout down."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def rollout(self, step, collected):
        super().rollout(step, collected)
        write_dump(self.folder / f"step_{step:06d}", step, collected, {"vocab_size": VOCAB_SIZE})


def first_right(prompt, response_text, gold, metadata):
    """Some prompts have no spread; grading fails now and then."""
    if response_text.startswith("c"):
        raise RuntimeError("a verifier that fails")
    right = float(gold in response_text and prompt != "1")
    return RewardResult(right + 0.25, "ok", response_text[:1], right)


def train(method, folder=None, read_from=None, **changes):
    """Told metrics but times, weights, and the recording."""
    policy = TorchPolicy(make_objective(**METHODS[method]), momentum=0.9, group=world_group())
    settings = dict(reward=first_right, dynamic_sampling=True, max_steps=3) | changes
    run = make_run(policy, read_from=read_from, **settings)
    if folder is not None:
        run.trainer._recorder = run.recording = Dumping(folder)
    if read_from is not None:
        run.trainer.step = min(read_from) - 1
    run.trainer.fit()
    told = [{key: row[key] for key in row if not key.startswith("time/")} for row in run.recording.metrics]
    return repr(told), policy.weights(), run.recording


def unable(*_):
    raise AssertionError("a replay asks for no reward")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_trained_again_to_the_bit(tmp_path, method):
    """Three steps with dynamic sampling, from their dumps alone."""
    told, weights, recording = train(method, tmp_path)
    assert any(len(each.generated.rollouts.prompts) > 4 for each in recording.collected.values())
    folders = {step: folder for step, (folder, _) in read_dumps(tmp_path).items()}
    assert sorted(folders) == [1, 2, 3]
    again, other_weights, other = train(method, read_from=folders, reward=unable, prompts=PROMPTS[:1])
    assert told == again and torch.equal(weights, other_weights)
    for kept, other_kept in zip(recording.kept, other.kept, strict=True):
        assert kept.texts == other_kept.texts and kept.results == other_kept.results


def replay_here(rank, world_size, folder):
    return train("erpo", read_from={1: folder}, max_steps=1)[:2]


def test_two_ranks_train_on_it_as_one_does(worlds, tmp_path):
    _, weights, recording = train("erpo", tmp_path, max_steps=1)
    for _, other in worlds(2).run(replay_here, tmp_path / "step_000001"):
        torch.testing.assert_close(other, weights, rtol=0, atol=1e-9)


def test_a_single_step_keeps_its_number(tmp_path):
    """And with it what depends on the number: the learning rate of a warm-up."""
    _, _, recording = train("tepo", tmp_path, warmup_steps=9)
    (folder, dump) = read_dumps(tmp_path / "step_000002")[2]
    _, _, other = train("tepo", read_from={2: folder}, max_steps=2, warmup_steps=9)
    (row,) = other.metrics
    for key in ("step", "consumed_prompts", "lr", "reward/mean", "response_length/mean"):
        assert row[key] == recording.metrics[1][key], key


def test_a_step_without_groups_is_one_again(tmp_path):
    settings = dict(reward=lambda *_: RewardResult(1.0, "ok"), max_steps=1)
    told, _, _ = train("tepo", tmp_path, **settings)
    again, _, _ = train("tepo", read_from={1: tmp_path / "step_000001"}, **settings)
    assert told == again and "'tokens/trained': 0" in told


def test_the_rollout_of_a_bad_update_is_the_whole_step(tmp_path):
    """The newest are kept; a dump that cannot be written costs the run nothing."""
    _, _, recording = train("tepo")
    said = []
    run = RunDirectory(tmp_path)
    dumps = RolloutDumps(run, every=2, about={"vocab_size": VOCAB_SIZE}, report=said.append)
    for step, collected in recording.collected.items():
        dumps.rollout(step, collected)
        for update in (1, 2):
            dumps.bad_update(step, update, "loss not finite", collected)
    assert [folder.name for folder in find_dumps(tmp_path / "rollouts")] == ["step_000002"]
    names = sorted(path.name for path in (tmp_path / "bad_updates").iterdir())
    assert len(names) == BAD_UPDATES_KEPT and names[-1] == "step_000003_update_002"
    dump = read_dump(run.bad_update(3, 2))
    assert (dump.step, dump.about["update"], dump.about["why"]) == (3, 2, "loss not finite")
    assert dump.collected.consumed_prompts == recording.collected[3].consumed_prompts
    tokens = dump.collected.kept.rollouts.generation.tokens
    assert torch.equal(tokens, recording.collected[3].kept.rollouts.generation.tokens)
    assert not said
    shutil.rmtree(tmp_path / "bad_updates")
    (tmp_path / "bad_updates").write_text("a file in the way")
    dumps.bad_update(3, 1, "", recording.collected[3])
    assert len(said) == 1 and "could not be written" in said[0]


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    train("tepo", folder, max_steps=1)
    return folder / "step_000001"


def change_numbers(folder, **changes):
    numbers = json.loads((folder / "rollout.json").read_text()) | changes
    (folder / "rollout.json").write_text(json.dumps({k: v for k, v in numbers.items() if v is not None}))


def change_tensors(folder, **changes):
    tensors = load_file(folder / "rollout.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "rollout.safetensors")


def cut(folder):
    content = (folder / "rollout.safetensors").read_bytes()
    (folder / "rollout.safetensors").write_bytes(content[:-7])


BREAKS = {
    "no tensors": (lambda folder: (folder / "rollout.safetensors").unlink(), "No such file"),
    "cut off": (cut, "cannot be used"),
    "no JSON": (lambda folder: (folder / "rollout.json").write_text("{"), "is not JSON"),
    "another format": (lambda folder: change_numbers(folder, format=9), "format is 9"),
    "no prompts": (lambda folder: change_numbers(folder, prompts=None), "lacks 'prompts'"),
    "other groups": (lambda folder: change_numbers(folder, kept_groups=[77]), "does not have"),
    "fewer texts": (lambda folder: change_numbers(folder, texts=["a"]), "numbers of responses"),
    "a strange reward": (
        lambda folder: change_numbers(folder, results=[{"value": 1.0, "status": "fine"}]), "'fine'"
    ),
    "no lengths": (lambda folder: change_tensors(folder, **{"generation.lengths": None}), "lengths"),
    "negative lengths": (
        lambda folder: change_tensors(
            folder, **{"generation.lengths": -load_file(folder / "rollout.safetensors")["generation.lengths"]}
        ),
        "do not belong together",
    ),
    "floating-point tokens": (
        lambda folder: change_tensors(
            folder,
            **{"generation.tokens": load_file(folder / "rollout.safetensors")["generation.tokens"].float()},
        ),
        "stands for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_dump_is_refused_in_one_line(dump, tmp_path, name):
    folder = tmp_path / "broken"
    shutil.copytree(dump, folder)
    damage, text = BREAKS[name]
    damage(folder)
    with pytest.raises(UserError) as refused:
        read_dumps(folder)
    assert text in str(refused.value) and str(refused.value).startswith(f"replay={folder}: ")
    assert "\n" not in str(refused.value)


def test_a_folder_without_dumps_and_one_with_gaps_are_refused(dump, tmp_path):
    with pytest.raises(UserError, match="holds no rollout"):
        read_dumps(tmp_path)
    for step in (1, 3):
        shutil.copytree(dump, tmp_path / f"step_{step:06d}")
        change_numbers(tmp_path / f"step_{step:06d}", step=step)
    with pytest.raises(UserError, match="step_000003 is of step 3 and follows step 1"):
        read_dumps(tmp_path)
