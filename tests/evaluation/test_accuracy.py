"""What the answers of an evaluation depend on, and their score by hand."""

import pytest
import torch
from support.rollouts import make_prompt
from support.tiny_run import PROMPTS, letter_reward, make_objective
from support.torch_policy import STOP, TorchPolicy, spell

from tepo_nemo.evaluation.accuracy import EvaluationSet, evaluate
from tepo_nemo.evaluation.records import records_of
from tepo_nemo.evaluation.scores import average
from tepo_nemo.rollout.batch import concatenate_scored
from tepo_nemo.rollout.protocol import Generation
from tepo_nemo.rollout.sampling import row_keys
from tepo_nemo.rollout.scoring import Grader


class Host:
    """Remembers the requests and stops at once."""

    is_main = True

    def __init__(self):
        self.requests = []

    def infer(self, request):
        self.requests.append(request)
        rows = len(request)
        ones = torch.ones(rows, dtype=torch.int64)
        return Generation(torch.full((rows, 1), STOP), ones, ones.bool(), torch.zeros(rows, 1))

    def broadcast_from_main(self, value):
        return value


def ask(prompts, *, name="test", seed=5, samples=2, temperature=0.6):
    host = Host()
    grader = Grader(host, letter_reward, lambda tokens: "")
    batches = evaluate(
        host.infer,
        grader,
        EvaluationSet(name, prompts, samples, temperature),
        seed=seed,
        max_response_length=9,
    )
    assert len(list(batches)) == 1
    (request,) = host.requests
    keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, torch.device("cpu")).tolist()
    return request, keys


def test_a_set_is_asked_as_it_says():
    request, keys = ask([make_prompt(0), make_prompt(1)], samples=3)
    assert request.prompt_tokens == [[0, 1]] * 3 + [[1000, 1001]] * 3
    assert (request.temperature, request.max_response_lengths) == (0.6, [9] * 6)
    assert len(set(keys)) == 6


def test_problems_keep_their_noise_whatever_else_is_asked():
    """Common random numbers: a function of seed, set and problem."""
    _, keys = ask([make_prompt(0), make_prompt(1), make_prompt(2)])
    _, again = ask([make_prompt(2), make_prompt(0)])
    assert again == keys[4:6] + keys[0:2]
    for other in (dict(name="other"), dict(seed=6)):
        assert not set(ask([make_prompt(0)], **other)[1]) & set(keys)


def score(policy, prompts_at_once=None, **changes):
    settings = dict(name="letters", prompts=PROMPTS, samples=8, temperature=0.6) | changes
    policy.prepare_for_inference()
    batches = evaluate(
        policy.infer,
        Grader(policy, letter_reward, spell),
        EvaluationSet(**settings),
        seed=1,
        max_response_length=5,
        prompts_at_once=prompts_at_once,
    )
    scored = concatenate_scored(list(batches))
    policy.finish_inference()
    return scored


@pytest.mark.parametrize("prompts_at_once", [1, 4, 6, 7])
def test_batches_are_a_matter_of_memory_alone(prompts_at_once):
    whole, parts = score(TorchPolicy(make_objective())), score(TorchPolicy(make_objective()), prompts_at_once)
    assert parts.texts == whole.texts
    assert parts.results == whole.results
    assert parts.rollouts.groups.tolist() == whole.rollouts.groups.tolist()


def test_a_part_of_a_set_is_answered_as_in_the_whole():
    """An evaluation that goes on after an interruption asks only what is left."""
    whole = score(TorchPolicy(make_objective()))
    assert score(TorchPolicy(make_objective()), prompts=PROMPTS[2:]).texts == whole.texts[16:]


def test_a_batch_is_told_before_the_next_but_one_is_generated():
    """What is graded is written down early: an interruption loses two batches at most."""
    host = Host()
    evaluation = EvaluationSet("test", [make_prompt(n) for n in range(4)], 1, 0.0)
    batches = evaluate(
        host.infer,
        Grader(host, letter_reward, lambda tokens: ""),
        evaluation,
        seed=1,
        max_response_length=9,
        prompts_at_once=1,
    )
    assert [len(host.requests) for _ in batches] == [2, 3, 4, 4]


def test_the_same_weights_give_the_same_answers_and_others_do_not():
    first, again, other = (TorchPolicy(make_objective(), seed=seed) for seed in (0, 0, 1))
    assert score(first).texts == score(again).texts == score(first).texts
    assert score(first).texts != score(other).texts


def test_the_score_of_a_policy_by_hand():
    scored = score(TorchPolicy(make_objective()))
    golds = [prompt.prompt.gold for prompt in PROMPTS for _ in range(8)]
    right = [
        gold in text and not text.startswith("c") for gold, text in zip(golds, scored.texts, strict=True)
    ]
    assert 0 < sum(right) < 48
    assert average(records_of("letters", scored)) == pytest.approx(sum(right) / 48)


def test_greedy_answers_are_the_most_likely_tokens():
    policy = TorchPolicy(make_objective())
    scored = score(policy, temperature=0, samples=2)
    generation = scored.rollouts.generation
    for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(2)):
        sequence, answer = list(prompt.tokens), []
        while len(answer) < 5 and STOP not in answer:
            with torch.no_grad():
                answer.append(int(policy.model(torch.tensor([sequence]))[0, -1, :7].argmax()))
            sequence.append(answer[-1])
        assert generation.tokens[row, : int(generation.lengths[row])].tolist() == answer
