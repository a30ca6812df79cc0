"""Known mistakes of lesson 22, the capstone."""

from course.lab.checks.exercise import Mistake
from course.lab.exercises.lesson22_train_it import A_LIST, FOUR, GO_TOGETHER, KEYS, LEFT_OPEN

OWNED = " and layout.placements[p].owner"
LOCAL = "    norm = torch.linalg.vector_norm(tensor_norms(owned)) if owned else torch.zeros((), device=mesh.world.device)\n"
REDUCE = """        squares = norm.double() ** 2
        dist.all_reduce(squares, group=mesh.all.group)
        norm = squares.sqrt()
"""
LAYOUT = '"parallel.dp=4", "parallel.zero=1"'

MISTAKES = {
    "gradient-norm": (
        Mistake("copies count several times", OWNED, "",
                "what several ranks hold is counted by each of them: only the rank whose placement says `owner` counts it"),
        Mistake("this rank's part alone", REDUCE, "        pass\n",
                "each rank has the norm of its own part: add up the squares of all ranks with an all-reduce"),
        Mistake("norms added up", REDUCE, "        norm = norm.double()\n"
                "        dist.all_reduce(norm, group=mesh.all.group)\n",
                "norms do not add up, their squares do: square, all-reduce, and take the root"),
        Mistake("the root forgotten", "        norm = squares.sqrt()\n", "        norm = squares\n",
                "this is the square of the norm: take its root"),
        Mistake("along tp alone", "group=mesh.all.group", "group=mesh.tp.group",
                "pipeline stages and shards are left out: the pieces lie on all ranks, so the group is that of `mesh.all`"),
        Mistake("along the data-parallel axis alone", "group=mesh.all.group", "group=mesh.dp.group",
                "the other axes' pieces are left out: the pieces lie on all ranks, so the group is that of `mesh.all`"),
        Mistake("the largest part", "dist.all_reduce(squares, group", "dist.all_reduce(squares, dist.ReduceOp.MAX, group",
                "an all-reduce with MAX gives the largest rank's part: the squares have to be summed"),
        Mistake("the mean over ranks", "        norm = squares.sqrt()\n", "        norm = (squares / mesh.all.size).sqrt()\n",
                "the ranks' parts are pieces of one gradient, not samples: sum their squares, and divide by nothing"),
        Mistake("the owner counts everything", "layout.placements[p].owner", "mesh.dp.rank == 0",
                "this counts what the first data-parallel rank holds: it misses shares, and counts copies along other axes"),
        Mistake("the weights' norm", "[p.grad for p in parameters", "[p for p in parameters",
                "this is the norm of the weights: take `p.grad`"),
        Mistake("a number for each parameter", REDUCE,
                "        squares = torch.zeros(64, dtype=torch.float64)\n        squares[:len(owned)] = "
                "torch.tensor([grad.double().pow(2).sum() for grad in owned], dtype=torch.float64)\n"
                "        dist.all_reduce(squares, group=mesh.all.group)\n        norm = squares.sum().sqrt()\n",
                "one number is enough for all parameters: add up the squares on each rank first", by=("sent",)),
        Mistake("a rank that owns nothing stays out", LOCAL, "    if not owned:\n        return torch.zeros(())\n" + LOCAL,
                "a rank that owns nothing has to call the all-reduce too, with zero", silent=True, waits=True),
    ),
    # those that train are not compared with: each would take a learner ten seconds more
    "train-it": (
        Mistake("a text", '"optim.lr=1e-2"]', '"optim.lr=1e-2"][0]', A_LIST, silent=True),
        Mistake("another model", LAYOUT, f'{LAYOUT}, "model.depth=2"', LEFT_OPEN, silent=True),
        Mistake("more steps", LAYOUT, f'{LAYOUT}, "train.steps=200"', LEFT_OPEN, silent=True),
        Mistake("two ranks", LAYOUT, '"parallel.dp=2", "parallel.zero=1"', FOUR, silent=True),
        Mistake("eight ranks", LAYOUT, '"parallel.dp=4", "parallel.tp=2"', FOUR, silent=True),
        Mistake("a key that there is not", LAYOUT, '"parallel.ddp=4"', KEYS, silent=True),
        Mistake("ZeRO without buckets", LAYOUT, f'{LAYOUT}, "parallel.data=naive"', GO_TOGETHER, silent=True),
    ),
}
