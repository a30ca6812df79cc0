"""Combine the output of `submit/bench_parallel.sh FOLDER` into the recorded results of the parallel layouts.

    python -m experiments.scaling_results FOLDER

Joins the rows for all numbers of GPUs, adds the efficiencies, and writes course/bench/results/KIND_h200.json.
"""

import json
from pathlib import Path

from course.bench.command_line import command
from course.bench.results import FOLDER
from course.bench.scaling_efficiency import judge
from course.utils.atomic_files import write_json

MEANING = {
    "tp": "8 layers of hidden 4096, 4 x 4096 tokens, bf16, forward and backward; efficiency: time on one GPU over GPUs x time",
    "tp_vit": "ViT of width 1024, 360 x 720, 16 samples, bf16, whole training steps with Adam, tensor parallel; "
              "efficiency as in tp",
    "cp": "attention, 32 heads of 128, one sequence, bf16, forward and backward; efficiency: time on one GPU over GPUs x time",
    "dp": "causal stack of 24 layers of width 1024, 16 x 1024 tokens on each GPU, bf16 over float32 parameters; "
          "efficiency: time without communication over time",
    "pp": "16 layers of hidden 4096, 16 micro-batches of 4096 tokens, bf16, forward and backward; "
          "bubble: 1 - time on one GPU over GPUs x time",
    "zero": "the stack of dp with Adam, whole steps; efficiency: time of PyTorch's DDP over time; "
            "GB of optimizer states on each GPU"}


def main(folder: Path, results: Path = FOLDER) -> None:
    """Write the results of each kind in the folder."""
    for kind, meaning in MEANING.items():
        files = {int(file.stem.rpartition("_")[2]): file for file in folder.glob(f"{kind}_*.json")
                 if file.stem.removeprefix(f"{kind}_").isdecimal()}     # by number of GPUs; tp_vit is a kind of its own
        found = [json.loads(file.read_text(encoding="utf-8")) for _, file in sorted(files.items())]
        if found:
            rows = judge(kind, [row for part in found for row in part["rows"]])
            head = {key: value for key, value in found[0].items() if key != "rows"}
            write_json(results / f"{kind}_h200.json", {**head, "meaning": meaning, "rows": rows})


if __name__ == "__main__":
    with command("FOLDER") as words:
        main(Path(words[0]))
