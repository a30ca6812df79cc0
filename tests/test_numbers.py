"""The tables of measurements in docs/measured.md and the README say what the JSON files under course/bench/results say, number by
number."""

import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from course import config
from course.bench import recorded_steps
from course.data.weather import layout, simulation
from course.models import build_model
from course.parallel.tensor_parallel import overlapped_linear
from course.planner import activation_memory, block_time, memory
from experiments import loss_alignment, results_picture

ROOT = Path(__file__).parent.parent
README, MEASURED, USING = ((ROOT / name).read_text() for name in ("README.md", "docs/measured.md", "docs/using.md"))
RESULTS = ROOT / "course/bench/results"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
ABOUT = ("command", "hardware", "torch", "python", "date")        # what every file says of how it was measured
GAPS = {"beginning_h200": ({"command"}, "measured before the course had benchmarks; its own measure the like"),
        "foundation_h200": ({"command"}, "eight runs of `course train` on the first day, whose settings are in its rows"),
        "heldout": (set(ABOUT), "configurations that wait for their measurement; nothing in it was measured"),
        "heldout_2": (set(ABOUT), "the same"),
        "heldout_3": (set(ABOUT), "the same"), "heldout_4": (set(ABOUT), "the same")}


@cache
def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def row(name: str, label: str, **more: Any) -> dict[str, Any]:
    """The one row of a file with this label (its rung or case) and these fields."""
    found = [r for r in results(name)["rows"] if label in (r.get("rung"), r.get("case"))
             and all(r[key] == value for key, value in more.items())]
    assert len(found) == 1, f"{name}.json has {len(found)} rows {label} {more}"
    return found[0]


def cells(label: str, after: str, page: str = MEASURED) -> list[str]:
    """The cells of the table's line that begins with this label, in the section after these words."""
    section = page[page.index(after):]
    line = next(line for line in section.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def differences(text: str, values: list[float]) -> list[str]:
    """Where the numbers in a text are not these, each rounded to as many decimals as the text has."""
    shown = NUMBER.findall(text)
    if len(shown) != len(values):
        return [f"{text!r} has the numbers {shown}, and {len(values)} are expected"]
    wanted = [f"{value:.{len(number.partition('.')[2])}f}" for number, value in zip(shown, values, strict=True)]
    return [f"{text!r}: {number} is {value} in the file" for number, value in zip(shown, wanted, strict=True) if number != value]


# --- one GPU: the table's label, the rung
VIT = [("TF32 matmuls, fed from HDF5 by the training process", "tf32, read by the training process"),
       ("the same, random data on the device", "tf32, on the device"),
       ("bf16, random data", "bf16, on the device"),
       ("bf16, compiled", "bf16, compiled"),
       ("the same, with a narrow stream", "bf16, compiled, narrow stream"),
       ("the same as one CUDA graph, wide stream", "bf16, compiled, in a graph"),
       ("bf16, compiled, with flash attention instead of cuDNN's", "bf16, compiled, flash attention"),
       ("bf16, compiled, fed from HDF5 by 8 processes of a DataLoader", "bf16, compiled, 8 loader processes"),
       ("the same, by 12 threads", "bf16, compiled, threads"),
       ("the same, by DALI, 12 processes", "bf16, compiled, DALI"),
       ("native FP8, compiled", "fp8, compiled"),
       ("width 1024: bf16, compiled, narrow stream", "width 1024: bf16, compiled, narrow stream"),
       ("width 1024: native FP8, compiled, narrow stream", "width 1024: fp8, compiled, narrow stream"),
       ("width 1024: FP8 by Transformer Engine, narrow stream", "width 1024: fp8 by Transformer Engine"),
       ("12 layers of width 768, 256 tokens, one sample, bf16", "one sample: eager"),
       ("the same, compiled", "one sample: compiled"),
       ("the same as one CUDA graph", "one sample: in a graph"),
       ("compiled, as one CUDA graph", "one sample: compiled, in a graph")]


@pytest.mark.parametrize(("label", "rung"), VIT)
def test_one_gpu(label: str, rung: str) -> None:
    said, found = cells(label, "## On one NVIDIA H200"), row("vit_h200", rung)
    values = [found["samples_per_s"], found["memory_gb"], 100 * found["mfu"], found["first_s"]]
    assert len(said) == 4 and [d for cell, value in zip(said, values, strict=True) for d in differences(cell, [value])] == []


# --- GPT and DiT: the label, file, prefix of its rungs, the unit, and what else stands beside bf16's speed
NARROW = "bf16, compiled, narrow stream"
HAND = f"{NARROW}, Triton kernels, in a graph"
MODELS = [("GPT 124M, thousand tokens/s", "gpt_h200", "124M", [f"{NARROW}, all logits", "Hugging Face's GPT-2, bf16, compiled"]),
          ("GPT 350M", "gpt_h200", "350M", []),
          ("GPT 1.3B", "gpt_h200", "1.3B", []),
          ("DiT-XL/2, 256 px, images/s", "dit_h200", "256 px", []),
          ("DiT-XL/2, 512 px", "dit_h200", "512 px", [f"{NARROW}, flash attention"])]


@pytest.mark.parametrize(("label", "file", "prefix", "beside"), MODELS)
def test_gpt_and_dit(label: str, file: str, prefix: str, beside: list[str]) -> None:
    def speed(rung: str) -> float:
        found = row(file, f"{prefix}: {rung}")
        return found["tokens_per_s"] / 1000 if "tokens_per_s" in found else found["samples_per_s"]

    bf16 = row(file, f"{prefix}: {NARROW}")
    wanted = [[speed(NARROW), *map(speed, beside)], [bf16["memory_gb"]], [100 * bf16["mfu"]], [], [], []]
    if any(r["rung"] == f"{prefix}: fp8, compiled, narrow stream" for r in results(file)["rows"]):
        fp8 = row(file, f"{prefix}: fp8, compiled, narrow stream")
        wanted[3:] = [[speed("fp8, compiled, narrow stream"), bf16["ms"] / fp8["ms"]], [fp8["memory_gb"]],
                      [speed("fp8 by Transformer Engine")]]
    said = [re.sub(r"GPT-2", "GPT", cell) for cell in cells(label, "GPT and DiT on the same GPU")]
    assert [d for cell, values in zip(said, wanted, strict=True) for d in differences(cell, values)] == []


@pytest.mark.parametrize(("label", "file", "prefix"), [(label, file, prefix) for label, file, prefix, _ in MODELS])
def test_gpt_and_dit_by_hand(label: str, file: str, prefix: str) -> None:
    bf16 = row(file, f"{prefix}: {NARROW}, Triton kernels, in a graph")
    unit = "tokens_per_s" if "tokens_per_s" in bf16 else "samples_per_s"
    scale = 1000 if unit == "tokens_per_s" else 1
    wanted = [[bf16[unit] / scale], [bf16["memory_gb"]], [100 * bf16["mfu"]], [], []]
    name = f"{prefix}: fp8, compiled, narrow stream, Triton kernels, in a graph"
    if any(r["rung"] == name for r in results(file)["rows"]):
        fp8 = row(file, name)
        wanted[3:] = [[fp8[unit] / scale, bf16["ms"] / fp8["ms"]], [fp8["memory_gb"]]]
    said = cells(label, "`kernels=triton` takes what blocks do")
    assert [d for cell, values in zip(said, wanted, strict=True) for d in differences(cell, values)] == []


@pytest.mark.parametrize(("label", "rung"), [(f"124M: {NARROW}", f"124M: {NARROW}")] + [
    (f"{prefix}: the same, Triton kernels, in a graph", f"{prefix}: {NARROW}, Triton kernels, in a graph")
    for prefix in ("124M", "350M", "256 px")] + [
    (f"{prefix}: the same, on a third", f"{prefix}: {NARROW}, Triton kernels, in a graph") for prefix in ("512 px", "1.3B")])
def test_clock_and_power(label: str, rung: str) -> None:
    found = row("power_h200", rung)
    speed = found["tokens_per_s"] / 1000 if "tokens_per_s" in found else found["samples_per_s"]
    said = cells(label, "**What bounds these steps is power.**")
    assert [d for cell, value in zip(said, [speed, found["clock_mhz"], found["power_w"]], strict=True)
            for d in differences(cell, [value])] == []


def test_speed_in_less_memory() -> None:
    hand = "Triton kernels, in a graph"
    rungs = (f"{hand}, two micro-batches", f"selective recomputation, {hand}", "selective recomputation", "full recomputation")
    found = [row("gpt_h200", f"124M: {NARROW}, {rung}") for rung in rungs]
    text = MEASURED.partition("Less memory: in two micro-batches GPT 124M")[2].partition("\n\n")[0]
    assert differences(text, [value for r in found for value in (r["tokens_per_s"] / 1000, r["memory_gb"])]) == []


def test_the_peak_of_a_first_step() -> None:
    """Said of the only rung whose first step is the fullest by more than a per cent."""
    rows = [*results("gpt_h200")["rows"], *results("dit_h200")["rows"]]
    fuller = [r for r in rows if r.get("first_gb", 0) > 1.01 * r["memory_gb"]]
    assert [r["rung"] for r in fuller] == [f"350M: fp8, {NARROW.partition(', ')[2]}, Triton kernels, in a graph"]
    assert f"multiplies in 16 bits: {fuller[0]['first_gb']:.1f} for 350M in FP8." in MEASURED.replace("\n", " ")


def test_what_is_beside_the_kernels_by_hand() -> None:
    text = MEASURED.partition("`kernels=triton` takes what blocks do")[2].partition("| Triton kernels")[0].replace("GPT 124M", "")
    gpt, dit = results("gelu_h200")["before"]
    now = row("dit_h200", f"256 px: {NARROW}, Triton kernels, in a graph")
    step = next(step for step in recorded_steps.one_gpu() if step.name == f"dit: 256 px: {NARROW}, Triton kernels, in a graph")
    for number in (f"{64 * 1024 / gpt['compilers_ms']:.0f} (", f"{64e3 / dit['compilers_ms']:.0f} (DiT",
                   f"gave {64 * 1024 / gpt['ms']:.0f} and {64e3 / dit['ms']:.0f} (",
                   f"predicts {1e3 * step.time.step:.0f} ms for a step of the latter",
                   f"takes {now['ms']:.0f} with Triton kernels, and took {dit['compilers_ms']:.0f} by the compiler"):
        assert number in text.replace("\n", " ")


PRODUCTS = [("GPT 124M", "124M"), ("GPT 350M", "350M"), ("GPT 1.3B", "1.3B"), ("DiT-XL/2, 256 px", "256 px"),
            ("DiT-XL/2, 512 px", "512 px")]


def steps_of(rows: list[dict[str, Any]], model: str, field: str = "ms", chosen: bool = True) -> float:
    """The mean of both runs of a model's rung whose products were chosen, or not."""
    found = [r[field] for r in rows if r["rung"] == f"{model}: {HAND}" and r.get("chosen", True) == chosen]
    assert len(found) == 2
    return statistics.mean(found)


def test_what_was_tried_and_not_kept() -> None:
    text = MEASURED.partition("**Tried, not kept.**")[2]
    found = results("products_h200")["steps"]
    gains = {label: 100 * (1 - steps_of(found, model) / steps_of(found, model, chosen=False)) for label, model in PRODUCTS}
    assert statistics.mean(gains.values()) < 2
    said = re.search(r"GPT 124M ([\d.]+)%, 350M ([\d.]+)%, 1.3B ([\d.]+)%; DiT-XL/2 ([\d.]+) and ([\d.]+)%", text)
    assert said and said.groups() == tuple(f"{gain:.1f}" for gain in gains.values())
    for name, words in ((f"124M: {NARROW}", "GPT 124M"), (f"256 px: {NARROW}", "DiT-XL/2 at 256 px")):
        merged, apart = (row("gelu_h200", f"{name}, Triton kernels, in a graph", gelu=how)["ms"]
                         for how in ("in the matmul", "apart"))
        assert f"{words} {100 * (1 - merged / apart):.1f}%" in text


def test_what_ran_on_h100s() -> None:
    runs = results("alignment_h100")["models"]["gpt-1.3b"]["runs"]
    frozen, same = (loss_alignment.windows(torch.tensor(runs[name]["losses"]), 25)
                    for name in (loss_alignment.FROZEN, loss_alignment.REFERENCE))
    assert f"(`alignment_h100.json`), by {100 * loss_alignment.gap(frozen, same):.1f}%" in MEASURED
    parity = results("parity_2xh100")["rows"]
    assert f"{len(parity)} comparisons, all equal (`parity_2xh100.json`)" in MEASURED and not any(r["wrong"] for r in parity)
    parity = results("parity_4xh100")["rows"]
    assert f"{len(parity)} comparisons, all equal (`parity_4xh100.json`)" in MEASURED and not any(r["wrong"] for r in parity)
    ours, ddp, theirs = (row("zero_2xh100", case) for case in ("ZeRO-1, 16-bit copies", "ddp", "ZeroRedundancyOptimizer"))
    text = MEASURED.partition("ZeRO-1 once more on two H100s")[2].partition("\n\n")[0].replace("\n", " ")
    assert f": {ours['ms']:.1f} ms with 16-bit copies in {ours['memory_gb']:.1f} GB" in text
    assert f"DDP takes {ddp['ms']:.1f} ms in {ddp['memory_gb']:.1f} GB and ZeroRedundancyOptimizer {theirs['ms']:.1f} ms" in text


def test_loaders_and_their_floor() -> None:
    found = results("loaders_h200")
    speeds = {kind: round(found["loaders"][kind]["12"]) for kind in ("threads", "dali", "dali_numpy")}
    said = "at {threads} a second with `threads`, at {dali} with `dali` and at {dali_numpy} with `dali_numpy`".format(**speeds)
    floor = found["page cache to memory"]["12"]
    assert f"{said} (12 workers; the floor is {floor:.0f}, `course bench loaders`, {found['date']})" in " ".join(MEASURED.split())


def test_when_a_pipeline_asks_for_messages() -> None:
    found = results("pp_h200")["receives"]
    change = {kind: [100 * (r["before the pass"] / r["after the pass"] - 1) for r in found["rows"] if r["case"].startswith(kind)]
              for kind in ("stack", "gpt")}
    text = " ".join(MEASURED.partition("A pipeline asks for a message")[2].partition("\n\n")[0].split())
    assert f"the stack's steps take {min(change['stack']):.0f}% to {max(change['stack']):.0f}% longer" in text
    assert f"take {-min(change['gpt']):.0f}% less to {max(change['gpt']):.0f}% more" in text
    assert found["date"] in text and {r["gpus"] for r in found["rows"]} == {2, 4}


def test_layers_beside_megatron_cores() -> None:
    """What is said of the grid on one GPU, on two and on four."""
    text = " ".join(MEASURED.partition("Beside megatron-core's layers")[2].partition("\n\n")[0].split())
    one = layers_by_case(results("grid_h200")["rows"]).values()
    for by, who in (("megatron-core, Transformer Engine", "{:.0f}% to {:.0f}% of the time of its own with Transformer Engine"),
                    ("megatron-core", "and {:.0f}% to {:.0f}% of its plain ones")):
        shares = [100 * ms["course"] / ms[by] for ms in one]
        assert who.format(min(shares), max(shares)) in text
    hand = by_hand("grid_h200", "again")
    assert f"take {min(hand.values()):.0f}% to {max(hand.values()):.0f}% of the time of those with Transformer Engine" in text
    plain, engine, slower = beside_megatron(results("grid_2xh200")["rows"])
    assert f"take {min(plain):.0f}% to {max(plain):.0f}% of the time of its plain ones" in text
    assert f"with it {min(engine):.0f}% to {max(engine):.0f}% of the time" in text and f"up to {slower:.1f} times" in text
    wide, rest = by_width(by_hand("grid_2xh200"))
    assert f"take {min(wide):.0f}% and {max(wide):.0f}% at width 3072" in text
    assert f"{min(rest):.0f}% to {max(rest):.0f}% where the host is behind. On two H100s" in text
    text, later = text.partition("On two H100s")[2], [max(engine) - 100]
    for name, said in (("grid_2xh100", "take {} of the time of megatron-core's plain ones, and ours with it {} of that"),
                       ("grid_4xh100", "on four (`grid_4xh100.json`) {} and {},"),
                       ("grid_4xh200", "`grid_4xh200.json`) {} and {}.")):
        plain, engine, _ = beside_megatron(results(name)["rows"])
        assert said.format(*(f"{min(shares):.0f}% to {max(shares):.0f}%" for shares in (plain, engine))) in text
        later.append(max(engine) - 100)
    said = "up to {:.1f}% slower on two H200s, {:.1f}% on two H100s, {:.1f}% on four and {:.1f}% on four H200s"
    assert said.format(*later) in text
    by = layers_by_case(results("grid_4xh200")["rows"])
    wide, rest = by_width(by_hand("grid_4xh200"))
    assert f"take {min(wide):.0f}% and {max(wide):.0f}% of the time" in text
    assert f"{min(rest):.0f}% to {max(rest):.0f}% where the host is behind" in text
    best = [100 * min(time for who, time in ms.items() if who.startswith("course"))
            / min(time for who, time in ms.items() if who.startswith("megatron")) for ms in by.values()]
    assert f"less time than the faster of theirs, {min(best):.0f}% to {max(best):.0f}%" in text and max(best) < 100


def by_hand(name: str, part: str = "") -> dict[str, float]:
    """What ours by kernels of our own take of the time of megatron-core's layers with Transformer Engine, in percent, by case,
    where both were measured."""
    ours, theirs = "course, Triton kernels", "megatron-core, Transformer Engine"
    found = results(name)
    by = layers_by_case((found[part] if part else found)["rows"])
    return {case: 100 * ms[ours] / ms[theirs] for case, ms in by.items() if ours in ms and theirs in ms}


def by_width(shares: dict[str, float]) -> tuple[list[float], list[float]]:
    """Those of the widest layers, and the rest."""
    wide, rest = ([share for case, share in shares.items() if ("3072" in case) == which] for which in (True, False))
    return wide, rest


def beside_megatron(rows: list[dict[str, Any]]) -> tuple[list[float], list[float], float]:
    """Our layers' share of the time of megatron-core's, in percent, plain and with Transformer Engine; and sequence parallelism's
    greatest share of the time of none."""
    by = layers_by_case(rows)
    return ([100 * ms["course"] / ms["megatron-core"] for ms in by.values()],
            [100 * ms["course, sequence parallel"] / ms["megatron-core, Transformer Engine"] for ms in by.values()
             if "megatron-core, Transformer Engine" in ms],
            max(ms["course, sequence parallel"] / ms["course"] for ms in by.values()))


def layers_by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds of the layers alone, by case and by whose they are."""
    by: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["case"].endswith("layers"):
            by.setdefault(r["case"], {})[r["by"]] = r["ms"]
    return by


GATHERED = ["DiT-XL/2, 256 px, 32 samples", "GPT 124M, 32 samples", "GPT 350M, 16 samples", "DiT-XL/2, 512 px, 16 samples",
            "GPT 1.3B, 4 samples"]
WAYS = ["in two parts, in a graph", "in a graph", "as one, in a graph", "one by one, in two parts", "one by one", "as one"]


def gathered(model: str) -> list[float]:
    """The times of a model in all ways of sequence parallelism."""
    return [row("sp_2xh100", f"{model}, {way}")["ms"] for way in WAYS]


def gathered_again(model: str) -> dict[str, float]:
    """The same on another machine, by way; in two parts it was not measured there."""
    rows = results("sp_2xh100")["again"]["rows"]
    return {r["case"].removeprefix(f"{model}, "): r["ms"] for r in rows if r["case"].startswith(model)}


@pytest.mark.parametrize("model", GATHERED)
def test_ways_of_sequence_parallelism(model: str) -> None:
    said, again = cells(model, "What can sequence parallelism hide"), gathered_again(model)
    wanted = [[row("sp_2xh100", f"{model}, as one")["sample_mb"]],
              *([ms, again[way]] if way in again else [ms] for way, ms in zip(WAYS, gathered(model), strict=True))]
    assert [d for cell, values in zip(said, wanted, strict=True) for d in differences(cell, values)] == []


def test_what_is_said_of_ways_of_sequence_parallelism() -> None:
    """In the page and in the library."""
    text = MEASURED.partition("In a graph, two parts make")[2].partition("\n\n")[0].replace("\n", " ")
    times = {model: gathered(model) for model in GATHERED}
    parts, copies = ([100 * (ms[way] / ms[1] - 1) for ms in times.values()] for way in (0, 2))
    assert f"every step {min(parts):.0f} to {max(parts):.0f}% longer" in text
    assert f"the copy costs {min(copies):.0f} to {max(copies):.0f}%" in text
    both = [(ms[4], ms[5]) for ms in times.values()], [(ms["one by one"], ms["as one"]) for ms in map(gathered_again, GATHERED)]
    shorter = [[round(100 * (1 - as_one / one)) for one, as_one in ways] for ways in both]
    short, (once, otherwise) = [n for found in shorter for n in found[:-1]], [found[-1] for found in shorter]
    assert f"as one in seven cases of eight, by up to {max(short)}%" in text and once > 0 > otherwise
    comment = " ".join(Path(overlapped_linear.__file__).read_text().replace("\n#", " ").split())
    assert f"up to {max(short)}% shorter as one, in one case of eight {-min(short)}% longer" in comment and len(short) == 8
    assert sum(n < 0 for n in short) == 1 and f"by {once}% shorter or {-otherwise}% longer" in comment
    layers: dict[str, list[float]] = {}
    for r in results("sp_4xh100")["rows"]:
        layers.setdefault(r["case"], []).append(r["ms"])
    assert f"{' and '.join(f'{ms:.1f}' for ms in layers['one by one, in two parts'])} ms in two parts" in text
    assert f"{' and '.join(f'{ms:.1f}' for ms in layers['one by one'])} one by one, {layers['as one'][0]:.1f} as one" in text
    assert f"{' and '.join(f'{ms:.1f}' for ms in layers['megatron-core, Transformer Engine'])} by megatron-core" in text
    library, (dit, gpt) = overlapped_linear.__doc__.replace("\n", " "), (times[GATHERED[0]], times[GATHERED[-1]])
    assert f"take {dit[1]:.1f} ms for a DiT-XL/2 as it is here and {dit[0]:.1f} in two parts" in library
    assert f"GPT 1.3B {gpt[1]:.1f} and {gpt[0]:.1f}, both in a graph" in library


def test_what_is_exchanged_through_memory() -> None:
    """Rates of two H100s, and steps; what is empty was not measured."""
    found = results("symmetric_2xh100")
    us, large = ({r["case"]: 1e3 * r["ms"] for r in found["rows"] if r["size"] == size}
                 for size in ([32, 256, 1152], [16, 2048, 3072]))
    text = MEASURED.partition("**Through each other's memory.**")[2].partition("## Predicted")[0].replace("\n", " ")
    together = f"beside it {us['matmul']:.1f}, and both together {us['matmul beside gather, NCCL']:.1f}"
    assert f"a gather takes {us['gather, NCCL']:.1f} us, the matmul {together}" in text
    assert f"{us['gather, NCCL']:.1f} and {us['scatter, NCCL']:.1f} us" in text
    assert f"as many bytes, {us['all-reduce, NCCL']:.1f}" in text
    engines = us["matmul beside gather, through memory"]
    assert f"take {us['gather, through memory']:.1f} us for the gather" in text and f"both take {engines:.1f}" in text
    added = large["matmul beside gather, through memory"] - large["matmul"]
    assert f"a gather by engines adds {added:.0f} of its {large['gather, through memory, by an engine']:.0f} us" in text
    steps, before = ({r["case"].removesuffix(", in a graph"): r for r in found[key]["rows"]} for key in ("steps", "before"))
    ways = ((before, ""), (before, ", Triton kernels"), (before, ", Triton kernels, no sequence parallelism"),
            (steps, ", Triton kernels"), (steps, ", Triton kernels, through memory"),
            (steps, ", Triton kernels, no sequence parallelism"))
    for model in [name for name in GATHERED if "124M" not in name]:
        said = cells(model, "**Through each other's memory.**")
        for cell, (rows, way) in zip(said, ways, strict=True):
            measured = rows.get(model + way, rows.get(f"{model}, in a graph") if not way else None)
            assert differences(cell, [] if measured is None else [measured["ms"]]) == []
    waits = steps[f"{GATHERED[0]}, Triton kernels, one after the other"]["ms"]
    assert f"waits for each collective, {waits:.1f} ms" in text
    needs = [rows[f"{GATHERED[0]}, Triton kernels"]["memory_gb"] for rows in (steps, before)]
    assert "needs {:.1f} GB in place of {:.1f}".format(*needs) in text


EXCHANGES = ("matmul", "gather, NCCL", "matmul beside gather, NCCL", "gather, through memory",
             "matmul beside gather, through memory", "scatter, NCCL", "scatter, through memory", "all-reduce, NCCL")
SIZES = {"DiT-XL/2, 256 px, 32 samples": [32, 256, 1152], "GPT 350M, 16 samples": [16, 1024, 1024],
         "GPT 1.3B, 4 samples": [4, 2048, 2048], "width 3072, 16 samples": [16, 2048, 3072]}


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("name", SIZES)
def test_what_is_exchanged_on_h200s(gpus: int, name: str) -> None:
    values = [1e3 * row("exchange_h200", case, gpus=gpus, size=SIZES[name])["ms"] for case in EXCHANGES]
    said = cells(f"{gpus} GPUs: {name}", "The same on H200s")
    assert [d for cell, value in zip(said, values, strict=True) for d in differences(cell, [value])] == []


def test_steps_with_sequence_parallelism_on_h200s() -> None:
    """On two and four; and what is concluded."""
    text = " ".join(MEASURED.partition("There sequence parallelism through memory")[2].partition("\n\n")[0].split())
    for gpus, longer, saved in ((2, "{:.0f} to {:.0f}% longer on two", "in {:.0f} to {:.0f}% less memory on two"),
                                (4, "and {:.0f} to {:.0f}% on four", "and {:.0f} to {:.0f}% less on four")):
        through, by_nccl, less = [], [], []
        for model in GATHERED:
            nccl, hand, memory, none = (row(f"sp_{gpus}xh200", f"{model}, {way}in a graph") for way in (
                "", "Triton kernels, ", "Triton kernels, through memory, ", "Triton kernels, no sequence parallelism, "))
            wanted = [nccl["ms"], hand["ms"], *(r[key] for r in (memory, none) for key in ("ms", "memory_gb"))]
            shown = cells(f"{gpus} GPUs: {model}", "Whole steps (`course bench sp`, those in graphs")
            assert [d for cell, value in zip(shown, wanted, strict=True) for d in differences(cell, [value])] == []
            through.append(100 * memory["ms"] / none["ms"] - 100)
            by_nccl.append(100 * hand["ms"] / none["ms"] - 100)
            rooms = 4e-3 * memory["sample_mb"] * int(model.split()[-2])             # two places each, of two kinds
            less.append(100 - 100 * (memory["memory_gb"] + rooms) / none["memory_gb"])
        assert longer.format(min(by_nccl), max(by_nccl)) in text and saved.format(min(less), max(less)) in text
        if gpus == 2:
            assert f"takes {-max(through):.0f} to {-min(through):.0f}% less time than none on two" in text
        else:
            assert through == sorted(through, reverse=True)
            assert f"from {through[0]:.0f}% more for the first of these models to {-through[-1]:.0f}% less for the last" in text
    slow, fast = ([row(f"sp_{gpus}xh200", f"{model}, {way}")["ms"] for gpus in (2, 4) for model in GATHERED[:2]]
                  for way in ("one by one", "as one"))
    saved = [100 * (1 - b / a) for a, b in zip(slow, fast, strict=True)]
    assert "in {:.0f} and {:.0f} ms on two and in {:.0f} and {:.0f} ms on four".format(*fast) in text
    assert "it would be {:.0f}, {:.0f}, {:.0f} and {:.0f} ms".format(*slow) in text
    assert f"{min(saved):.0f} to {max(saved):.0f}% shorter" in text


def test_a_gather_and_a_scatter_through_memory_take_as_long_as_an_all_reduce() -> None:
    before = [1e3 * r["ms"] for r in results("exchange_h200")["before"]["rows"] if r["gpus"] == 4]
    text = " ".join(MEASURED.split())
    assert "with PyTorch's sum one on four took {:.0f}, {:.0f}, {:.0f} and {:.0f} us".format(*before) in text
    for size in SIZES.values():
        us = {case: row("exchange_h200", case, gpus=4, size=size)["ms"] for case in EXCHANGES}
        assert abs((us["gather, through memory"] + us["scatter, through memory"]) / us["all-reduce, NCCL"] - 1) < 0.04
    wide = SIZES["width 3072, 16 samples"]
    costs = [(row("exchange_h200", "matmul beside gather, NCCL", gpus=n, size=wide)["ms"]
              - row("exchange_h200", "matmul", gpus=n, size=wide)["ms"])
             / row("exchange_h200", "gather, NCCL", gpus=n, size=wide)["ms"] for n in (2, 4)]
    assert f"one that is hidden costs {100 * min(costs):.0f} to {100 * max(costs):.0f}% of its time" in text
    beside = row("exchange_h200", "matmul beside gather, through memory", gpus=4, size=SIZES["GPT 1.3B, 4 samples"])["ms"]
    alone = row("exchange_h200", "matmul", gpus=4, size=SIZES["GPT 1.3B, 4 samples"])["ms"]
    assert f"(1.3B: {1e3 * beside:.0f} us where the matmul alone takes {1e3 * alone:.0f})" in text


def test_the_ladders_measured_again() -> None:
    """All rungs within 1.5%, but for those of which the text says otherwise."""
    text = " ".join(MEASURED.split())
    for kind, said, hosts in (
            ("vit", "Sixteen of these rungs once more", {"one sample: eager": "{:.0f}% and",
                                                         "one sample: compiled": "{:.0f}% longer."}),
            ("gpt", "Seven of GPT's rungs", {}),
            ("dit", "nine of DiT's again", {"256 px: fp8, compiled, narrow stream": "native {:.0f}% longer",
                                            "256 px: fp8 by Transformer Engine": "by Transformer Engine {:.0f}%."})):
        rows = results(f"{kind}_h200")["again"]["rows"][:16]
        longer = {r["rung"]: 100 * (r["ms"] / row(f"{kind}_h200", r["rung"])["ms"] - 1) for r in rows}
        assert said in text and len(rows) == {"Sixteen": 16, "Seven": 7, "nine": 9}[said.split()[0]]
        assert all(f" {what.format(longer.pop(rung))}" in text for rung, what in hosts.items())
        assert max(abs(percent) for percent in longer.values()) < 1.5
    assert "whose host was slow, are within 1.5%, but for the two" in text
    assert '("again" in the files): all within 1.5%,' in text
    first, reading = (results("vit_h200")["again"]["rows"][these] for these in (slice(7), slice(16, None)))
    later = []
    for again in first:
        before = row("vit_h200", again["rung"])
        assert abs(again["samples_per_s"] / before["samples_per_s"] - 1) < 0.01
        later.append(again["first_s"] - before["first_s"])
    fed = {r["rung"]: 100 * (r["ms"] / row("vit_h200", r["rung"])["ms"] - 1) for r in reading}
    idle = next(r for r in reading if r["rung"] == "bf16, compiled, 8 loader processes")
    assert len(fed) == 6 and f"a DataLoader fed {idle['samples_per_s']:.0f} samples/s" in text and fed.pop(idle["rung"]) < 0
    assert f"The others took up to {max(fed.values()):.0f}% longer than in the table." in text
    assert "The seven of the first are within 1%" in text and f"took {min(later):.0f} to {max(later):.0f} s longer there" in text


def test_parity_through_memory_on_h200s() -> None:
    two, four = (results(name)["through memory"]["rows"] for name in ("parity_2xh200", "parity_h200"))
    assert f"{len(two)} comparisons on two H200s and {len(four)} on four are equal" in " ".join(MEASURED.split())
    ring, later = (results("parity_2xh200")[key]["rows"] for key in ("ring in float32", "ring"))
    new = [sum(r["precision"] != "fp64" and "symmetric" in r["layout"] for r in ring),
           sum(r["precision"] == "fp32" and "ring" in r["layout"] for r in ring)]
    assert (f"{len(ring)} comparisons on two are equal, {new[0]} of them with that sum and {new[1]} with today's kernel"
            in " ".join(MEASURED.split()))
    assert f"also compiled and in a graph: {len(later)} comparisons, all equal" in " ".join(MEASURED.split())
    assert not any(r["wrong"] for r in two + four + ring + later)


def test_a_vit_whose_tokens_four_ranks_do_not_cut_evenly() -> None:
    ms = [row("tp_vit_h200", f"{way}, compiled", gpus=4)["ms"] for way in ("plain", "sequence", "overlap")]
    text = " ".join(MEASURED.partition("What is slower than something beside it")[2].partition("\n\n")[0].split())
    said = "takes {:.1f} ms without sequence parallelism, and with it {:.1f} with nothing overlapped and {:.1f} overlapped"
    assert said.format(*ms) in text
    copies = next(r for r in results("sp_2xh100")["copies"] if (r["samples"], r["tokens"], r["width"]) == (8, 4050, 1024))
    assert f"takes {copies['cat_us']:.0f} us" in text and f"in one go, takes {copies['rank_by_rank_us']:.0f}" in text
    for name in ("tp_vit_h200", "tp_vit_h100"):
        graph = [row(name, f"{way}, in a graph", gpus=4)["ms"] for way in ("overlap", "sequence", "plain")]
        assert "{:.1f} ms overlapped, {:.1f} with nothing overlapped, {:.1f} without".format(*graph) in text
        assert graph[0] == min(graph)
    ours, theirs = (row("tp_h200", f"{case}, compiled", gpus=4)["ms"] for case in ("overlap", "DTensor sequence parallel"))
    assert f"tp=4 takes {ours:.1f} ms, where DTensor takes {theirs:.1f}" in text


def test_layers_by_kernels_of_our_own() -> None:
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r in results("grid_2xh100")["again"]["rows"]:
        rows.setdefault((r["pair"], r["case"]), {})[r["by"]] = r["ms"]
    shares = {key: 100 * ms["course, Triton kernels"] / ms["megatron-core, Transformer Engine"] for key, ms in rows.items()}
    fast, slow = ([share for (pair, _), share in shares.items() if pair == which] for which in ("first", "second"))
    text = " ".join(MEASURED.split()).partition("By kernels of our own (`course")[2].partition("## ")[0]
    assert f"take {min(fast):.0f}% to {max(fast):.0f}% of the time" in text
    assert f"and {min(slow):.0f}% to {max(slow):.0f}% where it is slow" in text


def test_micro_batches_with_16_bit_weights() -> None:
    text = MEASURED.partition("Of micro-batches the gradients")[2].partition("\n\n")[0].replace("\n", " ")
    found = results("masters_h100")["rows"]

    def mean(case: str, masters: bool, key: str = "ms") -> float:
        return statistics.mean(r[key] for r in found if r["case"].startswith(case) and r["masters"] == masters)

    assert f"takes {mean('1.3B, four', True):.1f} ms so, and {mean('1.3B, four', False):.1f} ms if every micro-batch casts " \
           "the weights anew (one run and two)" in text
    runs = [r["ms"] for r in found if r["case"].startswith("124M, two") and r["masters"]]
    assert abs(mean("124M, two", True) - mean("124M, two", False)) < max(runs) - min(runs)
    pipe = [mean("1.3B, pp=2, 8", masters, "memory_gb") for masters in (True, False)]
    assert "1.3B needs {:.1f} GB in place of {:.1f}".format(*pipe) in text


# --- in parallel: the label's first words, then in the order in which the numbers stand: file, case, which GPUs and field
LAYOUTS: list[tuple[str, list[tuple[str, str, dict[str, Any], str]]]] = [
    *((label, [("tp_h200", "symmetric", {"gpus": n}, "ms"), *(("tp_h200", "symmetric, compiled", {"gpus": n}, field)
                                                             for field in ("ms", "efficiency", "memory_gb")),
               ("tp_h200", "overlap", {"gpus": n}, "ms"), ("tp_h200", "overlap, compiled", {"gpus": n}, "ms"),
               ("tp_h200", "DTensor sequence parallel", {"gpus": n}, "ms"),
               ("tp_h200", "DTensor sequence parallel, compiled", {"gpus": n}, "ms"),
               ("tp_h200", "DTensor sequence parallel, compiled", {"gpus": n}, "memory_gb"),
               ("tp_h200", "DTensor sequence parallel", {"gpus": n}, "memory_gb")])
      for label, n in (("tensor and sequence parallel, 8 layers of hidden 4096, tp=4", 4), ("the same, tp=2", 2))),
    ("causal attention of 64k tokens, cp=4", [
        ("cp_h200", "64k causal ring", {"gpus": 4}, "ms"), ("cp_h200", "64k causal ring", {"gpus": 4}, "efficiency"),
        ("cp_h200", "64k causal all_to_all", {"gpus": 4}, "ms"), ("cp_h200", "64k causal all_to_all", {"gpus": 4}, "efficiency"),
        ("cp_h200", "64k causal PyTorch context_parallel", {"gpus": 4}, "ms"),
        ("cp_h200", "64k causal PyTorch context_parallel", {"gpus": 4}, "efficiency")]),
    ("full attention of 64k tokens, cp=4", [
        ("cp_h200", "64k full all_to_all", {"gpus": 4}, "ms"), ("cp_h200", "64k full all_to_all", {"gpus": 4}, "efficiency"),
        ("cp_h200", "64k full gather", {"gpus": 4}, "ms"), ("cp_h200", "64k full PyTorch context_parallel", {"gpus": 4}, "ms"),
        ("cp_h200", "64k full PyTorch context_parallel", {"gpus": 4}, "efficiency")]),
    ("data parallel, GPT 350M's stack, 4 GPUs", [
        ("dp_h200", case, {"gpus": 4, "bucket_mb": size}, "ms") for case, size in (
            ("bucketed", 25), ("bucketed, compiled", 100), ("none", 25), ("none, compiled", 25), ("ddp", 25),
            ("ddp, compiled", 100))]),
    *((label, [("pp_h200", case, {"gpus": n}, field) for case, field in (
        ("1f1b", "bubble"), ("1f1b", "theory"), ("interleaved", "bubble"), ("interleaved", "theory"), ("PyTorch 1F1B", "bubble"),
        ("PyTorch Interleaved1F1B", "bubble"))])
      for label, n in (("pp=4, 16 micro-batches: bubble", 4), ("the same, pp=2: bubble", 2))),
    *((label, [("zero_h200", case, {"gpus": n}, field) for case, field in (
        ("ZeRO-1, 16-bit copies", "ms"), ("ZeRO-1, 16-bit copies", "optimizer_gb"), ("ZeroRedundancyOptimizer", "ms"),
        ("ddp", "ms"), ("ddp", "optimizer_gb"))])
      for label, n in (("ZeRO-1, whole steps, 4 GPUs, with 16-bit copies", 4), ("the same, 2 GPUs", 2)))]
ON_TWO: list[tuple[str, list[tuple[str, str, dict[str, Any], str]]]] = [
    ("causal attention of 64k tokens", [
        ("cp_h200", f"64k causal {case}", {"gpus": 2}, field) for case in ("ring", "all_to_all", "PyTorch context_parallel")
        for field in ("ms", "efficiency")]),
    ("full attention of 64k tokens", [
        ("cp_h200", f"64k full {case}", {"gpus": 2}, field) for case, field in (
            ("all_to_all", "ms"), ("all_to_all", "efficiency"), ("gather", "ms"), ("PyTorch context_parallel", "ms"),
            ("PyTorch context_parallel", "efficiency"))]),
    ("data parallel, GPT 350M's stack", [
        ("dp_h200", case, {"gpus": 2, "bucket_mb": size}, "ms") for case, size in (
            ("bucketed", 25), ("bucketed, compiled", 100), ("none", 25), ("none, compiled", 25), ("ddp", 25),
            ("ddp, compiled", 100))])]
SHARES = ("efficiency", "bubble", "theory")                      # which are shown in percent


@pytest.mark.parametrize(("label", "wanted"), [*LAYOUTS, *ON_TWO])
def test_in_parallel(label: str, wanted: list[tuple[str, str, dict[str, Any], str]]) -> None:
    values = [row(file, case, **more)[field] * (100 if field in SHARES else 1) for file, case, more, field in wanted]
    text = re.sub(r"1F1B|ZeRO-1", "", " | ".join(cells(label, "## In parallel")))
    assert differences(text, values) == []


# --- the README's two short tables: the label, then of each number the file, the row and the field
SHORT: list[tuple[str, list[tuple[str, str, dict[str, Any], str]]]] = [
    ("GPT 124M, bf16, thousand tokens/s", [("gpt_h200", f"124M: {HAND}", {}, "tokens_per_s"),
                                           ("gpt_h200", "124M: Hugging Face's GPT-2, bf16, compiled", {}, "tokens_per_s")]),
    ("GPT 1.3B, FP8, thousand tokens/s", [("gpt_h200", f"1.3B: {HAND.replace('bf16', 'fp8')}", {}, "tokens_per_s"),
                                          ("gpt_h200", "1.3B: fp8 by Transformer Engine", {}, "tokens_per_s")]),
    ("DiT-XL/2, 256 px, bf16, images/s", [("dit_h200", f"256 px: {HAND}", {}, "samples_per_s"),
                                          ("dit_h200", f"256 px: {NARROW}", {}, "samples_per_s")]),
    ("DiT-XL/2, 256 px, FP8, images/s", [("dit_h200", f"256 px: {HAND.replace('bf16', 'fp8')}", {}, "samples_per_s"),
                                         ("dit_h200", "256 px: fp8 by Transformer Engine", {}, "samples_per_s")]),
    ("tensor and sequence parallel, hidden 4096", [("tp_h200", "symmetric, compiled", {"gpus": 4}, "ms"),
                                                   ("tp_h200", "DTensor sequence parallel, compiled", {"gpus": 4}, "ms")]),
    ("context parallel, causal attention of 64k tokens", [("cp_h200", "64k causal all_to_all", {"gpus": 4}, "ms"),
                                                          ("cp_h200", "64k causal PyTorch context_parallel", {"gpus": 4}, "ms")]),
    ("pipeline, interleaved: the bubble, theory 8.6%", [("pp_h200", "interleaved", {"gpus": 4}, "bubble"),
                                                        ("pp_h200", "PyTorch Interleaved1F1B", {"gpus": 4}, "bubble")])]


@pytest.mark.parametrize(("label", "wanted"), SHORT)
def test_the_readmes_short_tables(label: str, wanted: list[tuple[str, str, dict[str, Any], str]]) -> None:
    scale = {"tokens_per_s": 1e-3, **dict.fromkeys(SHARES, 100)}
    values = [row(file, case, **more)[field] * scale.get(field, 1) for file, case, more, field in wanted]
    text = " | ".join(cells(label, "## Measured on NVIDIA H200", README)).replace("GPT-2", "")
    assert differences(text, values) == []


# --- the README's sentences, and what stands in none of the tables
def test_what_the_demo_says() -> None:
    found = results("demo_cpu")
    first = {who: hours[0][0] for who, hours in found["scores"]["rmse"].items()}
    scores = found["scores"]
    assert (f"{scores['channels'][0]} RMSE {scores['hours'][0]} h: model {first['model']:.2f}, persistence "
            f"{first['persistence']:.2f}, {100 * scores['better_than_persistence']:.0f}% better\n") in README
    assert f"neighbouring grid points reaches {first['regression']:.2f} (" in README
    version = ".".join(found["torch"].split(".")[:2])
    assert f"({found['seconds']} s on a Linux virtual machine, PyTorch {version}, CPU;" in README
    model, persistence, climatology = ([lead[0] for lead in scores["rmse"][who]]
                                       for who in ("model", "persistence", "climatology"))
    wins = [hours for hours, ours, theirs in zip(scores["hours"], model, climatology, strict=True) if ours < theirs]
    assert all(ours < theirs for ours, theirs in zip(model, persistence, strict=True)) and wins == [*range(6, 49, 6)]
    assert "beats persistence throughout, and climatology for two days" in README
    made = simulation.Weather()
    assert f"from {made.test * made.times * layout.HOURS // 24} simulated days that the model never saw" in README


def test_what_a_laptop_learns_of_python() -> None:
    found = results("gpt_python_cpu")
    assert config.load("gpt-python").train.steps == found["steps"] == max(map(int, found["valid_loss"]))
    assert f"({found['steps']} steps, a few minutes on two cores, validation loss {found['valid_loss']['600']:.2f})" in USING


def test_what_the_readmes_picture_shows() -> None:
    ladder, times, shares = results_picture.one_gpu(), results_picture.baselines().values(), results_picture.four().values()
    ours, theirs = ([100 * both[which] for both in shares] for which in (0, 1))
    assert (f"from {ladder['TF32, files read in line']:.0f} samples/s, read in line in TF32, to {ladder['narrow stream']:.0f}, "
            f"compiled in bf16 with a narrow stream; the library {min(times):.1f} to {max(times):.2f} times as fast as what one "
            f"would take instead; on four GPUs {min(ours):.0f} to {max(ours):.0f}% efficient, PyTorch's own {min(theirs):.0f} to "
            f"{max(theirs):.0f}%]") in README


def dates(name: str) -> set[str]:
    """All that a file has, of itself and of its parts."""
    return set(re.findall(r'"date": "([^"]+)"', (RESULTS / f"{name}.json").read_text()))


def test_dates() -> None:
    """Those in the brackets that name a file, and these."""
    text, known = " ".join(MEASURED.split()), 0
    for inside in re.findall(r"\(([^()]*)\)", text):
        files = re.findall(r"`(\w+)\.json`", inside)
        for day, *more in re.findall(r"(20\d\d-\d\d-\d\d)(?:(?:, (\d\d))? and (\d\d))?", inside):
            if files:
                assert {day, *(f"{day[:8]}{later}" for later in more if later)} <= dates(files[0]), inside
                known += 1
    vit, tp, two = results("vit_h200"), results("tp_h200"), row("dp_h200", "bucketed", gpus=2, bucket_mb=25)
    by_hand_later = row("vit_h200", f"width 1024: fp8, {NARROW.partition(', ')[2]}")["date"]
    for said in (f"PyTorch {vit['torch'].rpartition('.')[0]}, CUDA {vit['cuda']}, {vit['date']} (the narrow stream "
                 f"{row('vit_h200', NARROW)['date']}, native FP8 {by_hand_later})",
                 f"by the code of {vit['again']['date']} (\"again\"",
                 f"again on {results('gpt_h200')['again']['date']}, on one more",
                 f"four H200s (PyTorch {tp['torch'].rpartition('.')[0]}, {tp['date']}, `bash",
                 f"H200s of another machine ({two['date']}; efficiency",
                 f"on four H100s ({results('parity_4xh100')['date']}), products of two axes",
                 f"what is scattered ({results('parity_2xh200')['ring in float32']['date']}), and",
                 f"beside slow hosts as well ({results('grid_2xh200')['date']}), ours"):
        assert said in text, said
    assert known == 11


def test_which_pytorch_these_figures_are_of() -> None:
    versions = {results(path.stem)["torch"].partition("+")[0] for path in RESULTS.glob("*.json")
                if "NVIDIA" in results(path.stem).get("hardware", "")}
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {version.rpartition(".")[0] for version in versions} == {"2.11"} and pinned
    assert f"are of PyTorch 2.11, which those machines had; `constraints.txt` pins {pinned[1]}." in MEASURED


def test_a_compiled_step_under_the_profiler() -> None:
    account = results("profile_h200")["accounts"]["16 samples, bf16, compiled"]
    by_itself = results("beginning_h200")["attention"][0]
    parts, heads = account["kinds"], by_itself["shape"][-1]
    text = " ".join(MEASURED.split())
    assert (f"Of a compiled step's {account['step']:.0f} ms under the profiler attention takes {parts['attention']:.0f} "
            f"(cuDNN's, by itself {by_itself['cudnn']} TFLOP/s with heads of {heads}), matmuls {parts['matmul']:.0f}, norms, "
            f"GELU and sums {parts['other']:.0f}.") in text
    assert f"Pairs of {results('loaders_h200')['pair_mb']:.0f} MB come from the page cache" in text


def test_a_stack_in_fp8() -> None:
    ms = {r["case"]: r["ms"] for r in results("fp8_h200")["rows"]}
    assert {(r["layers"], r["hidden"]) for r in results("fp8_h200")["rows"]} == {(8, 4096)}
    assert (f"A stack of hidden 4096, forward and backward with all casts: bf16 {ms['bf16']:.0f} ms (compiled "
            f"{ms['bf16, compiled']:.0f} ms), native FP8 {ms['native, delayed']:.0f} ms "
            f"({ms['native, delayed, compiled']:.0f} ms), Transformer Engine {ms['TE, delayed']:.0f} ms (`python"
            ) in " ".join(MEASURED.split())


def test_runs_of_the_first_day() -> None:
    runs, text = results("foundation_h200")["runs"], " ".join(MEASURED.split())
    assert f"ends at a validation loss of {runs['short-w8']['valid_loss']:.3f} on the simulated atmosphere in TF32" in text
    assert f"compiled in bf16 at {runs['opt-w8']['valid_loss']:.3f}." in text
    assert f"has lesson 08's {len(results('convergence')['runs'])} training curves" in text


def test_the_reference_vit_by_hand() -> None:
    hand, narrow = (row("vit_h200", rung)["samples_per_s"] for rung in (f"{NARROW}, Triton kernels", NARROW))
    assert (f"The reference ViT gains nothing: {hand:.0f} samples/s with Triton kernels, where the compiler's kernels "
            f"give {narrow:.0f}."
            in MEASURED)


def test_what_the_trial_of_the_heads_algorithms_needs() -> None:
    """Three results and both factors: memory by its shapes."""
    found = row("gpt_h200", f"350M: {HAND.replace('bf16', 'fp8')}")
    c: Any = config.load(found["preset"], found["settings"]).model
    trial = 2 * (2 * c.loss_chunk * c.vocab + c.vocab * c.dim + c.loss_chunk * c.dim)
    assert f"({trial / 1e9:.1f} of them are for the trial of the head's algorithms" in MEASURED


def test_how_far_the_clock_goes_down() -> None:
    text, rows = " ".join(MEASURED.split()), results("power_h200")["rows"]
    free = max(r.get("clock_mhz", 0.0) for r in results("vit_h200")["rows"])
    held = statistics.mean(r["clock_mhz"] for r in rows)
    assert {r["power_limit_w"] for r in rows} == {700.0} and "An H200 may draw 700 W, and then its clock goes down" in text
    assert f"from the {free:.0f} MHz that it promises to about {round(held, -2):.0f}." in text


def test_loss_curves_of_number_formats() -> None:
    text = " ".join(MEASURED.partition("## Loss curves")[2].partition("## In parallel")[0].split())
    cpu, gpu = results("curves_cpu"), results("curves_h200")
    off, there = ({name: 100 * gap for name, gap in found["gap"].items()} for found in (cpu, gpu))
    assert f"Over {cpu['steps']} steps of a small ViT, in means of {cpu['mean of']} losses, on a CPU" in text
    assert (f"within 6% of bf16: fp32 {off['fp32']:.1f}%, fp16 {off['fp16']:.0f}%, FP8 delayed "
            f"{off['native fp8, delayed']:.0f}%, current {off['native fp8, current']:.0f}%.") in text
    wrong = ("native fp8, gradients in E4M3", "native fp8, scales frozen")
    assert "(both off by more than 100%)" in text and min(off[name] for name in wrong) > 100
    assert (f"On an H200 the same curves stay within 6% too: native, delayed {there['native fp8, delayed']:.1f}%, current "
            f"{there['native fp8, current']:.1f}%; Transformer Engine, delayed {there['TE, delayed']:.1f}%, current "
            f"{there['TE, current']:.1f}%, block {there['TE, block']:.1f}% (") in text
    assert max(gap for found in (off, there) for name, gap in found.items() if name not in wrong) < 6


def test_large_models_in_fp8() -> None:
    text = " ".join(MEASURED.partition("## Loss curves")[2].partition("## In parallel")[0].split())
    gpt, dit, wide = (results("alignment_h200")["models"][name] for name in ("gpt-1.3b", "dit-xl", "dit-xl-512"))
    ranges = [[100 * gap for run, gap in model["gap"].items() if run.startswith("fp8") and run != loss_alignment.FROZEN]
              for model in (gpt, dit, wide)]
    assert [len(gaps) for gaps in ranges] == [4, 4, 4] and f"GPT 1.3B for {gpt['steps']} steps, all runs" in text
    (low, high), *dits = [(min(gaps), max(gaps)) for gaps in ranges]
    assert (f"is {low:.1f} to {high:.1f}% (GPT), {dits[0][0]:.0f} to {dits[0][1]:.0f}% (DiT, 256 px) and {dits[1][0]:.0f} to "
            f"{dits[1][1]:.0f}% (512 px, {wide['batch']} images a step) from bf16") in text
    spreads = [100 * model["spread"] for model in (gpt, dit, wide)]
    assert "seeds scatter by {:.1f}, {:.1f} and {:.0f}%.".format(*spreads) in text
    frozen = [100 * model["gap"][loss_alignment.FROZEN] for model in (dit, wide)]
    assert "Frozen scales are off by {:.0f}% and {:.0f}% in DiT.".format(*(round(gap, -1) for gap in frozen)) in text
    steps = results("alignment_h100")["models"]["gpt-1.3b"]["steps"]
    assert f"its first step's scales serve for {steps} steps" in text
    other = [100 * model["gap"]["bf16, flash attention"] for model in (gpt, dit, wide)]
    assert "makes {:.2f}% in GPT, {:.1f}% in DiT at 256 px and {:.1f}% at 512 px".format(*other) in text
    cut = [100 * results("alignment_cp_h200")["models"][name]["gap"]["bf16, cp=2"] for name in ("gpt-1.3b", "dit-xl")]
    assert "cut over two GPUs make {:.2f}% in GPT and {:.0f}% in DiT at 256 px".format(*cut) in text


def test_parity_on_h200s() -> None:
    two, four = (results(name)["rows"] for name in ("parity_2xh200", "parity_h200"))
    assert f"all are equal on two H200s ({len(two)} comparisons, `course" in MEASURED and not any(r["wrong"] for r in two + four)
    assert {re.sub(r"\d.*", "", r["layout"]) for r in four} == {"dp", "tp", "sp", "cp", "pp"}


def test_what_symmetric_memory_takes_that_pytorch_does_not_count() -> None:
    """Two places each for what is gathered and what is scattered, by their shapes."""
    text = " ".join(MEASURED.split())
    c = recorded_steps.stack(4096, 8, 32, 4096, 4, "stream=narrow", "parallel.dp=1", "parallel.tp=4",
                             *recorded_steps.WAYS["symmetric"])
    rooms = [activation_memory.foreign(rank) for rank in memory.ranks(c)]
    assert f"Through memory {max(rooms) / 1e9:.1f} GB more are in use" in text
    sizes = [4e-3 * row("sp_4xh200", f"{model}, Triton kernels, through memory, in a graph")["sample_mb"]
             * int(model.split()[-2]) for model in GATHERED]
    assert {f"{size:.1f}" for size in sizes} == {"0.1", "0.2"}
    assert f"(with the {min(sizes):.1f} and {max(sizes):.1f} GB that PyTorch does not count)" in text


def test_what_is_predicted_of_the_vit_on_four() -> None:
    (step,) = [step for step in recorded_steps.tensor_vit() if step.name == "tp_vit 4: overlap, compiled"]
    assert f"(2026-11-27), where {1e3 * step.time.step:.0f} are predicted." in " ".join(MEASURED.split())


def test_in_short() -> None:
    ms = [[row("sp_4xh200", f"{model}, Triton kernels, {way}, in a graph")["ms"] for model in GATHERED]
          for way in ("through memory", "no sequence parallelism")]
    longer = [100 * (ours / none - 1) for ours, none in zip(*ms, strict=True)]
    assert f"and from {max(longer):.0f}% slower to {-min(longer):.0f}% faster on four" in " ".join(MEASURED.split())


def test_bytes_by_which_samples_go_as_one() -> None:
    text = " ".join(MEASURED.partition("In a graph, two parts make")[2].partition("\n\n")[0].split())
    long = row("sp_2xh100", f"{GATHERED[-1]}, as one")["sample_mb"]
    assert f"with those of {long:.1f} MB it is one time so" in text
    short, small = overlapped_linear.SHORT / 2**20, overlapped_linear.SMALL / 2**20
    assert f"if each has {short:.0f} MB or more, or the batch {small:.0f}; else as one. The {small:.0f} MB lie between" in text
    wide = {r["mb"] for r in results("exchange_h200")["rows"] if r["size"] == [16, 2048, 3072]}
    assert {f"these batches and one of {mb:.0f} MB, 8 layers of width 3072" in text for mb in wide} == {True}


def test_sizes_of_what_is_exchanged() -> None:
    text, sizes = " ".join(MEASURED.split()), {tuple(r["size"]): r["mb"] for r in results("exchange_h200")["rows"]}
    wide = sizes.pop((16, 2048, 3072))
    assert f"hidden of gathers up to {max(sizes.values()):.0f} MB, and about a quarter of one of {wide:.0f} MB" in text
    assert f"Not all is hidden so: at {wide:.0f} MB" in text and "as one all-reduce by NCCL, within 4%, and" in text


def test_what_a_dits_modulation_takes() -> None:
    """By its shapes; and what is predicted of a larger one."""
    text = " ".join(MEASURED.partition("**Through each other's memory.**")[2].partition("## Predicted")[0].split())
    with torch.device("meta"):
        named = dict(build_model(config.load("dit-xl").model).named_parameters())
    cut = sum(p.numel() for name, p in named.items() if ".ada." in name)
    assert f"all-reduce of {4e-9 * cut:.1f} GB." in text and 0.3 < cut / sum(p.numel() for p in named.values()) < 0.36
    larger = config.load("dit-7b", ["model.latent=[4,256,256]", "train.micro_batch=1", "train.global_batch=16", "parallel.dp=1",
                                    "parallel.tp=8", "parallel.pp=2", "parallel.sp=true"])
    assert larger.model.tokens == 2**14
    assert f"with 16k tokens is predicted to need {memory.predict(larger).total / 1e9:.0f} GB.)" in text


def test_what_the_performance_model_is_made_of() -> None:
    text, host = " ".join(MEASURED.split()), results("host_h200")
    assert "(`host_h200.json`; `course bench host`, four minutes)" in text and round(host["took_s"] / 60) == 4
    assert f"With the table of hosts of {host['date']} today's" in text
    assert "in the median of fifty that were timed" in text and "plain_step is the median of the 50 measured" in host["meaning"]
    assert f"costs them {100 * block_time.BESIDE:.0f}% of its time" in text


def test_the_rest_of_list_4() -> None:
    """Times and peaks beside what was predicted when they were measured."""
    text = " ".join(MEASURED.partition("- **List 4**")[2].partition("\n\n")[0].split())
    found = results("heldout_4_h200")
    rows, (again,) = {r["name"]: r for r in found["rows"]}, found["again"]["rows"]
    before = rows[again["name"]]
    assert f"it took {again['ms']:.0f} ms in place of {before['ms']:.0f}, on another machine" in text
    assert f"while two other GPUs were in use; there {again['predicted_ms']:.0f} are predicted" in text
    assert "whose host was faster by an eighth" in text and round(8 * (1 - again["plain_step"] / before["plain_step"])) == 1
    peaks = sorted(abs(r["predicted_gb"] / r["memory_gb"] - 1) for name, r in rows.items() if name.startswith("2-"))
    assert f"The peak memory of four was within {100 * peaks[3]:.0f}%, of the others off by" in text
    assert "of the others off by {:.0f}, {:.0f}, {:.0f} (a softmax".format(*(100 * peak for peak in peaks[4:7])) in text
    assert f"which the model knows now) and {100 * peaks[7]:.0f}% (its first step needs more)" in text
    worst = next(r for r in results("heldout_4")["configurations"] if r["name"] == "2-01")
    assert f"each collective was {config.load(worst['preset'], worst['settings']).train.micro_batch}, one for each" in text
    long, wide = rows["4-09"], rows["4-06"]
    assert f"were predicted than the {long['memory_gb']:.1f} GB and {wide['memory_gb']:.1f} that they need" in text
    assert f"the first step of the former, which needs {long['first_gb']:.1f} GB, is in that" in text


def test_the_planners_first_choice() -> None:
    text, found = " ".join(MEASURED.split()), results("planned_2xh200")
    of = {model: [r for r in found["rows"] if r["preset"] == model and "ms" in r] for model in ("gpt-1.3b", "dit-xl")}
    assert found["verdict"] == {"gpt-1.3b": 1.0, "dit-xl": 1.0} and [len(rows) for rows in of.values()] == [7, 7]
    assert "of seven layouts that were measured of GPT 1.3B and seven of DiT-XL" in text
    first, through = ([100 * (1 - r["predicted_ms"] / r["ms"]) for rows in of.values() for r in rows if which(r)] for which in (
        lambda r: r["choice"] == 1, lambda r: "parallel.overlap=symmetric" in r["settings"]))
    assert len({f"{off:.0f}" for off in first}) == 1 and f"predicted {first[0]:.0f}% too short both times" in text
    assert "it was too hopeful, by {:.0f}% and by {:.0f}%.".format(*through) in text


def lines(after: str, header: str) -> list[str]:
    """The labels of a table: of its lines after this header, in the section after these words."""
    rest = MEASURED[MEASURED.index(after):]
    table = rest[rest.index(header):].split("\n\n")[0].splitlines()[2:]
    return [line.split(" | ")[0].removeprefix("| ") for line in table]


def test_every_line_of_the_tables_is_looked_at() -> None:
    assert lines("## On one NVIDIA H200", "| | samples/s |") == [label for label, _ in VIT]
    assert lines("GPT and DiT on the same GPU", "| | bf16 |") == [label for label, *_ in MODELS]
    assert lines("## In parallel", "| | this library |") == [label for label, _ in LAYOUTS]
    assert lines("## In parallel", "| two GPUs |") == [label for label, _ in ON_TWO]


def test_a_wrong_digit_is_noticed() -> None:
    assert differences("94.4 ms, 76% efficient", [94.3731, 76.32]) == []
    assert differences("94.5 ms, 76% efficient", [94.3731, 76.32]) == ["'94.5 ms, 76% efficient': 94.5 is 94.4 in the file"]
    assert "has the numbers ['94.4']" in differences("94.4 ms", [94.3731, 76.32])[0]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_how_they_were_measured(path: Path) -> None:
    """With these gaps and no others."""
    found = results(path.stem)
    assert {key for key in ABOUT if not found.get(key)} == GAPS.get(path.stem, (set(), ""))[0]
    assert "date" not in found or re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
