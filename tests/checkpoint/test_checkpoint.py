import errno
import json
import os
import random as random_numbers
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course.checkpoint import checkpoint
from course.checkpoint import index as checkpoint_index
from course.checkpoint.shards import Damaged, Misplaced, Shard, boxes_of, read_box, write_shards
from course.lab.instruments.tensor_memory import MemoryMeter
from course.models import ViTConfig, build_model
from course.parallel import Axis, Placement, agree, initialize_serial, serial_layout
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError

ALONE = Axis("all")
STATE = {"step": 7, "samples": 28}


def make(seed=0, **changes):
    small = {"grid": (8, 16), "channels": 3, "patch": 2, "dim": 16, "depth": 2, "heads": 2}
    model = initialize_serial(build_model(ViTConfig(**{**small, **changes})), seed, torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(1e-3), fused=True)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1 * (seed + 1))
    optimizer.step()
    return model, optimizer


def save(folder, step=7, seed=0):
    model, optimizer = make(seed)
    return checkpoint.save(folder, optimizer, STATE | {"step": step}, {"a": 1}, serial_layout(model)), model, optimizer


def everyone():
    """All ranks, as one of them sees them."""
    size = dist.get_world_size()
    return Axis("all", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    path, model, optimizer = save(tmp_path)
    other, other_optimizer = make(seed=1)
    index = checkpoint.read_index(path)
    checkpoint.load(path, index, other, serial_layout(other), other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[a][key], other_optimizer.state[b][key])
    assert index["state"] == STATE and index["config"] == {"a": 1}


def test_the_format_is_the_contract(tmp_path):
    path, *_ = save(tmp_path)
    assert path.name == "step_000007"
    index = json.loads((path / "index.json").read_text())
    weight = index["tensors"]["blocks.1.attn.qkv.weight"]
    assert weight == {"shape": [3, 2, 8, 16], "dtype": "float32",
                      "pieces": [{"file": "rank00000.safetensors", "key": "blocks.1.attn.qkv.weight",
                                  "box": [[0, 3], [0, 2], [0, 8], [0, 16]], "flat": None}]}
    assert index["tensors"]["blocks.1.attn.qkv.weight.exp_avg"]["shape"] == [3, 2, 8, 16]
    assert {p.name for p in path.iterdir()} == {"index.json", *index["files"]}
    assert len(index["files"]["rank00000.safetensors"]["sha256"]) == 64


def test_a_box_is_put_together_from_the_pieces_that_overlap_it(tmp_path):
    from safetensors.torch import save_file

    whole = torch.arange(60.0).view(6, 10)
    cuts = {"a": ((0, 4), (0, 7)), "b": ((0, 4), (7, 10)), "c": ((4, 6), (0, 10))}
    save_file({key: whole[r[0]:r[1], c[0]:c[1]].contiguous() for key, (r, c) in cuts.items()}, tmp_path / "f.safetensors")
    index = {"tensors": {"w": {"shape": [6, 10], "dtype": "float32", "pieces": [
        {"file": "f.safetensors", "key": key, "box": [list(r), list(c)], "flat": None} for key, (r, c) in cuts.items()]}}}
    for box in [((0, 6), (0, 10)), ((2, 6), (3, 9)), ((5, 6), (0, 1)), ((0, 1), (6, 8))]:
        (a, b), (c, d) = box
        assert torch.equal(read_box(tmp_path, index, "w", box), whole[a:b, c:d])


def test_a_flat_range_is_made_of_boxes_in_order():
    """Every range of a box that has no 0 in a corner: its numbers in order, in a handful of boxes."""
    box = ((2, 5), (1, 3), (4, 8))
    numbers = torch.arange(24).view(3, 2, 4)
    for first in range(25):
        for end in range(first, 25):
            boxes = boxes_of(box, (first, end))
            found = [numbers[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(part, box, strict=True))].flatten()
                     for part in boxes]
            assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(first, end))
            assert len(boxes) <= 5 and all(len(part) for part in found)
    assert boxes_of(box, (0, 24)) == [box] == boxes_of(box, None)
    assert boxes_of((), (0, 1)) == [()]


def flip_a_byte(path):
    file = path / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def edit_index(path, old, new):
    (path / "index.json").write_text((path / "index.json").read_text().replace(old, new))


def without_checksum(path):
    """As older versions wrote it: then only what cannot be is seen."""
    index = json.loads((path / "index.json").read_text())
    del index["sha256"]
    (path / "index.json").write_text(json.dumps(index))
    return index


def lose_a_piece(path):
    without_checksum(path)
    edit_index(path, '"key"', '"kez"')


DAMAGES = {
    "a flipped bit": flip_a_byte,
    "a truncated file": lambda path: (path / "rank00000.safetensors").write_bytes(b"12"),
    "a missing file": lambda path: (path / "rank00000.safetensors").unlink(),
    "no index": lambda path: (path / "index.json").unlink(),
    "half an index": lambda path: (path / "index.json").write_text('{"format": 1, "tens'),
    "an index of nothing": lambda path: (path / "index.json").write_text("[]"),
    "another format": lambda path: edit_index(path, '"format": 2', '"format": 9'),
    "another number": lambda path: edit_index(path, '"samples": 28', '"samples": 29'),
    "an older one without a key": lose_a_piece,
    "an older one of no dicts": lambda path: [without_checksum(path), edit_index(path, '"state": {', '"state": 1, "x": {')],
    "a path outside": lambda path: edit_index(path, "rank00000", "../rank00000"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_message(tmp_path, damage):
    old, new = save(tmp_path, 5)[0], save(tmp_path, 10)[0]
    DAMAGES[damage](new)
    with pytest.raises(Damaged):
        checkpoint.read_index(new)
    said = []
    path, index = checkpoint.newest(tmp_path, said.append)
    assert path == old and index["state"]["step"] == 5
    assert "step_000010" in said[0]


def nodes(tree, path=()):
    """The place of everything in a JSON value."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from nodes(value, (*path, key))


def change_a_node(tree, chance):
    """Remove, replace or rename something anywhere in a JSON value."""
    *path, key = chance.choice(list(nodes(tree)))
    for step in path:
        tree = tree[step]
    value = tree.pop(key)
    new = chance.choice([None, True, -1, 10**30, 0.5, "x", "a/b", "\0", [], {}, [[0, 1]], float("nan")])
    if (what := chance.randrange(3)) and isinstance(tree, list):
        tree.insert(key, new)
    elif what:
        tree.update({key: new} if what == 1 else {f"{key}x": value})


def change_bytes(data, chance):
    """Change a bit, insert some bytes, or remove some."""
    at, what = chance.randrange(len(data)), chance.randrange(3)
    if what == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1:]
    if what == 1:
        return data[:at] + chance.randbytes(3) + data[at:]
    return data[:at] + data[at + chance.randint(1, 20):]


def test_whatever_happens_to_an_index_it_is_damaged_or_says_the_same(tmp_path):
    path, *_ = save(tmp_path)
    file, chance, damaged = path / "index.json", random_numbers.Random(10), 0
    good, data = checkpoint.read_index(path), file.read_bytes()
    for number in range(120):
        index = json.loads(data)
        change_a_node(index, chance)
        file.write_bytes(json.dumps(index).encode() if number % 2 else change_bytes(data, chance))
        try:
            index = checkpoint.read_index(path)
            assert {**index, "sha256": good["sha256"]} == good
        except Damaged as damage:
            damaged += 1
            assert str(path) in str(damage)
    assert damaged > 80                              # the others: blanks between words, a changed byte that changes no number


def test_of_an_older_index_and_of_a_pieces_header_nothing_comes_but_a_sentence(tmp_path, monkeypatch):
    """Without a checksum not all damage can be seen; what is seen late has to be a sentence, too."""
    path, model, optimizer = save(tmp_path)
    monkeypatch.setattr(checkpoint_index, "check_file", lambda *_: None)
    good, piece, chance, damaged = without_checksum(path), path / "rank00000.safetensors", random_numbers.Random(10), 0
    data = piece.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    checkpoint.load(path, checkpoint.read_index(path), model, serial_layout(model), optimizer)
    for number in range(60):
        index = json.loads(json.dumps(good))
        if number % 2:
            change_a_node(index["tensors"], chance)
        (path / "index.json").write_text(json.dumps(index))
        piece.write_bytes(data if number % 2 else change_bytes(data[:header], chance) + data[header:])
        try:
            checkpoint.load(path, checkpoint.read_index(path), model, serial_layout(model), optimizer)
        except CourseError:
            damaged += 1
    assert damaged > 30


def test_one_that_was_passed_over_takes_no_whole_ones_place(tmp_path):
    """Its step is not reached again at once: until then it would be the newest, and then one of those to keep."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    flip_a_byte(tmp_path / "step_000010")
    flip_a_byte(tmp_path / "step_000015")
    assert checkpoint.newest(tmp_path, print)[0].name == "step_000005"   # of whoever only reads: nothing changes
    assert len(checkpoint.steps(tmp_path)) == 3
    said = []
    assert checkpoint.newest(tmp_path, said.append, ALONE, writes=True)[0].name == "step_000005"
    assert "step_000015.damaged" in said[-1]
    for step in (8, 16):
        checkpoint.prune(tmp_path, 2, save(tmp_path, step)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000008", "step_000015.damaged", "step_000016"]
    (tmp_path / "step_000016").rename(tmp_path / "step_000015")          # and again
    flip_a_byte(tmp_path / "step_000015")
    checkpoint.newest(tmp_path, print, ALONE, writes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000008", "step_000015.damaged"]


def test_one_that_is_removed_is_none_from_the_start(tmp_path, monkeypatch):
    """Whoever is killed while it removes an old one leaves whole ones under their names, and the next one clears up."""
    for step in (1, 2, 3):
        save(tmp_path, step)

    def killed(path):
        if path.is_dir():
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prune(tmp_path, 2)
    left = checkpoint.steps(tmp_path)
    assert len(left) == 2 and all(checkpoint.read_index(one) for one in left)
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [one.name for one in left]


def test_one_of_another_version_keeps_its_name(tmp_path):
    save(tmp_path, 5)
    edit_index(save(tmp_path, 10)[0], '"format": 2', '"format": 9')
    for _ in range(2):
        assert checkpoint.newest(tmp_path, print, ALONE, writes=True)[0].name == "step_000005"
        checkpoint.prune(tmp_path, 1, tmp_path / "step_000005")
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_000005", "step_000010"]


def test_one_of_another_version_is_never_removed(tmp_path):
    """Neither when newer ones are enough, nor when its step is reached again."""
    edit_index(save(tmp_path, 10)[0], '"format": 2', '"format": 9')
    for step in (5, 15, 20):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 1, tmp_path / "step_000020")
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_000010", "step_000020"]
    save(tmp_path, 10)
    assert checkpoint_index.format_of(tmp_path / "step_000010") == 2
    assert checkpoint_index.format_of(tmp_path / "step_000010.format_9") == 9


def test_only_damaged_checkpoints_stop_the_run(tmp_path):
    flip_a_byte(save(tmp_path)[0])
    with pytest.raises(CourseError, match="every checkpoint"):
        checkpoint.newest(tmp_path, lambda text: None)
    assert checkpoint.newest(tmp_path / "nothing", print) is None


def test_the_last_k_stay(tmp_path):
    for step in (5, 10, 15, 20, 100):
        save(tmp_path, step)
    (tmp_path / ".step_000200.partial").mkdir()
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_000020", "step_000100"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("changes", "words"), [
    ({"dim": 32}, ["another model", "embed.pos", "[1, 32, 32]", "[1, 32, 16]"]),
    ({"depth": 3}, ["another model", "blocks.2.norm1.weight", "does not have it"]),
])
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changed(tmp_path, changes, words):
    path, *_ = save(tmp_path)
    model, optimizer = make(seed=1, **changes)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CourseError) as caught:
        checkpoint.load(path, checkpoint.read_index(path), model, serial_layout(model), optimizer)
    assert all(word in str(caught.value) for word in words)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("where", ["course.checkpoint.shards.stream", "course.utils.atomic_files.flush"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, where):
    old, model, optimizer = save(tmp_path, 5)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where, full)
    with pytest.raises(CourseError, match="disk is full"):
        checkpoint.save(tmp_path, optimizer, STATE | {"step": 10}, {}, serial_layout(model))
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path, print)[0] == old
    checkpoint.save(tmp_path, optimizer, STATE | {"step": 10}, {}, serial_layout(model))   # with space again it works
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_000005", "step_000010"]


FIRST, SECOND, WHOLE = ((0, 3), (0, 2)), ((3, 6), (0, 2)), ((0, 6), (0, 2))
NOT_WHOLE = {                                        # the pieces of a tensor of (6, 2): a box and a range of it each
    "two owners": [(WHOLE, None), (WHOLE, None)],
    "no owner of the rest": [(FIRST, None)],
    "two of a half, none of the other": [(FIRST, None), (FIRST, None)],
    "boxes that meet, and a gap": [(FIRST, None), (((2, 5), (0, 2)), None)],
    "a range twice": [(WHOLE, (0, 8)), (WHOLE, (6, 12))],
    "a range twice, and a gap": [(WHOLE, (0, 6)), (WHOLE, (5, 11))],
    "a range and the whole": [(FIRST, None), (SECOND, (0, 6)), (SECOND, (0, 3))],
}


def written(folder, pieces):
    """The entries of ranks that have written the pieces of a tensor."""
    tensors = [torch.zeros(stop - start if flat else [b - a for a, b in box]) for box, flat in pieces
               for start, stop in [flat or (0, 0)]]
    made = [Shard("w", Placement("w", (6, 2), box, flat=flat), torch.float32) for box, flat in pieces]
    return [write_shards(folder, rank, [piece], [tensor])
            for rank, (piece, tensor) in enumerate(zip(made, tensors, strict=True))]


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_what_could_not_be_read_back_is_not_published_and_replaces_nothing(tmp_path, name):
    old, *_ = save(tmp_path)
    partial = checkpoint.temporary(old)
    partial.mkdir()
    with pytest.raises(Misplaced, match=r"the ranks own \d+ numbers of w, which has 12"):
        checkpoint.publish(old, written(partial, NOT_WHOLE[name]), STATE, {})
    assert checkpoint.newest(tmp_path, print)[0] == old


@pytest.mark.parametrize("pieces", [[(WHOLE, None)], [(SECOND, None), (FIRST, None)], [(WHOLE, (7, 12)), (WHOLE, (0, 7))],
                                    [(FIRST, (2, 6)), (SECOND, None), (FIRST, (0, 2)), (((6, 6), (0, 2)), None)]])
def test_what_is_whole_is_published(tmp_path, pieces):
    final = tmp_path / "step_000001"
    checkpoint.temporary(final).mkdir()
    checkpoint.publish(final, written(checkpoint.temporary(final), pieces), STATE, {})
    assert torch.equal(read_box(final, checkpoint.read_index(final), "w", WHOLE), torch.zeros(6, 2))


def test_a_run_that_cannot_save_stops_at_once_and_leaves_nothing(tmp_path):
    """Unlike where the disk is full, the next save would not do better."""
    old, *_ = save(tmp_path, 5)
    model, optimizer = make()
    a, b = model.blocks["0"].norm1.weight, model.blocks["1"].norm1.weight
    layout = serial_layout(model)
    layout.placements[b] = layout.placements[a]      # two parameters of one name: the second's numbers would be lost
    with pytest.raises(Misplaced, match=r"step_000010 was not .* 32 numbers of blocks.0.norm1.weight, which has 16, some"):
        checkpoint.save(tmp_path, optimizer, STATE | {"step": 10}, {}, layout)
    assert list(tmp_path.iterdir()) == [old]


def saved_by_all(folder):
    """What each rank hears where both say that every parameter is theirs, and how often it looked whether all is there once."""
    looked, look = [], checkpoint_index.check_whole
    checkpoint_index.check_whole = lambda tensors: (looked.append(1), look(tensors))
    try:
        model, optimizer = make()
        serial = serial_layout(model)
        checkpoint.save(folder, optimizer, STATE, {}, replace(serial, mesh=replace(serial.mesh, all=everyone())))
    except CourseError as error:
        return type(error).__name__, str(error), len(looked)
    finally:
        checkpoint_index.check_whole = look


def test_one_rank_looks_whether_a_checkpoint_is_whole_and_all_stop_if_it_is_not(tmp_path):
    told = ranks(2)(saved_by_all, tmp_path)
    assert [kind for kind, _, _ in told] == ["Misplaced"] * 2 and told[0][1] == told[1][1]
    assert "step_000007 was not written: rank 0: the ranks own" in told[0][1]
    assert [count for _, _, count in told] == [1, 0] and list(tmp_path.iterdir()) == []


def test_an_error_without_words_is_an_error(tmp_path):
    def fail():
        raise OSError

    with pytest.raises(CourseError, match="OSError"):
        agree.run_on_all(ALONE, fail)


def test_saving_copies_one_tensor_at_a_time_to_the_host(tmp_path, monkeypatch):
    """A GPU's tensors are copies once they are on the host; here, where all are on it, every one is copied to see that."""
    model, optimizer = make()
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    with MemoryMeter() as meter:
        checkpoint.save(tmp_path, optimizer, STATE, {}, serial_layout(model))
    largest = max(p.nbytes for group in optimizer.param_groups for p in group["params"])
    assert largest <= meter.peak <= 2 * largest     # one is made while the one before is let go of


def test_nothing_is_pickled(tmp_path, monkeypatch):
    path, model, optimizer = save(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("unpickled something")

    for name in ("pickle.load", "pickle.loads", "torch.load"):
        monkeypatch.setattr(name, refuse)
    checkpoint.load(path, checkpoint.read_index(path), model, serial_layout(model), optimizer)
    assert all(np.frombuffer(file.read_bytes()[:2], "uint8").tolist() != [0x80, 4] for file in path.iterdir())


def damage_seen(path):
    """What each rank says of a checkpoint that all read together."""
    try:
        return sorted(checkpoint.read_index(path, everyone())["files"])
    except Damaged as damage:
        return str(damage)


def test_ranks_that_share_the_checksums_all_hear_of_a_damaged_file(tmp_path):
    """Rank 1 adds up the second file, which is damaged; rank 0 the first, which is not."""
    path, *_ = save(tmp_path)
    index = json.loads((path / "index.json").read_text())
    (path / "rank00001.safetensors").write_bytes((path / "rank00000.safetensors").read_bytes())
    index["files"]["rank00001.safetensors"] = index["files"]["rank00000.safetensors"]
    index["sha256"] = checkpoint_index.checksum(index)
    (path / "index.json").write_text(json.dumps(index))
    assert ranks(2)(damage_seen, path) == [["rank00000.safetensors", "rank00001.safetensors"]] * 2
    (path / "rank00001.safetensors").write_bytes(b"no")
    told = ranks(2)(damage_seen, path)
    assert told[0] == told[1] and "rank00001.safetensors is damaged" in told[0]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("what", ["index", "file"])
def test_a_checkpoint_that_cannot_be_reached_is_not_passed_over(tmp_path, monkeypatch, number, what):
    """A run that went on from an older one would lose what is good, and rename it."""
    for step in (7, 8):
        save(tmp_path, step)

    def fails(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_index, "read_file" if what == "index" else "sha256", fails)
    name = "index.json" if what == "index" else "rank00000.safetensors"
    with pytest.raises(CourseError, match=rf"step_000008/{name} cannot be read .*; to resume from an older checkpoint") as error:
        checkpoint.newest(tmp_path, print, ALONE, writes=True)
    assert not isinstance(error.value, Damaged) and "remove" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000007", "step_000008"]
