"""Methods by name. A new method is one module in this package; no list has to know of it."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from tepo_nemo.errors import UserError
from tepo_nemo.objectives.contract import Objective

Method = TypeVar("Method", bound=type[Objective])

_METHODS: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[Method], Method]:
    """Class decorator that makes an objective known as `algorithm.name = name`.

    Raises:
        ValueError: the name is taken.
    """

    def add(method: Method) -> Method:
        if name in _METHODS:
            raise ValueError(
                f"two objectives are called {name!r}: {_path(_METHODS[name])} and {_path(method)}"
            )
        _METHODS[name] = method
        return method

    return add


def known() -> list[str]:
    """Names of the registered methods, sorted."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__, prefix=f"{__package__}."):
        importlib.import_module(module.name)
    return sorted(_METHODS)


def build(name: str, options: Mapping[str, Any]) -> Objective:
    """The method `name`, or the objective class at a dotted path `package.module.Class`, with its options.

    Raises:
        UserError: unknown name or path; an option that is missing, invalid or not one of the method's.
    """
    method = _find(name)
    try:
        return method.model_validate(dict(options))
    except ValidationError as error:
        raise UserError("; ".join(_explain(error, name, list(method.model_fields)))) from None


def _find(name: str) -> type[Objective]:
    names = known()
    if name in names:
        return _METHODS[name]
    module_name, _, class_name = name.rpartition(".")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(
            f"algorithm.name = {name!r} is not a method{_nearest(name, names)}; known: {', '.join(names)}; "
            "your own objective goes by its path package.module.Class"
        )
    try:
        method = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UserError(f"algorithm.name = {name!r} cannot be imported: {error}") from error
    if not (isinstance(method, type) and issubclass(method, Objective)) or inspect.isabstract(method):
        raise UserError(
            f"algorithm.name = {name!r}: {module_name} has no class {class_name} that is an Objective"
        )
    return method


def _explain(error: ValidationError, name: str, fields: list[str]) -> list[str]:
    """Phrases that name each key, its value and what to do; the missing keys in one phrase."""
    missing = [_key(problem) for problem in error.errors() if problem["type"] == "missing"]
    phrases = [f"{', '.join(missing)} missing: {name} needs a value"] if missing else []
    for problem in error.errors():
        setting = f"{_key(problem)} = {problem['input']!r}"
        match problem["type"]:
            case "missing":
                continue
            case "extra_forbidden":
                nearest = _nearest(str(problem["loc"][-1]), fields)
                phrases.append(
                    f"{setting} is not an option of {name}{nearest}; known: {', '.join(fields) or 'none'}"
                )
            case "literal_error":
                phrases.append(f"{setting} must be {problem['ctx']['expected']}")
            case _:
                phrases.append(f"{setting}: {problem['msg'].replace('Input', 'it', 1)}")
    return phrases


def _key(problem: Mapping[str, Any]) -> str:
    return ".".join(["algorithm", *map(str, problem["loc"])])


def _nearest(word: str, words: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _path(method: type[Objective]) -> str:
    return f"{method.__module__}.{method.__qualname__}"
