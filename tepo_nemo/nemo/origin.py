"""What a model has on Hugging Face, where it does not come from there."""

from pathlib import Path

from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from omegaconf import OmegaConf

from tepo_nemo.config.schema import Config
from tepo_nemo.conversion.describe import describe
from tepo_nemo.conversion.huggingface import CONFIG, side_files


def describe_files(model: MegatronGPTModel, config: Config) -> dict[str, bytes]:
    """A `config.json` and the files of the tokenizer; nothing where no family has such a model.

    With them the model's checkpoints convert to Hugging Face, and a server takes its weights.
    """
    described = describe(
        OmegaConf.to_container(model.cfg, resolve=True),
        vocabulary=config.model.vocab_size or model.tokenizer.vocab_size,
        stop_token=model.tokenizer.eos_id,
    )
    if described is None:
        return {}
    folder = Path(model.cfg.tokenizer.type)
    tokenizer = {path.name: path.read_bytes() for path in side_files(folder)} if folder.is_dir() else {}
    return tokenizer | {CONFIG: described}
