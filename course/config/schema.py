"""Plain values, of YAML and of `key=value`, and the dataclasses made of them: nothing in them is run, what is wrong is named."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from course.models import KINDS, kind_of
from course.utils.atomic_files import os_error_cure, read_text
from course.utils.errors import CourseError, did_you_mean

MOST = 100_000                                       # values in a YAML file that anybody writes
T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}          # by dataclass


def read_yaml(path: Path, wanted: str) -> dict[str, Any]:
    """The plain values of a YAML file. wanted: what it should hold, for the sentence if it does not."""
    try:
        values = plain_yaml(read_text(path)) or {}
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {os_error_cure(error, 'run again')}") from error
    except UnicodeDecodeError as error:
        raise CourseError(f"{path} is not readable YAML (not UTF-8 at byte {error.start}): save it as UTF-8") from error
    except ValueError as error:
        raise CourseError(f"{path} is not readable YAML ({' '.join(str(error).split())[:160]}): mend that line") from error
    if not isinstance(values, dict):
        raise CourseError(f"{path} holds a {type(values).__name__}, not {wanted}")
    return values


def plain_yaml(text: str) -> Any:
    """Numbers, texts, lists and dicts of YAML; nothing in it is run. Raises `ValueError` for what is not that, or too much."""
    try:
        values = yaml.safe_load(text)
    except Exception as error:                       # a tag such as !!int or a date raises whatever its own conversion does
        raise ValueError(str(error) or type(error).__name__) from error
    left, count = [values], 0
    while left:                                      # aliases make much of a short text, or a list that holds itself
        one, count = left.pop(), count + 1
        if count > MOST:
            raise ValueError(f"its aliases (*) make more than {MOST} values of it")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple | set) else []
    return values


PATHS = {"path", "dir", "source", "tokenizer", "vocabulary", "merges"}         # keys whose values are paths


def is_path(key: str, text: str) -> bool:
    """Whether a value is a path, so no YAML, in which `[raw]/x` is a list and ` #1` a comment; unless it is quoted."""
    return key.rpartition(".")[2] in PATHS and text[:1] not in ('"', "'")


def parse(overrides: Iterable[str]) -> dict[str, Any]:
    """`["train.steps=5"]` as `{"train": {"steps": 5}}`: values by `as_typed`, paths as they are. `CourseError` for what is no
    key=value."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise CourseError(f"{override!r} is not of the form key=value, such as train.steps=100" +
                              (", and no option of this command" if override.startswith("--") else ""))
        try:
            value: Any = text if is_path(key, text) else as_typed(text)
        except ValueError as error:
            raise CourseError(f"the value in {override!r} cannot be read: quote it, as in '{key}=\"...\"'") from error
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(values, value)
    return reading(current(values))


def as_typed(text: str) -> Any:
    """The value of what stands behind `=`: lists, quoted texts and numbers as YAML has them, all else what was typed.

    YAML would take nothing for null, 007 for 7, 12:30 for 750, yes for true, a date for an object and what follows a # for a
    comment. Where a number or a switch is wanted, `build` reads it from the text.
    """
    value = plain_yaml(text)
    if isinstance(value, dict | list) or text.strip()[:1] in ("'", '"'):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return value
    plain = isinstance(value, int | float) and not isinstance(value, bool) and str(value) == text.strip()
    return value if plain else text.strip()


def reading(values: dict[str, Any]) -> dict[str, Any]:
    """Who names data.path wants it to be read: data.source=files, unless the same values say otherwise."""
    data = values.get("data")
    named = isinstance(data, Mapping) and "path" in data and "source" not in data
    return merge(values, {"data": {"source": "files"}}) if named else values


# values of runs from before a renaming
RENAMED: dict[tuple[str, str], Any] = {("kernels", "hand"): "triton", ("by", "hand"): "native", ("zero", "true"): 1,
                                       ("zero", "false"): 0}


def current(values: Any) -> Any:
    """Plain values with those that have another name now, `RENAMED`, under it."""
    if not isinstance(values, Mapping):
        return values
    return {key: RENAMED.get((key, value), value) if isinstance(value, str) else current(value) for key, value in values.items()}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `old` with the leaves of `new` in place of its own."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """A dataclass from nested plain values; wrong ones are a `CourseError` that names the key and the cure."""
    try:
        checked: T = adapter(kind).validate_python(values)
    except ValidationError as error:
        raise CourseError(f"{what}: " + "; ".join(_explain(kind, found) for found in error.errors())) from error
    return checked


def adapter(kind: Any) -> TypeAdapter[Any]:
    """What checks the values of a dataclass, made once: that takes most of the time of reading a configuration."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(strict(kind))
    return _adapters[kind]


def strict(kind: Any) -> Any:
    """The dataclass itself, set up so that an unknown key is an error in it and its sections; a run may be called 7."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    for entry in dataclasses.fields(kind):
        for section in sections(entry.type):
            strict(section)
    return kind


def sections(annotation: Any) -> list[type]:
    """The dataclasses that a field of this type may hold: a section of the configuration."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def flat_keys(kind: type, prefix: str = "") -> list[str]:
    """Every dotted key of a dataclass, sections included, each once."""
    keys = []
    for entry in dataclasses.fields(kind):
        keys.append(prefix + entry.name)
        for section in sections(entry.type):
            keys += flat_keys(section, f"{prefix}{entry.name}.")
    return list(dict.fromkeys(keys))


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts of lists, numbers and strings."""
    return adapter(type(config)).dump_python(config, mode="json")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines such as `train.steps: 10 -> 20` for the leaves in which two plain configurations differ."""
    return [f"{key}: {a} -> {b}" for key, a, b in changed_leaves(old, new)]


def changed_leaves(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of the leaves in which two plain configurations differ; None where a key is missing."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from changed_leaves(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def as_text(value: Any) -> str:
    """A value as it is typed behind `=`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain(kind: type, found: ErrorDetails) -> str:
    path = [str(part) for part in found["loc"]]
    if found["type"] == "union_tag_invalid":
        tag = kind_of(found["input"])
        return f"there is no model.kind={tag}{did_you_mean(tag, KINDS)}; the kinds are {', '.join(KINDS)}"
    model = path.pop(1) if path[0] == "model" and len(path) > 1 and path[1] in KINDS else ""       # the kind that was tried
    key = ".".join(path)
    if key.startswith("-"):
        return f"{key}: settings have no dashes, such as train.steps=10"
    if found["type"] == "unexpected_keyword_argument":
        return f"there is no key {key!r}" + (_other_model(model, key) or _similar(key, flat_keys(kind)))
    given = found["input"]
    given = "" if given is None else str(given).lower() if isinstance(given, bool) else str(given)
    return f"{key}={given[:60]}: {found['msg'][0].lower()}{found['msg'][1:]}"


def _other_model(model: str, key: str) -> str:
    """A key that models of another kind have, or one like those that this one has."""
    owners = [name for name, section in KINDS.items() if key in flat_keys(section, "model.")]
    if owners:
        return f" in a model of kind {model}: it is one of kind {' and '.join(owners)}"
    return did_you_mean(key, flat_keys(KINDS[model], "model.")) if model else ""


def _similar(key: str, keys: list[str]) -> str:
    return did_you_mean(key, keys) or _same_leaf(key, keys)


def _same_leaf(key: str, keys: list[str]) -> str:
    """`steps` alone means `train.steps`."""
    leaf = key.rsplit(".", 1)[-1]
    return did_you_mean(next((k for k in keys if k.endswith(f".{leaf}")), key), keys)
