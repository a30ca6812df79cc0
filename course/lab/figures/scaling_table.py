"""A table of recorded step times on several numbers of GPUs: milliseconds and scaling efficiency."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def table(rows: Iterable[Row], one_gpu: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Case -> column -> value, from rows of {"case", "gpus", "ms", "memory_gb"}.

    `one_gpu(case)` names the baseline on one GPU. Efficiency is the baseline's time divided by (number of GPUs x the case's
    time). Rows that could not be measured have no `ms`, and their cells stay empty.
    """
    rows = list(rows)
    measured = {(row["case"], row["gpus"]): row for row in rows if "ms" in row}
    counts = sorted({row["gpus"] for row in rows})
    found: dict[str, dict[str, Any]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        base = measured.get((one_gpu(case), 1))
        mine = {n: measured.get((case, n)) for n in counts}
        columns: dict[str, Any] = {f"ms on {n}": row["ms"] if row else "" for n, row in mine.items()}
        most = counts[-1]
        last = mine[most]
        columns[f"efficiency on {most}, %"] = 100 * base["ms"] / (most * last["ms"]) if base and last and most > 1 else ""
        columns[f"GB on {most}"] = last["memory_gb"] if last else ""
        found[case] = columns
    return found
