"""`course profile PRESET`: train a few steps under the profiler and say where their time went; or read what one wrote."""

from collections.abc import Sequence
from pathlib import Path

from course import config as configuration
from course.config import Config
from course.data import train_loader
from course.parallel import build_mesh, join, joined
from course.planner import free_memory
from course.training import memory_snapshot, trace_breakdown
from course.training.assemble import assemble
from course.training.profiler import Window, part, window_of
from course.training.trainer import run_folder
from course.utils.plots import save


def main(what: str, settings: Sequence[str]) -> Path | None:
    """Profile a preset, or read a trace (.json, .json.gz) or a memory snapshot (.pickle, .pickle.gz).

    Prints the account, and saves a trace's picture beside it. Returns the file; None with profile.tool=nsys, since nsys writes
    the report.
    """
    if what.endswith((".pickle", ".pickle.gz")):
        print(memory_snapshot.text(memory_snapshot.read(Path(what))))
        return Path(what)
    if what.endswith((".json", ".json.gz")):
        return tell(Path(what))
    config = configuration.load(what, ["profile.steps=3", *settings])
    with joined(config.train.device) as world:
        trace = record(config)
    return tell(trace) if trace and world.rank == 0 else trace


def record(config: Config) -> Path | None:
    """Train `profile.after` steps, then `profile.steps` under the profiler. Saves only this rank's trace."""
    mesh = build_mesh(config.parallel, join(config.train.device))
    window = window_of(config.profile, run_folder(config) / "profile", mesh.world.rank, mesh.world.device)
    free_memory.check(config, mesh)
    training = assemble(config, mesh)
    batches = train_loader(config, mesh.dp, mesh.world.device, 0, training.model.example)
    try:
        for _ in range(config.profile.after):
            training.step(next(batches))
        with window:
            for _ in range(config.profile.steps):
                with part("data"):
                    batch = next(batches)
                training.step(batch)
    finally:
        batches.close()
    return window.trace if isinstance(window, Window) else None


def tell(trace: Path) -> Path:
    """Print the account of a trace and draw it."""
    found = trace_breakdown.account(trace_breakdown.read(trace))
    print(trace_breakdown.text(found))
    figure = trace_breakdown.picture(found, "/".join(trace.parts[-4:-2]) or trace.name)
    drawn = save(figure, trace.parent / f"{trace.name.split('.')[0]}.png")
    print(f"\nwrote {drawn}; look at {trace} itself in perfetto.dev")
    return trace
