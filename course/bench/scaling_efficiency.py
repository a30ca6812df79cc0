"""Compute the scaling efficiency of measured layouts, and the bubble of pipelines."""

from typing import Any

Row = dict[str, Any]
KINDS = ("tp", "tp_vit", "cp", "dp", "pp", "zero")   # kinds of `course bench` with an efficiency
MICROS = 16                                          # micro-batches in the pipeline benchmark


def yardstick(kind: str, row: Row, rows: list[Row]) -> Row | None:
    """The baseline of a row; None if there is none, or it failed."""
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
    """Whether the row is compiled; rows in a graph are too."""
    return row["case"].endswith((", compiled", ", in a graph"))


def judge(kind: str, rows: list[Row]) -> list[Row]:
    """Add the efficiency to each row, and for pipelines the measured and the theoretical bubble.

    Rows of other kinds, and rows without a baseline, stay unchanged.
    """
    for row in rows:
        if "error" in row or kind not in KINDS or not (measure := yardstick(kind, row, rows)):
            continue
        share = row["gpus"] if kind not in ("dp", "zero") else 1
        row["efficiency"] = measure["ms"] / row["ms"] / share
        if kind == "pp":
            p, v = row["gpus"], row.get("chunks", 1)
            row |= {"bubble": 1 - row["efficiency"], "theory": (p - 1) / (p - 1 + v * MICROS)}
    return rows
