"""A tokenizer with one token a character, for small models that are trained from nothing."""

from pathlib import Path

from tepo_nemo.runs.files import new_folder

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def make_char_tokenizer(folder: Path, characters: str) -> Path:
    """Writes a Hugging Face fast tokenizer that `AutoTokenizer.from_pretrained(folder)` loads offline.

    Ids: <pad> 0, <bos> 1, <eos> 2, <unk> 3, then `characters` in the order given. No token is added around a
    text, a character that is not in `characters` is one <unk>, and the name of a special token in a text
    is read as characters: no prompt can end itself.

    Raises:
        ValueError: `characters` is empty or repeats one.
        UserError: `folder` is not empty or cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not characters or len(set(characters)) != len(characters):
        raise ValueError(f"a tokenizer needs characters that are all different, got {characters!r}")
    vocabulary = {token: id for id, token in enumerate([*SPECIAL_TOKENS.values(), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,  # it would drop the space of " ,"
        split_special_tokens=True,
        **SPECIAL_TOKENS,
    )
    with new_folder(folder) as partial:
        fast.save_pretrained(partial)
    return folder
