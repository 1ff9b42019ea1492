import os

import pytest

from tepo_nemo.data.char_tokenizer import make_char_tokenizer
from tepo_nemo.data.toy import TOY_CHARACTERS
from tepo_nemo.errors import UserError

CHARACTERS = TOY_CHARACTERS + " ,.'\n\t#▁<>eos²é😀"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_char_tokenizer(tmp_path_factory.mktemp("data") / "tokenizer", CHARACTERS)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def test_ids_follow_the_order_of_the_characters(tokenizer):
    assert (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ) == (0, 1, 2, 3)
    assert len(tokenizer) == 4 + len(CHARACTERS)
    assert tokenizer.encode(CHARACTERS) == list(range(4, 4 + len(CHARACTERS)))
    assert tokenizer.is_fast


def test_one_token_a_character_and_none_around(tokenizer):
    assert tokenizer.encode("37+85=") == [7, 11, 14, 12, 9, 16]
    assert tokenizer.encode("") == []
    assert tokenizer.tokenize("1 2") == ["1", " ", "2"]


def test_ids_and_text_are_one_to_one(tokenizer):  # faults 22
    for text in [CHARACTERS, CHARACTERS[::-1], "  1 , 2 .\n\n 's", *CHARACTERS]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for ids in [[4, 4, 4], list(range(4, len(tokenizer))), [20, 18, 18, 19]]:
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_a_response_cut_at_any_token_is_a_prefix(tokenizer):  # faults 22
    ids = tokenizer.encode(CHARACTERS)
    assert [tokenizer.decode(ids[:end]) for end in range(len(ids))] == [
        CHARACTERS[:end] for end in range(len(ids))
    ]


def test_decoding_drops_special_tokens_only_when_asked(tokenizer):
    ids = [1, *tokenizer.encode("3"), 2, 0, 3]
    assert tokenizer.decode(ids) == "<bos>3<eos><pad><unk>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3"


def test_an_unknown_character_is_one_unk(tokenizer):
    assert tokenizer.encode("1x語1") == [5, 3, 3, 5]
    assert tokenizer.encode("e\u0301") == [tokenizer.encode("e")[0], 3], "no normalisation"


def test_the_name_of_a_special_token_in_a_text_is_text(tokenizer):
    """Else a prompt could end itself."""
    ids = tokenizer.encode("<eos>")
    assert 2 not in ids and tokenizer.decode(ids) == "<eos>"
    assert tokenizer.tokenize("<eos>") == list("<eos>")


def test_two_tokenizers_of_the_same_characters_are_the_same(folder, tmp_path):
    again = make_char_tokenizer(tmp_path / "again", CHARACTERS)
    assert sorted(os.listdir(again)) == sorted(os.listdir(folder))
    for name in os.listdir(folder):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("characters", ["", "010"])
def test_impossible_characters_are_refused(tmp_path, characters):
    with pytest.raises(ValueError, match="all different"):
        make_char_tokenizer(tmp_path / "tokenizer", characters)
    assert os.listdir(tmp_path) == []


def test_a_tokenizer_is_never_overwritten(folder):
    before = (folder / "tokenizer.json").read_bytes()
    with pytest.raises(UserError, match="not empty"):
        make_char_tokenizer(folder, "01")
    assert (folder / "tokenizer.json").read_bytes() == before
