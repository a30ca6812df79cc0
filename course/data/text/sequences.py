"""The samples of a language model: fixed-length sequences cut from a long stream of tokens.

A data set is a folder, made by `course data tokens` or `course data jsonl`:

    PATH/train.bin, train.idx           the documents of the split (`course.data.text.indexed_files`); valid and test likewise
    PATH/tokenizer.json                 the tokenizer
    PATH/meta.json                      the size of the vocabulary, and counts

To use files from Megatron's tools, rename NAME_text_document.bin and .idx to train.bin and train.idx. Both .json may be missing.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from course.data.text.indexed_files import Documents
from course.data.weather.pairs import Batch
from course.utils.atomic_files import os_error_cure, read_text
from course.utils.errors import CourseError, does_not_exist


class Sequences(Dataset[Batch]):
    """All documents of a split, concatenated and cut into samples of `context` + 1 tokens.

    The last token of a sample is the first of the next, so an epoch predicts each token once, except the very first and an
    incomplete last sample. A batch is `tokens` (B, context + 1) int64 and `sample` (B,) int64, the sample ids (-1 for padding,
    which is zeros). Raises `CourseError` if the data is missing, damaged or too short, or has a vocabulary above `vocab`.
    """

    def __init__(self, path: str, split: str, context: int, vocab: int, limit: int = 0, key: str = "model.vocab"):
        self.context, self.vocab, self.key = context, vocab, key        # key: the setting to name in errors
        self._check_vocabulary(Path(path))
        self.documents = Documents(Path(path) / split)
        self.documents.check_written()
        tokens = len(self.documents.tokens)
        samples = max(0, tokens - 1) // context
        if not samples:
            valid = ", or make the data again with a larger valid=, such as 0.05, or valid=0" if split == "valid" else ""
            raise CourseError(f"{self.documents.bin} has {tokens} tokens, and a sample takes {context + 1}: "
                              f"use a smaller model.context or more text{valid}")
        self.size = min(limit or samples, samples)

    def _check_vocabulary(self, path: Path) -> None:
        if not path.is_dir():
            raise CourseError(f"{does_not_exist(path)} make it with `course data tokens path={path}` or `course data jsonl`, "
                              "or set data.path to a folder that they made")
        meta = path / "meta.json"
        try:
            size = int(json.loads(read_text(meta))["vocab"]) if meta.is_file() else 0
        except OSError as error:
            raise CourseError(f"{meta} cannot be read ({error.strerror}): {os_error_cure(error, 'run again')}") from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CourseError(f"{meta} is damaged, or of another program: move that file away, since it may be missing, or make "
                              "the data again with `course data tokens` or `course data jsonl`") from error
        if size > self.vocab:
            raise CourseError(f"{path} has a vocabulary of {size} tokens but {self.key}={self.vocab}: "
                              f"set {self.key}={size} or use other data")

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, samples: list[int]) -> Batch:
        """Read a whole batch: PyTorch's DataLoader calls this once per batch, not once per sample."""
        tokens = np.zeros((len(samples), self.context + 1), np.int64)
        for i, sample in enumerate(samples):
            if sample >= 0:
                tokens[i] = self.documents.read(sample * self.context, self.context + 1)
        if tokens.max(initial=0) >= self.vocab or tokens.min(initial=0) < 0:       # meta.json is missing or wrong
            raise CourseError(f"{self.documents.bin} has tokens from {tokens.min()} to {tokens.max()} but {self.key}="
                              f"{self.vocab}: set {self.key}={tokens.max() + 1} or more, or use other data")
        return {"tokens": torch.from_numpy(tokens), "sample": torch.tensor(samples, dtype=torch.int64)}
