"""From presets and overrides, or from a saved file, to a checked Config."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tepo_nemo.config.checks import check_config
from tepo_nemo.config.files import check_files
from tepo_nemo.config.messages import first_mistake, nearest, shown
from tepo_nemo.config.presets import ROOT, choices, config_folder
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError

_EXPERIMENT = "experiment"  # the one group of which several presets may be chosen
_GRAMMAR = "write KEY=VALUE, and quote values with special characters: 'KEY=\"VALUE\"'"


def load_config(
    overrides: Sequence[str] = (), config_file: Path | None = None, *, files: bool = True
) -> Config:
    """The configuration of a run.

    Args:
        overrides: Hydra overrides such as `algorithm=grpo` (a preset) or `trainer.max_steps=10` (a key). The
            last one of a kind counts, but experiments add up, in their order.
        config_file: a saved configuration to start from, in place of `configs/tepo.yaml` and its presets.
        files: whether the checkpoint and the prompt sets must be there.

    Raises:
        UserError: any mistake, the first one, before anything is loaded or written.
    """
    parsed = [_parse(override) for override in overrides]
    groups = [override for override in parsed if override.key_or_group in choices()]
    keys = [override for override in parsed if override.key_or_group not in choices()]
    if config_file is None:
        tree = _compose(groups)
    elif groups:
        raise UserError(
            f"{groups[0].input_line}: presets cannot be chosen on top of {config_file} "
            f"(set single keys, such as {groups[0].key_or_group}.KEY=VALUE)"
        )
    else:
        tree = read_yaml(config_file)
    config = _to_config(_apply(keys, tree))
    check_config(config)
    if files:
        check_files(config)
    return config


def dump_config(config: Config) -> str:
    """YAML that `load_config(config_file=...)` takes back unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(f"{shown(text)}: is no override ({_first_line(error)}); {_GRAMMAR}") from error
    if not override.key_or_group:
        raise UserError(f"{shown(text)}: is no override (it names no key); {_GRAMMAR}")
    if override.is_sweep_override():
        raise UserError(
            f"{text}: gives several values; write a list as {override.key_or_group}=[A,B], or give one value"
        )
    if override.key_or_group.split(".")[0].split("/")[0] == "hydra":
        raise UserError(f"{text}: Hydra's own settings have no effect here (remove the override)")
    if override.key_or_group in choices():
        _check_choice(override)
    return override


def _check_choice(override: Override) -> None:
    group, chosen = override.key_or_group, override.value()
    names = choices()[group]
    if override.is_delete() or override.package is not None:
        raise UserError(
            f"{override.input_line}: presets are only chosen, as {group}=NAME; {nearest(str(chosen), names)}"
        )
    for name in _experiments(chosen) if group == _EXPERIMENT else [chosen]:
        if name not in names:
            raise UserError(f"{override.input_line}: unknown {group}; {nearest(str(name), names)}")


def _compose(groups: Sequence[Override]) -> DictConfig:
    chosen = {each.key_or_group: str(each.value()) for each in groups}
    experiments = [
        name for each in groups if each.key_or_group == _EXPERIMENT for name in _experiments(each.value())
    ]
    if experiments:  # of several ones, the later has the last word
        chosen[_EXPERIMENT] = f"[{','.join(experiments)}]"
    else:
        chosen.pop(_EXPERIMENT, None)
    tree = deepcopy(_composed(tuple(f"{group}={name}" for group, name in chosen.items())))
    # Keys that only the schema has may be set too; it refuses the unknown ones.
    OmegaConf.set_struct(tree, False)
    return tree


@cache
def _composed(chosen: tuple[str, ...]) -> DictConfig:
    """Hydra takes most of the time of a configuration, and a study has many with the same presets."""
    with initialize_config_dir(str(config_folder()), job_name="tepo_nemo", version_base="1.3"):
        return compose(ROOT, overrides=list(chosen))


def _experiments(chosen: Any) -> list[Any]:
    """The names in the value of an `experiment=`: none, one, or a list."""
    return [] if chosen is None else chosen if isinstance(chosen, list) else [chosen]


def read_yaml(path: Path) -> DictConfig:
    """A file of keys. Raises UserError where it cannot be read, or is none."""
    try:
        tree = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}; correct the path)") from error
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: is no valid YAML ({shown(error)})") from error
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path}: is no configuration; write keys with values")
    return tree


def _apply(keys: Sequence[Override], tree: DictConfig) -> dict[str, Any]:
    """Set or delete single keys, then resolve interpolations."""
    for override in keys:
        if override.is_delete():
            _delete(override, tree)
        else:
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=True)
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{error.full_key or 'configuration'}: cannot be resolved ({_first_line(error)})"
        ) from error


def _delete(override: Override, tree: DictConfig) -> None:
    section, _, name = override.key_or_group.rpartition(".")
    parent = OmegaConf.select(tree, section) if section else tree
    if not isinstance(parent, DictConfig) or name not in parent:
        raise UserError(f"{override.input_line}: there is no such key to remove (remove the override)")
    del parent[name]


def _to_config(values: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(first_mistake(error, Config)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
