"""What is recorded of each kind of collective, on two real ranks; and what is told of traces written by hand."""

import json
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from course.ranks import collective_trace
from course.ranks.collective_mismatch import explain, trace_file
from course.ranks.collective_trace import Trace
from course.ranks.notebook_ranks import close, ranks
from course.utils.errors import rank_names

X, ALL = (4, 2), [0, 1]


def world():
    return dist.group.WORLD


def exchange(me, first, second):
    """Rank 0 does the first, rank 1 the second."""
    return first() if me == 0 else second()


def batch(x, me):
    operations = [dist.P2POp(dist.isend, x, 1 - me), dist.P2POp(dist.irecv, torch.empty(X), 1 - me)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def wanting():
    return torch.ones(X, requires_grad=True)


def pair():
    return [torch.empty(X), torch.empty(X)]


def mesh_sum(x, me):
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    dist.all_reduce(x, group=grid["b"].get_group())


def dtensors(x, me):
    grid = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(x, grid, [Shard(0)])
    return torch.mm(rows, rows.t())                  # whose second factor is gathered inside the operator


def test_of_an_answer_that_is_checked_its_own_line_is_named():
    """Though a line of the check's, which wraps what the answer calls, is further in."""
    found = {}
    code = compile("\n\ndef answer(call):\n    call()\n", "the cell with the answer", "exec")
    exec(code, found)
    told = []
    found["answer"](lambda: told.append(collective_trace.where(sys._getframe())))
    assert told[0].startswith("line 4 of the cell with the answer")
    assert "of test_collective_trace.py: `assert" in collective_trace.where(sys._getframe())


# what a rank does with its tensor, and what must then be in the traces of ranks 0 and 1
KINDS = {
    "all_reduce": (lambda x, me: dist.all_reduce(x), ["all-reduce (4, 2)"]),
    "all_reduce of integers": (lambda x, me: dist.all_reduce(x.int()), ["all-reduce (4, 2) int32"]),
    "all_gather": (lambda x, me: dist.all_gather(pair(), x), ["all-gather (4, 2)"]),
    "all_gather_into_tensor": (lambda x, me: dist.all_gather_into_tensor(torch.empty(8, 2), x), ["all-gather (4, 2)"]),
    "reduce_scatter": (lambda x, me: dist.reduce_scatter(torch.empty(X), [x, x]), ["reduce-scatter (4, 2) (4, 2)"]),
    "reduce_scatter_tensor": (lambda x, me: dist.reduce_scatter_tensor(torch.empty(2, 2), x), ["reduce-scatter (4, 2)"]),
    "broadcast": (lambda x, me: dist.broadcast(x, 1), ["broadcast from 1 (4, 2)"]),
    "reduce": (lambda x, me: dist.reduce(x, 1), ["reduce to 1 (4, 2)"]),
    "gather": (lambda x, me: dist.gather(x, pair() if me == 0 else None, dst=0), ["gather to 0 (4, 2)"]),
    "scatter": (lambda x, me: dist.scatter(x, pair() if me == 1 else None, src=1), ["scatter from 1 (4, 2)"]),
    "all_to_all": (lambda x, me: dist.all_to_all(pair(), [x, x]), ["all-to-all (4, 2) (4, 2)"]),
    "all_to_all_single": (lambda x, me: dist.all_to_all_single(torch.empty(X), x), ["all-to-all (4, 2)"]),
    "barrier": (lambda x, me: dist.barrier(), ["barrier"]),
    "all_gather_object": (lambda x, me: dist.all_gather_object([None, None], "abc"),
                          ["all-gather (1,) int64", "all-gather (18,) uint8"]),
    "send and recv": (lambda x, me: exchange(me, lambda: dist.send(x, 1), lambda: dist.recv(x, 0)),
                      ["send to 1 (4, 2)"], ["recv from 0 (4, 2)"]),
    "isend and irecv": (lambda x, me: exchange(me, lambda: dist.irecv(x, 1), lambda: dist.isend(x, 0)).wait(),
                        ["recv from 1 (4, 2)"], ["send to 0 (4, 2)"]),
    "recv from anyone": (lambda x, me: exchange(me, lambda: dist.send(x, 1), lambda: dist.recv(x)),
                         ["send to 1 (4, 2)"], ["recv (4, 2)"]),
    "batch_isend_irecv": (batch, ["send to 1 (4, 2)", "recv from 1 (4, 2)"], ["send to 0 (4, 2)", "recv from 0 (4, 2)"]),
    "new_group": (lambda x, me: dist.all_reduce(x, group=dist.new_group([0, 1])),
                  ["new_group of ranks 0 and 1", "all-reduce (4, 2)"]),
    "a mesh's group": (mesh_sum, ["new_group of rank 0", "new_group of rank 1", "all-reduce (4, 2)"]),
    "a DTensor": (dtensors, ["all-gather (2, 4)"]),
    "functional all_reduce": (lambda x, me: functional.all_reduce(x, "sum", world()).sum(), ["all-reduce (4, 2)"]),
    "functional all_gather": (lambda x, me: functional.all_gather_tensor(x, 0, world()).sum(), ["all-gather (4, 2)"]),
    "functional reduce_scatter": (lambda x, me: functional.reduce_scatter_tensor(x, "sum", 0, world()).sum(),
                                  ["reduce-scatter (4, 2)"]),
    "functional broadcast": (lambda x, me: functional.broadcast(x, 1, world()).sum(), ["broadcast from 1 (4, 2)"]),
    "functional all_to_all": (lambda x, me: functional.all_to_all_single(x, None, None, world()).sum(), ["all-to-all (4, 2)"]),
    "functional of functional": (lambda x, me: functional.all_reduce(functional.all_reduce(x, "sum", world()), "sum",
                                                                     world()).sum(), ["all-reduce (4, 2)"] * 2),
    "functional backward": (lambda x, me: functional.all_gather_tensor_autograd(wanting(), 0, world()).sum().backward(),
                            ["all-gather (4, 2)", "reduce-scatter (8, 2)"]),
    "differentiable backward": (lambda x, me: differentiable.all_reduce(wanting()).sum().backward(), ["all-reduce (4, 2)"] * 2),
}


def summary(record):
    dtype = [record["dtype"]] if record["dtype"] not in ("float32", "") else []
    return " ".join([record["op"], *(str(tuple(shape)) for shape in record["shapes"]), *dtype])


def record_all(folder):
    """On a rank: every kind under a trace of its own."""
    me = dist.get_rank()
    records = {}
    for kind, (function, *_) in KINDS.items():
        (folder / kind).mkdir(exist_ok=True)
        with _disable_current_modes(), Trace(folder / kind, me):     # without the launcher's own
            function(torch.ones(X), me)
        dist.barrier()
        records[kind] = [json.loads(line) for line in trace_file(folder / kind, me).read_text().splitlines()]
    return records


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Both ranks' records of every kind, and the folder with the traces."""
    folder = tmp_path_factory.mktemp("kinds")
    yield folder, ranks(2)(record_all, folder)
    close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_recorded(recorded, kind):
    folder, records = recorded
    expected = KINDS[kind][1:]
    for rank in (0, 1):
        made = records[rank][kind]
        assert [summary(record) for record in made] == expected[rank if len(expected) == 2 else 0]
        assert all(record["ranks"] == (ALL if kind != "a mesh's group" or "group" in record["op"] else [rank]) for record in made)
        assert all(os.path.basename(record["file"]) == "test_collective_trace.py" and record["code"] for record in made)
    assert explain(folder / kind, ["returned", "returned"]) == ("", False)
    assert explain(folder / kind, ["running", "running"]) == ("", False)


def test_the_averaging_of_distributed_data_parallel_is_recorded(tmp_path):
    def average():
        folder = tmp_path / str(dist.get_rank())
        folder.mkdir()
        with Trace(folder, 0):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 3))
            model(torch.ones(X)).sum().backward()    # C++ calls the collective, from a hook of autograd
        return summary(json.loads(trace_file(folder, 0).read_text().splitlines()[-1]))

    assert ranks(2)(average) == ["all-reduce (9,)"] * 2


def test_who_waits_for_whom(recorded):
    waits = {kind: [record["waits"] for record in recorded[1][1][kind]] for kind in KINDS}       # on rank 1
    assert waits["all_reduce"] == waits["barrier"] == waits["reduce"] == [ALL] and waits["gather"] == [[]]
    assert waits["functional all_reduce"] == waits["isend and irecv"] == [[]] and waits["send and recv"] == [[0]]


def test_a_record_costs_little(tmp_path):
    def cost():
        folder, x = tmp_path / str(dist.get_rank()), torch.ones(4)
        folder.mkdir()
        with Trace(folder, 0) as trace:
            start = time.perf_counter()
            for _ in range(300):
                trace.seen("all-reduce", {"tensors": [x], "process_group": dist.group.WORLD.boxed(), "async_op": False})
            return (time.perf_counter() - start) / 300

    assert min(ranks(2)(cost)) < 500e-6              # 30e-6 on a quiet machine


def call(op, shape=(4, 8), line=5, group=(0, 1), waits=None, dtype="float32", tag=0, name="0", code="f(x)"):
    if waits is None:
        waits = [int(op.split()[-1])] if op.startswith(("send", "recv")) else group
    return {"op": op, "shapes": [shape] if shape else [], "dtype": dtype if shape else "", "group": name, "ranks": group,
            "waits": waits, "tag": tag, "file": "/somewhere/step.py", "line": line, "code": code}


@pytest.fixture
def told(tmp_path):
    """explain, of calls per rank and the letters of their states."""
    def tell(states, *traces):
        for rank, records in enumerate(traces):
            trace_file(tmp_path, rank).write_text("".join(json.dumps(record) + "\n" for record in records))
        words = {"r": "running", "e": "returned", "x": "raised", "d": "died"}
        return explain(tmp_path, [words[letter] for letter in states])

    return tell


def test_nothing_to_say(told, tmp_path):
    assert explain(tmp_path, ["running"] * 4) == ("", False)         # no files yet
    same = [call("all-reduce"), call("barrier", None)]
    assert told("ee", same, same) == told("rr", same, same) == told("re", same, same) == ("", False)


@pytest.mark.parametrize(("first", "second", "told_of_second"), [
    (call("all-reduce"), call("all-gather"), "rank 1 all-gather of (4, 8) float32"),
    (call("all-reduce"), call("all-reduce", (4, 9)), "rank 1 all-reduce of (4, 9) float32"),
    (call("all-reduce"), call("all-reduce", dtype="bfloat16"), "rank 1 all-reduce of (4, 8) bfloat16"),
    (call("broadcast from 0"), call("broadcast from 1"), "rank 1 broadcast from 1 of (4, 8) float32"),
    (call("all-reduce"), call("barrier", None), "rank 1 barrier"),
])
@pytest.mark.parametrize("states", ["rr", "ee", "rd"])
def test_calls_that_differ(told, first, second, told_of_second, states):
    text, certain = told(states, [call("barrier", None), first], [call("barrier", None), second | {"line": 9}])
    assert certain
    assert text.startswith("The ranks disagree at collective 2 of ranks 0 and 1: rank 0 ")
    assert text.endswith(f"in line 5 of step.py: `f(x)`; {told_of_second} in line 9 of step.py: `f(x)`.")


def test_ranks_that_agree_are_named_together(told):
    odd, even = [call("all-reduce", group=(0, 1, 2, 3))], [call("barrier", None, group=(0, 1, 2, 3))]
    assert "of ranks 0-3: ranks 0 and 2 barrier in line 5 of step.py: `f(x)`; ranks 1 and 3 all-reduce" in \
        told("rrrr", even, odd, even, odd)[0]


def test_being_ahead_is_no_deadlock(told):
    text, certain = told("rr", [call("all-reduce"), call("all-reduce")], [call("all-reduce")])
    assert not certain
    assert text == ("Rank 0 waits at collective 2 of ranks 0 and 1, all-reduce of (4, 8) float32 in line 5 of step.py: `f(x)`, "
                    "for rank 1.")
    assert told("rr", [call("all-reduce", waits=[])], []) == ("", False)      # asynchronous: who knows whether it waits


def test_a_rank_that_left(told):
    group = (0, 1, 2, 3)
    three, four = [call("all-reduce", group=group)] * 3, [call("all-reduce", group=group)] * 4
    text, certain = told("rrer", four, four, three, four)
    assert certain
    assert text == ("Ranks 0, 1 and 3 wait at collective 4 of ranks 0-3, all-reduce of (4, 8) float32 in line 5 of step.py: "
                    "`f(x)`, for rank 2. Rank 2 returned before it.")
    assert told("rrxr", four, four, three, four)[0].endswith("Rank 2 raised an exception before it.")
    assert told("rrdr", four, four, three, four)[0].endswith("Rank 2 died before it.")
    text, certain = told("eeee", four, four, three, four)
    assert certain and text.startswith("Ranks 0, 1 and 3 reached collective 4") and text.endswith("Rank 2 returned before it.")


def test_each_group_counts_for_itself(told):
    pair = call("all-reduce", group=(0, 2), name="1")
    whole = call("barrier", None, group=(0, 1, 2))
    assert told("rer", [pair, whole], [whole], [pair, whole]) == ("", False)
    text, certain = told("rer", [pair, whole, pair], [whole], [pair, whole])
    assert not certain and "collective 2 of ranks 0 and 2 (group 1)" in text
    assert told("ree", [pair, whole, pair], [whole], [pair, whole])[1]


def test_pieces_of_all_to_all_may_differ(told):
    assert told("ee", [call("all-to-all", (4, 8))], [call("all-to-all", (6, 8))]) == ("", False)
    assert told("ee", [call("all-to-all", (4, 8))], [call("all-to-all", (6, 8), dtype="int64")])[1]


def test_messages_are_matched_by_pair_and_order(told):
    there, back = [call("send to 1"), call("recv from 1")], [call("recv from 0"), call("send to 0")]
    assert told("ee", there, back) == told("ee", there, back[::-1]) == ("", False)
    text, certain = told("rr", there, [call("recv from 0", (4, 9))])
    assert certain and text.startswith("The ranks disagree at message 1 from rank 0 to rank 1: rank 0 send to 1 of (4, 8)")
    tagged = [call("send to 1", tag=1), call("send to 1", (2,), tag=2)]
    assert told("ee", tagged, [call("recv from 0", (2,), tag=2), call("recv from 0", tag=1)]) == ("", False)


def test_a_message_that_never_comes(told):
    text, certain = told("er", [], [call("recv from 0", (8,))])
    assert certain
    assert text == ("Rank 1 waits at message 1 from rank 0 to rank 1, recv from 0 of (8,) float32 in line 5 of step.py: `f(x)`, "
                    "for rank 0. Rank 0 returned before it.")
    assert not told("rr", [], [call("recv from 0", (8,))])[1]
    text, certain = told("ee", [call("send to 1", waits=[])], [])
    assert certain and text.startswith("Rank 0 reached message 1 from rank 0 to rank 1")


def test_who_receives_from_anyone_is_not_judged(told):
    assert told("ere", [call("send to 1")], [call("recv", waits=[0, 1, 2])], [call("send to 1")]) == ("", False)


def test_waiting_in_a_circle(told):
    text, certain = told("rr", [call("recv from 1")], [call("recv from 0")])
    assert certain and text.endswith("\nRanks 0 and 1 wait for each other: a deadlock.")
    mixed = told("rrr", [call("recv from 1")], [call("barrier", None, group=(1, 2), name="1")], [call("send to 0")])
    assert mixed[1] and mixed[0].endswith("Ranks 0-2 wait for each other: a deadlock.")
    chain = told("rrr", [call("recv from 1")], [call("barrier", None, group=(1, 2), name="1")], [])
    assert not chain[1] and "circle" not in chain[0]                 # rank 2 is busy and may come


def test_an_unfinished_line_is_left_for_later(told, tmp_path):
    told("rr", [call("all-reduce")], [call("all-reduce")])
    with trace_file(tmp_path, 1).open("a") as file:
        file.write('{"op": "all-')
    assert explain(tmp_path, ["running", "running"]) == ("", False)


def test_names():
    assert [rank_names(ranks) for ranks in ([2], [0, 3], [0, 1, 2, 3], [0, 1, 3])] == ["rank 2", "ranks 0 and 3", "ranks 0-3",
                                                                               "ranks 0, 1 and 3"]
