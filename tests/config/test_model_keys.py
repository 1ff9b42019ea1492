"""The kept lists of model keys against the installed NeMo and Megatron-core, whose source is read as text."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tepo_nemo.config import model_keys
from tepo_nemo.config.model import ModelConfig


def source_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.fail(f"{package} is not installed: these tests belong to the full stack")
    return Path(spec.submodule_search_locations[0])


def dataclass_fields(path: Path, name: str) -> set[str]:
    (found,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


@pytest.fixture(scope="module")
def transformer_fields() -> set[str]:
    core = source_folder("megatron") / "core"
    return dataclass_fields(core / "model_parallel_config.py", "ModelParallelConfig") | dataclass_fields(
        core / "transformer" / "transformer_config.py", "TransformerConfig"
    )


@pytest.fixture(scope="module")
def read_by_nemo() -> set[str]:
    """Keys that NeMo's language models read from a configuration."""
    folder = source_folder("nemo") / "collections" / "nlp"
    files = [
        *folder.glob("models/language_modeling/megatron*.py"),
        *folder.glob("models/nlp_model.py"),
        *folder.glob("modules/common/megatron/*.py"),
        *folder.glob("parts/*.py"),
    ]
    text = "\n".join(path.read_text() for path in files)
    return set(re.findall(r"(?:cfg|config)\w*\.get\(\s*['\"](\w+)['\"]", text)) | set(
        re.findall(r"cfg\.(?:model\.)?(\w+)", text)
    )


def test_transformer_config_fields_are_the_installed_ones(transformer_fields):
    public = {name for name in transformer_fields if not name.startswith("_")}
    assert set(model_keys.TRANSFORMER_CONFIG_FIELDS) == public
    assert list(model_keys.TRANSFORMER_CONFIG_FIELDS) == sorted(public)


def test_nemo_keys_are_read_by_nemo(read_by_nemo):
    assert set(model_keys.NEMO_KEYS) <= read_by_nemo
    assert list(model_keys.NEMO_KEYS) == sorted(
        set(model_keys.NEMO_KEYS) - set(model_keys.TRANSFORMER_CONFIG_FIELDS)
    )


def test_typed_keys_are_nemos_own_names(read_by_nemo, transformer_fields):
    ours = {"name", "vocab_size", "extra", "restore_from_path", "tokenizer"}
    assert set(ModelConfig.model_fields) - ours <= read_by_nemo | transformer_fields


def test_refused_keys_exist_somewhere(read_by_nemo, transformer_fields):
    """A refusal of a key that nobody has would be dead."""
    known = (
        read_by_nemo | transformer_fields | {"resume_from_checkpoint"}
    )  # the last stands in NeMo's example only
    assert set(model_keys.SAID_ELSEWHERE) <= known
    assert model_keys.DECIDED_BY_HOST <= known
    assert model_keys.SAID_ELSEWHERE.keys().isdisjoint(model_keys.DECIDED_BY_HOST)


def test_no_key_can_be_both_typed_and_refused():
    refused = model_keys.SAID_ELSEWHERE.keys() | model_keys.DECIDED_BY_HOST
    assert refused.isdisjoint(ModelConfig.model_fields)
    assert not [key for key in ModelConfig.model_fields if model_keys._feature(key)]
