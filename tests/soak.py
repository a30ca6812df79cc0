"""A run of two ranks that is killed, preempted and damaged at random until it is done, beside one that is left alone.

    python -m tests.soak STEPS SEED FOLDER [layouts] [experts] [KEY=VALUE]...

In each start something befalls it at a moment drawn from SEED: one rank or all are killed, one or all get a batch system's
warning; while it starts, after some steps, or while it saves. Between two starts the newest checkpoint may be damaged. The run
then has to have the losses and the last checkpoint of the other one, bit for bit, and nothing else may be left of it.
layouts: each start draws a layout, one process among them; then losses and weights are the same to BOUND of their value.
experts: the model is a GPT whose experts are cut over the ranks, with all its weights (ZeRO-3).

The ranks are forks of this process, which has imported the library: a start takes a second and not many. Whoever is left of a
start in which a rank was killed before all had met waits for it, and is killed as by a launcher.
"""

import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

from course import config
from course.checkpoint import checkpoint
from course.cli import main
from course.resilience.preemption import GO_ON
from course.training import trainer
from course.training.run_log import read_metrics
from tests.conftest import tiny_settings
from tests.faults import assert_same_losses, sequence
from tests.parallel.test_parity import MODELS as PARITY_MODELS

BOUND = 1e-10                                        # in float64
LIMIT = 900.0                                        # seconds until ranks that should end have to: others may use the cores, too
PATIENCE = 5.0                                       # the most that a launcher waits for the others of a rank
LAYOUTS = {"vit-demo": [(2, "parallel.dp=2"), (2, "parallel.tp=2"), (2, "parallel.pp=2"), (2, "parallel.cp=2"),
                        (1, "parallel.dp=1")],       # the first is that of the run that is left alone
           "gpt-moe-demo": [(2, "parallel.dp=2 parallel.ep=2 parallel.zero=3"), (2, "parallel.tp=2"),
                            (4, "parallel.dp=2 parallel.tp=2 parallel.ep=2 parallel.zero=3"),
                            (2, "parallel.cp=2 parallel.ep=2 parallel.zero=2"), (1, "parallel.dp=1")]}
MODELS = {"vit-demo": ["model.dropout=0.1"],
          "gpt-moe-demo": [*PARITY_MODELS["moe"][1], "model.balance_rate=0.01", "optim.name=adam", "optim.lr=1e-3"]}
MOMENTS = ["while starting", "after some steps", "after some steps", "while saving", "while saving"]
FATES = ["SIGKILL to one", "SIGKILL to one", "SIGKILL to all", "SIGUSR1 to one", "SIGUSR1 to all", "SIGTERM to all"]


def start(words: list[str], ranks: int, output: Path) -> list[int]:
    """`course train` of a preset and settings as so many ranks, forks of this process; their numbers. In a fork this returns
    never."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    found = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            with open(output.with_suffix(f".{rank}"), "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.argv = ["course", "train", *words]
            main.main()                               # ends with an exception, as the interpreter of a rank does
        found.append(pid)
    return found


class Ranks:
    """The processes of a start, and how they ended."""

    def __init__(self, words: list[str], ranks: int, output: Path):
        self.output, self.ended = output, dict[int, int]()
        self.pids = start(words, ranks, output)

    def alive(self) -> list[int]:
        """Those that are at work."""
        for pid in [pid for pid in self.pids if pid not in self.ended]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.ended[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.ended]

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            if pid in self.alive():
                os.kill(pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended."""
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
        return not self.alive()

    def statuses(self) -> list[int]:
        return [self.ended[pid] for pid in self.pids]

    def told(self) -> str:
        """What they printed last."""
        return "\n".join(f"--- rank {rank}\n" + self.output.with_suffix(f".{rank}").read_text()[-3000:]
                         for rank in range(len(self.pids)))


def last_step(run: Path) -> int:
    return max(sequence(run), default=0)


def await_moment(moment: str, ranks: Ranks, run: Path, most: int, chance: Random) -> None:
    """Return when it has come, or a rank has ended. most: steps until then."""
    begin, seconds = time.monotonic(), chance.uniform(0, 3)
    until, last = last_step(run) + chance.randint(1, most), 0
    while len(ranks.alive()) == len(ranks.pids):
        if moment == "while starting" and time.monotonic() > begin + seconds:
            return
        if moment != "while starting" and last < until:
            last = last_step(run)
            time.sleep(0.01)
        elif moment == "after some steps" or any((run / "checkpoints").glob(".*.partial")):
            time.sleep(chance.uniform(0, 0.01))
            return
        else:
            time.sleep(0.0005)


def befall(fate: str, moment: str, ranks: Ranks, chance: Random) -> None:
    """Send the signal; see that all ranks end as they should."""
    name, _, whom = fate.partition(" to ")
    number, victims = getattr(signal, name), ranks.pids if whom == "all" else [chance.choice(ranks.pids)]
    ranks.send(number, victims)
    if moment == "while starting" and not ranks.wait(chance.uniform(0, PATIENCE)) and len(ranks.alive()) < len(ranks.pids):
        ranks.send(signal.SIGKILL, ranks.alive())    # as a launcher does
    assert ranks.wait(LIMIT), f"{fate} {moment}: ranks live on\n{ranks.told()}"
    # whom a signal meets when all is done or before it listens, it ends; whoever loses another has status 1
    allowed = {0, 1, -signal.SIGKILL} if name == "SIGKILL" else {0, GO_ON, 1, -number, -signal.SIGKILL}
    if moment != "while starting":
        allowed -= {1, -signal.SIGKILL} if name != "SIGKILL" else set()
    assert set(ranks.statuses()) <= allowed, f"{fate} {moment}: {ranks.statuses()}\n{ranks.told()}"


def damage(run: Path, chance: Random) -> list[Path]:
    """Change a bit of the newest of several checkpoints, which is returned."""
    *others, one = checkpoint.steps(run / "checkpoints") or [run]
    if not others:
        return []
    file = chance.choice(sorted(one.iterdir()))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return [one]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds."""
    path, index = checkpoint.newest(run / "checkpoints", print) or (run, {"tensors": {}})
    return checkpoint.read_named(path, index, index["tensors"])


def assert_same(run: Path, whole: Path, bound: float) -> None:
    """The same steps, losses and tensors, bit for bit or to a bound."""
    assert_same_losses(run, whole, bound)
    one, other = tensors(run), tensors(whole)
    assert one.keys() == other.keys() and len(one) > 10
    worst = max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-12)) for name in one)
    print(f"tensors differ by up to {worst:.1e} of their largest value")
    same = all(torch.equal(one[name], other[name]) for name in one)
    assert same if not bound else worst <= bound


def left(run: Path) -> list[str]:
    """What should not be there when a run is over."""
    return sorted(str(path.relative_to(run)) for pattern in (".*", "*.tmp", "*.partial") for path in run.rglob(pattern))


def run_settings(preset: str, steps: int, folder: Path, precision: str) -> list[str]:
    """The settings of a small run, whatever its layout and name."""
    tiny = [word for word in tiny_settings(Path("none"), folder) if preset == "vit-demo" or not word.startswith("model.")]
    return [*MODELS[preset], *tiny, "data.source=mock", "data.workers=0", f"train.steps={steps}", "checkpoint.every=3",
            "train.eval_every=50", f"precision={precision}"]


def soak(steps: int, seed: int, folder: Path, preset: str, layouts: bool, more: list[str]) -> Counter[str]:
    """All of it; returns what happened, counted."""
    chance, count = Random(seed), Counter[str]()
    most, spoilt = max(12, min(60, steps // 8)), list[Path]()
    settings = [*run_settings(preset, steps, folder, "fp64" if layouts else "fp32"), *more]
    whole, run = (trainer.run_folder(config.load(preset, [*settings, f"log.name={name}"])) for name in ("whole", "soaked"))
    size, layout = LAYOUTS[preset][0]
    folder.mkdir(parents=True, exist_ok=True)
    alone = Ranks([preset, *settings, "log.name=whole", *layout.split()], size, folder / "whole")
    assert alone.wait(LIMIT + steps) and alone.statuses() == [0, 0], alone.told()
    while last_step(run) < steps or left(run):
        assert count["starts"] < 20 + steps, f"it comes to no end: {last_step(run)}, {left(run)}"
        if layouts:
            size, layout = chance.choice(LAYOUTS[preset])
        ranks, before = Ranks([preset, *settings, "log.name=soaked", *layout.split()], size, folder / "soaked"), last_step(run)
        moment, fate = chance.choice(MOMENTS), chance.choice(FATES)
        count["starts"] += 1
        await_moment(moment, ranks, run, most, chance)
        over = len(ranks.alive()) < size
        count["done before the moment" if over else f"{fate} {moment}"] += 1
        if over:
            assert ranks.wait(LIMIT) and set(ranks.statuses()) == {0}, ranks.told()
        else:
            befall(fate, moment, ranks, chance)
        told = f"{fate} {moment}: {ranks.statuses()}, steps {before} to {last_step(run)}"
        print(f"{time.strftime('%X')} {layout}: {told}", flush=True)
        for one in checkpoint.steps(run / "checkpoints"):
            if one not in spoilt:                    # which the next start that gets so far renames
                checkpoint.read_index(one)
        if last_step(run) < steps and not spoilt and chance.random() < 0.15:
            spoilt = damage(run, chance)
            count["damaged checkpoints"] += len(spoilt)
        spoilt = [one for one in spoilt if one.exists() and not one.with_name(one.name + checkpoint.DAMAGED).exists()]
    assert not left(run), left(run)
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, steps + 1))
    assert len(checkpoint.steps(run / "checkpoints", checkpoint.DAMAGED)) <= 1 and count["starts"] > 3
    assert_same(run, whole, BOUND if layouts else 0.0)
    return count


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = sys.argv[4:]
    numbers = soak(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), "gpt-moe-demo" if "experts" in words else "vit-demo",
                   "layouts" in words, [word for word in words if "=" in word])
    for what, times in sorted(numbers.items()):
        print(f"{times:5d} {what}")
