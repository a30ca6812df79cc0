"""Answers to exercises of lesson 16 that are not the library's own."""

RIGHT = {
    "box-overlap": '''
def overlap(wanted, piece):
    source, target = [], []
    for (a, b), (c, d) in zip(wanted, piece):
        first, last = (a if a > c else c), (b if b < d else d)
        if last <= first:
            return None
        source.append(slice(first - c, last - c))
        target.append(slice(first - a, last - a))
    return tuple(source), tuple(target)
''',
    "put-together": '''
import torch

def put_together(pieces, wanted, dtype):
    """Without `overlap`."""
    made = torch.zeros([b - a for a, b in wanted]).to(dtype)
    for box, read in pieces:
        corner = [max(side[0], mine[0]) for side, mine in zip(box, wanted)]
        end = [min(side[1], mine[1]) for side, mine in zip(box, wanted)]
        if all(e > c for c, e in zip(corner, end)):
            part = read(tuple(slice(c - side[0], e - side[0]) for c, e, side in zip(corner, end, box)))
            view = made
            for dim, (c, mine) in enumerate(zip(corner, wanted)):
                view = view.narrow(dim, c - mine[0], part.shape[dim])
            view.copy_(part)
    return made
''',
    "translate": '''
import torch

def order(heads, width):
    """Which of their rows stands where in ours."""
    d = width // heads // 3
    return torch.tensor([head * 3 * d + part * d + i for part in range(3) for head in range(heads) for i in range(d)])

def to_ours(theirs, heads):
    rows = order(heads, theirs["query_key_value.weight"].shape[1])
    return {"out.bias": theirs["dense.bias"].clone(), "out.weight": torch.transpose(theirs["dense.weight"], 0, 1),
            "qkv.bias": theirs["query_key_value.bias"][rows], "qkv.weight": theirs["query_key_value.weight"][:, rows].mT}

def to_theirs(ours, heads):
    rows = order(heads, len(ours["qkv.weight"])).argsort()
    return {"dense.weight": ours["out.weight"].mT, "dense.bias": ours["out.bias"],
            "query_key_value.weight": ours["qkv.weight"][rows].mT, "query_key_value.bias": ours["qkv.bias"][rows]}
''',
    "publish": '''
def publish(disk, name, files, old):
    """The leftover of a crash first; all bytes, then flushed; the removal is flushed too."""
    disk.remove("new")
    for file, data in files.items():
        disk.write("new/" + file, data)
    for file in files:
        disk.flush("new/" + file)
    disk.flush("new")
    disk.flush()
    disk.rename("new", name)
    disk.flush()
    disk.remove(old)
    disk.flush()
''',
}
# what passes on one example and is no answer
# fitted to one example
FITTED = {
    "box-overlap": '''
def overlap(wanted, piece):
    """Right for boxes that begin at the same place."""
    both = [(min(b, d) - a) for (a, b), (c, d) in zip(wanted, piece)]
    return (tuple(slice(0, n) for n in both),) * 2 if all(n > 0 for n in both) else None
''',
    "put-together": '''
import torch

def put_together(pieces, wanted, dtype):
    """Right where rows alone are cut, and all is read."""
    whole = torch.cat([read((slice(0, b - a), slice(0, d - c))) for ((a, b), (c, d)), read in pieces])
    (a, b), (c, d) = wanted
    return whole[a:b, c:d].to(dtype)
''',
    "translate": '''
def to_ours(theirs, heads):
    """Four heads of three."""
    rows = lambda x: x.view(4, 3, 3, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return {"qkv.weight": rows(theirs["query_key_value.weight"].T.contiguous()), "qkv.bias": rows(theirs["query_key_value.bias"]),
            "out.weight": theirs["dense.weight"].T, "out.bias": theirs["dense.bias"]}

def to_theirs(ours, heads):
    rows = lambda x: x.view(3, 4, 3, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return {"query_key_value.weight": rows(ours["qkv.weight"]).T, "query_key_value.bias": rows(ours["qkv.bias"]),
            "dense.weight": ours["out.weight"].T, "dense.bias": ours["out.bias"]}
''',
    "publish": '''
def publish(disk, name, files, old):
    """Three files."""
    for i in range(3):
        disk.write(f"new/rank{i:05d}.safetensors", files[f"rank{i:05d}.safetensors"])
        disk.flush(f"new/rank{i:05d}.safetensors")
    disk.flush("new")
    disk.rename("new", name)
    disk.flush("")
    disk.remove(old)
''',
}

WRONG = [(name, source, None) for name, source in FITTED.items()] + [
    ("box-overlap", RIGHT["box-overlap"].replace("slice(first - c, last - c)", "slice(first, last)"), "start of the whole"),
    ("box-overlap", RIGHT["box-overlap"].replace("slice(first - a, last - a)", "slice(first, last)"), "start of the whole"),
    ("box-overlap", RIGHT["box-overlap"].replace("tuple(source), tuple(target)", "tuple(target), tuple(source)"), "come first"),
    ("box-overlap", RIGHT["box-overlap"].replace("return tuple(source), tuple(target)", "return source, target"),
     "a tuple of them"),
    ("put-together", RIGHT["put-together"].replace("if all(", "if wanted and all("), ""),
    ("publish", RIGHT["publish"].replace("disk.flush()\n    disk.remove(old)", "disk.remove(old)"), ""),
]
