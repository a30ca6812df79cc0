"""The recorded results of the parallel layouts, made from what `submit/bench_parallel.sh FOLDER` left.

    python -m course.perf.efficiency FOLDER

Joins the rows of all numbers of GPUs and adds what they mean beside each other; writes course/perf/results/KIND_h200.json.
"""

import json
from pathlib import Path
from typing import Any

from course.files import atomic
from course.perf.command import command

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
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
MICROS = 16                                          # micro-batches of the pipeline's benchmark


def yardstick(kind: str, row: Row, rows: list[Row]) -> Row | None:
    """The row that another is measured by; None if there is none, or it ended in an error."""
    def fits(other: Row) -> bool:
        if "error" in other:
            return False
        if kind == "dp":
            compiled = ", compiled" if "compiled" in row["case"] else ""
            return other["gpus"] == row["gpus"] and other["case"] == f"none{compiled}"
        if kind == "zero":
            return bool(other["case"] == "ddp") and other["gpus"] == row["gpus"]
        same = all(other.get(key) == row.get(key) for key in ("tokens", "causal"))
        return other["gpus"] == 1 and same and by_compiler(other) == by_compiler(row)

    return next((other for other in rows if fits(other)), None)


def by_compiler(row: Row) -> bool:
    """Whether the compiler made its kernels, as it did of those in a graph."""
    return row["case"].endswith((", compiled", ", in a graph"))


def judge(kind: str, rows: list[Row]) -> list[Row]:
    """The rows with their efficiency, and a pipeline's with its bubble and the theory's.

    Those of other kinds, and those that there is nothing to measure by, stay as they are.
    """
    for row in rows:
        if "error" in row or kind not in MEANING or not (measure := yardstick(kind, row, rows)):
            continue
        share = row["gpus"] if kind not in ("dp", "zero") else 1
        row["efficiency"] = measure["ms"] / row["ms"] / share
        if kind == "pp":
            p, v = row["gpus"], row.get("chunks", 1)
            row |= {"bubble": 1 - row["efficiency"], "theory": (p - 1) / (p - 1 + v * MICROS)}
    return rows


def main(folder: Path, results: Path = RESULTS) -> None:
    """Write the results of every kind that the folder has."""
    for kind, meaning in MEANING.items():
        files = [folder / f"{kind}_{gpus}.json" for gpus in (1, 2, 4)]
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        if found:
            rows = judge(kind, [row for part in found for row in part["rows"]])
            head = {key: value for key, value in found[0].items() if key != "rows"}
            with atomic(results / f"{kind}_h200.json") as file:
                file.write_text(json.dumps({**head, "meaning": meaning, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with command("FOLDER") as words:
        main(Path(words[0]))
