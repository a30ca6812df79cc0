"""Read plain values from YAML and `key=value`, and build dataclasses from them. No value is executed; errors name the key."""

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

MOST = 100_000                                       # values in a YAML file, aliases expanded
T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}          # dataclass -> adapter


def read_yaml(path: Path, wanted: str) -> dict[str, Any]:
    """Read a YAML mapping. wanted: what it should hold, for the message. Raises `CourseError` if it is not readable as one."""
    try:
        values = plain_yaml(read_text(path)) or {}
    except OSError as error:
        raise CourseError(f"{path} cannot be read ({error.strerror}): {os_error_cure(error, 'run again')}") from error
    except UnicodeDecodeError as error:
        raise CourseError(f"{path} is not readable YAML (not UTF-8 at byte {error.start}): save it as UTF-8") from error
    except ValueError as error:
        raise CourseError(f"{path} is not readable YAML ({' '.join(str(error).split())[:160]}): correct that line") from error
    if not isinstance(values, dict):
        raise CourseError(f"{path} holds a {type(values).__name__}, not {wanted}")
    return values


def plain_yaml(text: str) -> Any:
    """Parse YAML into numbers, strings, lists and dicts, executing nothing. Raises `ValueError` for anything else."""
    try:
        values = yaml.safe_load(text)
    except Exception as error:                       # a tag such as !!int or a date raises whatever its conversion raises
        raise ValueError(str(error) or type(error).__name__) from error
    left, count = [values], 0
    while left:                                      # aliases can expand a short text, or make a list contain itself
        one, count = left.pop(), count + 1
        if count > MOST:
            raise ValueError(f"its aliases (*) make more than {MOST} values of it")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple | set) else []
    return values


PATHS = {"path", "dir", "source", "tokenizer", "vocabulary", "merges"}         # keys whose values are paths


def is_path(key: str, text: str) -> bool:
    """Whether to take a value as a path, not as YAML, where `[raw]/x` is a list and ` #1` a comment. A quoted value is YAML."""
    return key.rpartition(".")[2] in PATHS and text[:1] not in ('"', "'")


def parse(overrides: Iterable[str]) -> dict[str, Any]:
    """Turn `["train.steps=5"]` into `{"train": {"steps": 5}}`: values through `as_typed`, paths unchanged. Raises `CourseError`
    if an override is not key=value, or its value cannot be read."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise CourseError(f"{override!r} is not of the form key=value, such as train.steps=100 without spaces" +
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
    """Parse the text after `=`: lists, quoted strings and numbers as YAML, everything else as typed.

    YAML would turn an empty value into null, 007 into 7, 12:30 into 750, yes into true and a date into an object. It would drop
    what follows a #. Where a setting is a number or a switch, `build` reads it from the text.
    """
    value = plain_yaml(text)
    if isinstance(value, dict | list) or text.strip()[:1] in ("'", '"'):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return value
    plain = isinstance(value, int | float) and not isinstance(value, bool) and str(value) == text.strip()
    return value if plain else text.strip()


def reading(values: dict[str, Any]) -> dict[str, Any]:
    """Add data.source=files to values that set data.path but not data.source."""
    data = values.get("data")
    named = isinstance(data, Mapping) and "path" in data and "source" not in data
    return merge(values, {"data": {"source": "files"}}) if named else values


# saved runs may hold these old values: (key, old value) -> new value
RENAMED: dict[tuple[str, str], Any] = {("kernels", "hand"): "triton", ("by", "hand"): "native", ("zero", "true"): 1,
                                       ("zero", "false"): 0}


def current(values: Any) -> Any:
    """Replace renamed values (`RENAMED`) in nested plain values by their current names."""
    if not isinstance(values, Mapping):
        return values
    return {key: RENAMED.get((key, value), value) if isinstance(value, str) else current(value) for key, value in values.items()}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `old`, updated recursively with the leaves of `new`."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from nested plain values. Raises `CourseError` for wrong values, naming the key and a cure."""
    try:
        checked: T = adapter(kind).validate_python(values)
    except ValidationError as error:
        raise CourseError(f"{what}: " + "; ".join(_explain(kind, found) for found in error.errors())) from error
    return checked


def adapter(kind: Any) -> TypeAdapter[Any]:
    """The pydantic adapter that checks a dataclass. It is cached: making it takes most of the time of reading a configuration."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(strict(kind))
    return _adapters[kind]


def strict(kind: Any) -> Any:
    """The dataclass, set to reject unknown keys, also in its sections, and to take numbers as strings: a run may be called 7."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    for entry in dataclasses.fields(kind):
        for section in sections(entry.type):
            strict(section)
    return kind


def sections(annotation: Any) -> list[type]:
    """The dataclasses that a field of this type may hold. Each one is a section of the configuration."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def flat_keys(kind: type, prefix: str = "") -> list[str]:
    """All dotted keys of a dataclass and its sections, without duplicates."""
    keys = []
    for entry in dataclasses.fields(kind):
        keys.append(prefix + entry.name)
        for section in sections(entry.type):
            keys += flat_keys(section, f"{prefix}{entry.name}.")
    return list(dict.fromkeys(keys))


def as_plain(config: Any) -> dict[str, Any]:
    """Convert a configuration to nested dicts of lists, numbers and strings."""
    return adapter(type(config)).dump_python(config, mode="json")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines such as `train.steps: 10 -> 20`, one for each leaf that differs between two plain configurations."""
    return [f"{key}: {a} -> {b}" for key, a, b in changed_leaves(old, new)]


def changed_leaves(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) for each leaf that differs between plain configurations; missing keys: None."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from changed_leaves(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def as_text(value: Any) -> str:
    """Format a value as a user types it after `=`."""
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
    """Say which kinds of model have this key, or suggest a similar key of this kind."""
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
