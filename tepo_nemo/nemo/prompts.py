"""Tokenizes prompt sets and checks that they fit into the model."""

from collections.abc import Sequence
from pathlib import Path

from nemo.collections.common.tokenizers import TokenizerSpec

from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.batch import TokenizedPrompt


def load_tokenized(
    path: Path, tokenizer: TokenizerSpec, *, key: str, max_response_length: int, sequence_length: int
) -> list[TokenizedPrompt]:
    """The prompts of a file as token ids.

    Args:
        key: the configuration key that names the file, for messages.
        sequence_length: the model's, in tokens.

    Raises:
        UserError: a prompt leaves no room for a whole response, or has no tokens.
    """
    prompts = []
    for prompt in load_prompts(path):
        tokens = tokenizer.text_to_ids(prompt.prompt)
        if not tokens:
            raise UserError(f"{key}={path}: prompt {prompt.id!r} has no tokens; remove it")
        if len(tokens) + max_response_length > sequence_length:
            raise UserError(
                f"{key}={path}: prompt {prompt.id!r} has {len(tokens)} tokens, which with"
                f" rollout.max_response_length={max_response_length} is longer than"
                f" model.encoder_seq_length={sequence_length}; remove the prompt or shorten the responses"
            )
        prompts.append(TokenizedPrompt(prompt, tokens))
    return prompts


def answer_tokens(prompts: Sequence[TokenizedPrompt], tokenizer: TokenizerSpec) -> list[list[int]]:
    """The gold answers as responses, with the stop token."""
    return [[*tokenizer.text_to_ids(prompt.prompt.gold), tokenizer.eos_id] for prompt in prompts]
