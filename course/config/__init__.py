"""Configuration: `settings` (dataclasses with all defaults, presets), `schema` (YAML, key=value), `validation` (rules)."""

from course.config.settings import (
    FP8,
    PRESETS,
    Checkpoint,
    Config,
    Data,
    Log,
    Optim,
    Parallel,
    Profile,
    Train,
    load,
    preset_path,
    presets,
    read_preset,
    save,
)

__all__ = ["FP8", "PRESETS", "Checkpoint", "Config", "Data", "Log", "Optim", "Parallel", "Profile", "Train", "load",
           "preset_path", "presets",
           "read_preset", "save"]
