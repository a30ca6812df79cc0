"""Known wrong answers of lesson 16."""

from course.lab.checks.exercise import Mistake

BOTH = "[(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, piece, strict=True)]"
NONE = "    if any(start >= stop for start, stop in both):\n        return None\n"
IN_PIECE = "slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece, strict=True)"
IN_WANTED = "slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, wanted, strict=True)"
COPY = "            whole[target] = read(source)\n"
OUR_ROWS = "x.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)"
THEIR_ROWS = "x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)"
FLUSH_FILE = '        disk.flush(f"{partial}/{file}")\n'
FLUSH_FOLDER = "    disk.flush(partial)\n"
RENAME = "    disk.rename(partial, name)\n"
FLUSH_NAME = '    disk.flush("")\n'
REMOVE = "    disk.remove(old)\n"
WRITE = '    partial = f".{name}.partial"\n    for file, data in files.items():\n        disk.write(f"{partial}/{file}", data)\n'
ALL = WRITE + FLUSH_FILE + FLUSH_FOLDER + RENAME
IN_PLACE = ('    for file, data in files.items():\n        disk.write(f"{name}/{file}", data)\n'
            '        disk.flush(f"{name}/{file}")\n    disk.flush(name)\n')

ALL_OF_IT = """    partial = f".{name}.partial"
    for file, data in files.items():
        disk.write(f"{partial}/{file}", data)
        disk.flush(f"{partial}/{file}")
    disk.flush(partial)
    disk.rename(partial, name)
"""

MISTAKES = {
    "box-overlap": (
        Mistake("what touches is shared", "start >= stop", "start > stop",
                "boxes that only touch share nothing: a side from 3 to 3 is empty, so it takes start >= stop"),
        Mistake("one empty side is not enough", "any(start >= stop for start, stop in both)",
                "all(start >= stop for start, stop in both)",
                "boxes share nothing as soon as they share nothing along one dim: any, not all"),
        Mistake("never None", NONE, "", "there is no answer for boxes that share nothing: return None"),
        Mistake("a single number", NONE, "    if not both or any(start >= stop for start, stop in both):\n        return None\n",
                "a box without dims is that of a single number, such as Adam's count of steps, and two of them share it: return "
                "two empty tuples, not None"),
        Mistake("the union", BOTH, BOTH.replace("max", "\0").replace("min", "max").replace("\0", "min"),
                "this is the smallest box that holds both: what they share begins at the later start, ends at the earlier stop"),
        Mistake("global slices", IN_PIECE, IN_PIECE.replace("start - first, stop - first", "start, stop"),
                "these are places in the whole tensor: the piece's own numbers begin at 0, so subtract where it begins"),
        Mistake("global slices of the wanted box", IN_WANTED, IN_WANTED.replace("start - first, stop - first", "start, stop"),
                "the second slices are places in the whole tensor: subtract where the wanted box begins"),
        Mistake("the wrong way round", "return in_piece, in_wanted", "return in_wanted, in_piece",
                "the slices of the piece come first, those of the wanted box second"),
        Mistake("one too many", "(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece",
                "(start - first, stop - first + 1) for (start, stop), (first, _) in zip(both, piece",
                "a slice ends before its stop, as a side does: no + 1"),
        Mistake("the stop not shifted", "(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece",
                "(start - first, stop) for (start, stop), (first, _) in zip(both, piece",
                "start and stop are both places in the whole tensor: subtract where the piece begins from both"),
        Mistake("the piece whole", IN_PIECE, "slice(0, stop - start) for start, stop in piece",
                "this takes the whole piece, also where it reaches beyond the wanted box"),
        Mistake("from the piece's start", IN_PIECE, IN_PIECE.replace("start - first, stop - first", "0, stop - start"),
                "this takes as many numbers, but from the piece's beginning: what is shared may begin later in it"),
    ),
    "put-together": (
        Mistake("pieces read whole", COPY,
                "            whole[target] = read(tuple(slice(0, stop - start) for start, stop in box))[source]\n",
                "you read whole pieces and use a part of them: read(source) reads that part alone, which matters where a piece "
                "has gigabytes"),
        Mistake("read before it is asked whether", "        shared = overlap(wanted, box)\n",
                "        read(tuple(slice(0, stop - start) for start, stop in box))\n        shared = overlap(wanted, box)\n",
                "pieces are read that are not wanted: first ask overlap, then read"),
        Mistake("only the first piece", COPY, COPY + "            break\n",
                "a box may need several pieces: go on after the first"),
        Mistake("the first piece, whatever it shares", COPY, COPY + "        break\n",
                "this looks at one piece alone: a box may need several, and the first may share nothing with it"),
        Mistake("slices swapped", COPY, "            part = read(tuple(slice(0, stop - start) for start, stop in box))\n"
                "            whole[source] = part[target]\n",
                "the slices are swapped: the first of `overlap` are places in the piece, the second in the wanted box"),
        Mistake("always float32", COPY, "            whole[target] = read(source).float().to(dtype)\n",
                "the numbers went through float32, which has 24 bits: copy them in the format that they have"),
        Mistake("by way of float64", COPY, "            whole[target] = read(source).double().to(dtype)\n",
                "the numbers went through float64, which has 53 bits, and an int64 has 63: copy them in the format that they "
                "have"),
        Mistake("added to zeros", COPY, "            whole[target] = torch.zeros_like(whole[target]) + read(source)\n",
                "the numbers are added to zeros, which takes the sign of a zero away: copy them"),
        Mistake("added up", "            whole[target] = read(source)\n",
                "            whole[target] = whole[target] + read(source) + 1\n",
                "each number lies in one piece: copy it, add nothing"),
        Mistake("the piece's corner", COPY, "            part = read(source)\n"
                "            whole[tuple(slice(0, n) for n in part.shape)] = part\n",
                "every part lands in the first corner: `overlap` says where in the wanted box it belongs"),
    ),
    "translate": (
        Mistake("rows not reordered", OUR_ROWS, "x",
                "to_ours: the rows are still head by head, (heads, 3, d); ours are (3, heads, d): unflatten, then exchange the "
                "first two dims. All shapes fit, so nothing complains"),
        Mistake("a view for a transpose", OUR_ROWS, "x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)",
                "to_ours: this reads their rows as (3, heads, d), but they are (heads, 3, d): it is the way back"),
        Mistake("dims of a head first", OUR_ROWS, "x.unflatten(0, (heads, 3, -1)).permute(1, 2, 0, *range(3, x.dim() + 2))"
                ".flatten(0, 2)",
                "to_ours: the numbers of a head have been torn apart: exchange the first two dims alone, d stays the last"),
        Mistake("reshaped, not transposed", 'rows(theirs["query_key_value.weight"].T)',
                'rows(theirs["query_key_value.weight"].reshape(-1, theirs["query_key_value.weight"].shape[0]))',
                "to_ours: a reshape leaves the numbers in their order and cuts rows of another length; a transpose exchanges "
                "rows and columns"),
        Mistake("threes last", OUR_ROWS, "x.unflatten(0, (heads, -1, 3)).permute(2, 0, 1, *range(3, x.dim() + 2)).flatten(0, 2)",
                "to_ours: their rows are (heads, 3, d), the dims of a head last; this reads them as (heads, d, 3)"),
        Mistake("the output is not transposed", '"out.weight": theirs["dense.weight"].T', '"out.weight": theirs["dense.weight"]',
                "to_ours: the output's weight is square, so it fits without being transposed, and is wrong: theirs multiplies "
                "x W, ours x W'"),
        Mistake("the bias as it is", 'rows(theirs["query_key_value.bias"])', 'theirs["query_key_value.bias"]',
                "to_ours: the bias of the fused projection has rows in the same order as the weight: reorder them too"),
        Mistake("the bias of the output reordered", '"out.bias": theirs["dense.bias"]',
                '"out.bias": theirs["dense.bias"].unflatten(0, (heads, -1)).T.flatten()',
                "to_ours: the output's bias is added to the residual stream, which has no heads: leave it as it is"),
        Mistake("columns reordered", 'rows(theirs["query_key_value.weight"].T)',
                'rows(theirs["query_key_value.weight"].T.flip(1))',
                "to_ours: the columns of the weight are features of the input, which both have in the same order"),
        Mistake("there as back", THEIR_ROWS, OUR_ROWS,
                "to_theirs: this is the way to ours once more; undo it: read the rows as (3, heads, d)"),
        Mistake("back without reordering", THEIR_ROWS, "x",
                "to_theirs: the rows are still ours, (3, heads, d); theirs are head by head, (heads, 3, d)"),
        Mistake("the output back as it is", '"dense.weight": ours["out.weight"].T', '"dense.weight": ours["out.weight"]',
                "to_theirs: transpose the output's weight; it is square, so nothing complains"),
        Mistake("transposed in place", 'theirs["dense.weight"].T', 'theirs["dense.weight"].t_()',
                "do not write into what you are given; work on a copy"),
        Mistake("not transposed", 'rows(theirs["query_key_value.weight"].T)', 'rows(theirs["query_key_value.weight"])',
                "to_ours: their weight is (features of the input, rows): transpose it first, then reorder the rows"),
    ),
    "publish": (
        Mistake("straight into the final folder", ALL_OF_IT, ALL_OF_IT.replace("partial", "name").replace(
            '    name = f".{name}.name"\n', "").replace("    disk.rename(name, name)\n", ""),
                "a crash while writing leaves half a folder under the name that readers look for: write under another name, and "
                "rename when all is there"),
        Mistake("under its own name at once", 'partial = f".{name}.partial"', "partial = name",
                "the files are written under the final name: a crash in the middle leaves half a checkpoint that looks whole. "
                "Write under another name, and rename when all is there"),
        Mistake("bytes not flushed", FLUSH_FILE, "",
                "the bytes are not flushed before the rename: the name can reach the disk first, and half a file stands there"),
        Mistake("the folder's names not flushed", FLUSH_FOLDER, "",
                "the partial folder is not flushed before the rename: the bytes are on the disk, but not the files' names"),
        Mistake("the folder's names flushed after the rename", FLUSH_FOLDER + RENAME, RENAME + "    disk.flush(name)\n",
                "the folder is flushed after the rename: in between a crash may leave the new name with no files in it. Flush "
                "first, then rename"),
        Mistake("renamed first", FLUSH_FILE + FLUSH_FOLDER + RENAME,
                RENAME + '    for file in files:\n        disk.flush(f"{name}/{file}")\n    disk.flush(name)\n',
                "you rename before the bytes are flushed: between the two a crash leaves half a checkpoint under the final name"),
        Mistake("the old one removed first", ALL + FLUSH_NAME + REMOVE, REMOVE + ALL + FLUSH_NAME,
                "the old checkpoint goes before the new one is there: after a crash in between there is none"),
        Mistake("removed before the name is safe", FLUSH_NAME + REMOVE, REMOVE + FLUSH_NAME,
                "the old checkpoint is removed before the new name is flushed: a crash may undo the rename, not the removal. "
                "Flush first, then remove"),
        Mistake("removed before the rename", RENAME + FLUSH_NAME + REMOVE, REMOVE + RENAME + FLUSH_NAME,
                "the old checkpoint goes before the new one has its name: after a crash in between there is none"),
        Mistake("the name not flushed", FLUSH_NAME, "",
                "the new name is not flushed before the old checkpoint is removed: a crash may undo the rename, not the removal. "
                'Flush the folder that holds both, disk.flush("")'),
        Mistake("the old one stays", REMOVE, "", "the old checkpoint is still there: remove it when the new one is safe"),
        Mistake("file by file", ALL, '    for file, data in files.items():\n        disk.write(f"{name}/.{file}", data)\n'
                '        disk.flush(f"{name}/.{file}")\n        disk.rename(f"{name}/.{file}", f"{name}/{file}")\n'
                "    disk.flush(name)\n",
                "each file is whole, the folder is not: between two renames it has its final name and some of its files. Rename "
                "the folder, once, when all are in it"),
        Mistake("the old one set aside", ALL + FLUSH_NAME + REMOVE, '    disk.rename(old, "backup")\n' + IN_PLACE + FLUSH_NAME
                + '    disk.remove("backup")\n',
                "the old checkpoint loses its name before the new one is there, so that nobody finds it after a crash: leave it "
                "alone, and give the new one another name until it is whole"),
        Mistake("the first file alone", FLUSH_FILE, FLUSH_FILE.replace("disk.flush", "file == next(iter(files)) and disk.flush"),
                "not every file is flushed: flush each, not one of them alone"),
    ),
}
