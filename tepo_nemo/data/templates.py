r"""Chat templates: what stands around a problem when a model is asked, to the character.

They are written out and not taken from a tokenizer, so that a prompt set says by itself what the model reads,
and a login node can make it. Each is what the model's own template renders for one user's message and a
generation prompt. The text starts with the beginning-of-sequence token where the template has one: nothing
is added when the text is tokenized.
"""

from dataclasses import dataclass

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


@dataclass(frozen=True)
class ChatTemplate:
    """The text before and after a user's message, and how the problem becomes that message."""

    before: str
    after: str
    special: tuple[str, ...]  # texts that the tokenizer reads as tokens of their own; no problem may hold one
    instruction: str = f"\n{INSTRUCTION}"  # after the problem

    def render(self, problem: str) -> str:
        """The prompt of a problem.

        Raises:
            ValueError: the problem holds a special token of the template.
        """
        for token in self.special:
            if token in problem:
                raise ValueError(f"holds {token!r}, which the tokenizer would read as a token of its own")
        return f"{self.before}{problem}{self.instruction}{self.after}"


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

TEMPLATES: dict[str, ChatTemplate] = {
    # The system message is the one that the base model's template has by default.
    "qwen2_5": ChatTemplate(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        _CHATML,
    ),
    # Thinking is on, as it is by default: nothing follows the assistant's name.
    "qwen3": ChatTemplate(
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        (*_CHATML, "<think>", "</think>"),
    ),
    # DeepSeek-R1-Distill-Llama: Llama 3.1 with DeepSeek's tokens; the response starts inside its thoughts.
    "r1_distill_llama": ChatTemplate(
        "<｜begin▁of▁sentence｜><｜User｜>",
        "<｜Assistant｜><think>\n",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
        ),
    ),
    # Mistral-7B-Instruct-v0.2 has no system message.
    "mistral_instruct": ChatTemplate("<s>[INST] ", " [/INST]", ("<s>", "</s>", "[INST]", "[/INST]")),
    "none": ChatTemplate("", "", (), instruction=""),
}
"""By name; `none` leaves the problem as it is."""
