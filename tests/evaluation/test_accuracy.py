"""avg@k by hand, and what the answers of an evaluation depend on."""

import pytest
import torch
from support.rollouts import Response, make_prompt, make_scored
from support.tiny_run import PROMPTS, letter_reward, make_objective
from support.torch_policy import STOP, TorchPolicy, spell

from tepo_nemo.evaluation.accuracy import EvaluationSet, average_at_k, evaluate
from tepo_nemo.rollout.protocol import Generation
from tepo_nemo.rollout.sampling import row_keys
from tepo_nemo.rollout.scoring import Grader


def test_average_at_k_is_the_mean_over_problems_of_their_mean():
    """3 problems x 4 answers, the rows mixed: 2 / 4, 4 / 4 and 1 / 4."""
    rewards = {0: [1.0, 0.0, 1.0, 0.0], 1: [1.0] * 4, 2: [0.0, 0.0, 0.0, 1.0]}
    rows = [Response(group, rewards[group][sample]) for sample in range(4) for group in rewards]
    assert average_at_k(make_scored(rows)) == pytest.approx((2 / 4 + 4 / 4 + 1 / 4) / 3)


@pytest.mark.parametrize(
    "rewards, score", [([1.0, None], 0.5), ([None, None], 0.0), ([0.5, 1.0], 0.75), ([0.0, 0.0], 0.0)]
)
def test_an_answer_that_could_not_be_graded_counts_as_wrong(rewards, score):
    """It stays in the denominator, unlike in training."""
    assert average_at_k(make_scored([Response(0, reward) for reward in rewards])) == score


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
    evaluate(
        host.infer,
        grader,
        EvaluationSet(name, prompts, samples, temperature),
        seed=seed,
        max_response_length=9,
    )
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


def score(policy, **changes):
    settings = dict(name="letters", prompts=PROMPTS, samples=8, temperature=0.6) | changes
    policy.prepare_for_inference()
    scored = evaluate(
        policy.infer,
        Grader(policy, letter_reward, spell),
        EvaluationSet(**settings),
        seed=1,
        max_response_length=5,
    )
    policy.finish_inference()
    return scored


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
    assert average_at_k(scored) == pytest.approx(sum(right) / 48)


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
