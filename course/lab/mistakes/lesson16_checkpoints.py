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
                "boxes that only touch do not overlap: a side from 3 to 3 is empty, so test start >= stop"),
        Mistake("one empty side is not enough", "any(start >= stop for start, stop in both)",
                "all(start >= stop for start, stop in both)",
                "boxes do not overlap if they have nothing in common along one dim: any, not all"),
        Mistake("never None", NONE, "", "there are no slices for boxes that do not overlap: return None"),
        Mistake("a single number", NONE, "    if not both or any(start >= stop for start, stop in both):\n        return None\n",
                "a box without dims holds a single number, such as Adam's step count, and two of these boxes overlap: return "
                "two empty tuples, not None"),
        Mistake("the union", BOTH, BOTH.replace("max", "\0").replace("min", "max").replace("\0", "min"),
                "this is the smallest box that contains both: the overlap begins at the later start and ends at the earlier "
                "stop"),
        Mistake("global slices", IN_PIECE, IN_PIECE.replace("start - first, stop - first", "start, stop"),
                "the first slices count from the start of the whole tensor, but the piece's own numbers begin at 0: subtract "
                "the piece's start"),
        Mistake("global slices of the wanted box", IN_WANTED, IN_WANTED.replace("start - first, stop - first", "start, stop"),
                "the second slices count from the start of the whole tensor: subtract the start of the wanted box"),
        Mistake("the wrong way round", "return in_piece, in_wanted", "return in_wanted, in_piece",
                "the slices of the piece come first, and those of the wanted box second"),
        Mistake("one too many", "(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece",
                "(start - first, stop - first + 1) for (start, stop), (first, _) in zip(both, piece",
                "a slice excludes its stop, and so does a side: do not add 1"),
        Mistake("the stop not shifted", "(start - first, stop - first) for (start, stop), (first, _) in zip(both, piece",
                "(start - first, stop) for (start, stop), (first, _) in zip(both, piece",
                "start and stop both count from the start of the whole tensor: subtract the piece's start from both"),
        Mistake("the piece whole", IN_PIECE, "slice(0, stop - start) for start, stop in piece",
                "this takes the whole piece, even where it reaches beyond the wanted box"),
        Mistake("from the piece's start", IN_PIECE, IN_PIECE.replace("start - first, stop - first", "0, stop - start"),
                "this takes the right number of rows, but from the piece's start: the overlap may begin later in the piece"),
    ),
    "put-together": (
        Mistake("pieces read whole", COPY,
                "            whole[target] = read(tuple(slice(0, stop - start) for start, stop in box))[source]\n",
                "this reads whole pieces and uses a part of them: read(source) reads only that part, which matters for pieces "
                "of gigabytes"),
        Mistake("read before it is asked whether", "        shared = overlap(wanted, box)\n",
                "        read(tuple(slice(0, stop - start) for start, stop in box))\n        shared = overlap(wanted, box)\n",
                "this reads pieces that are not wanted: call overlap first, then read"),
        Mistake("only the first piece", COPY, COPY + "            break\n",
                "a box may need several pieces: continue after the first", by=("read",)),      # the rest is what was in memory
        Mistake("the first piece, whatever it shares", COPY, COPY + "        break\n",
                "this looks at one piece only: a box may need several, and the first one may not overlap it"),
        Mistake("slices swapped", COPY, "            part = read(tuple(slice(0, stop - start) for start, stop in box))\n"
                "            whole[source] = part[target]\n",
                "the slices are exchanged: the first of `overlap` are places in the piece, the second in the wanted box",
                stops="RuntimeError"),
        Mistake("always float32", COPY, "            whole[target] = read(source).float().to(dtype)\n",
                "the numbers passed through float32, which has 24 bits of precision: copy them in their own dtype"),
        Mistake("by way of float64", COPY, "            whole[target] = read(source).double().to(dtype)\n",
                "the numbers passed through float64, which has 53 bits of precision, and an int64 has 63: copy them in their "
                "own dtype"),
        Mistake("added to zeros", COPY, "            whole[target] = torch.zeros_like(whole[target]) + read(source)\n",
                "the numbers are added to zeros, which loses the sign of a zero: copy them"),
        Mistake("added up", "            whole[target] = read(source)\n",
                "            whole[target] = whole[target] + read(source) + 1\n",
                "each number is in one piece: copy it, add nothing"),
        Mistake("the piece's corner", COPY, "            part = read(source)\n"
                "            whole[tuple(slice(0, n) for n in part.shape)] = part\n",
                "every part lands in the first corner: `overlap` returns its place in the wanted box"),
    ),
    "translate": (
        Mistake("rows not reordered", OUR_ROWS, "x",
                "to_ours: the rows are still head by head, (heads, 3, d), but ours are (3, heads, d): unflatten, then exchange "
                "the first two dims. All shapes fit, so no error appears"),
        Mistake("a view for a transpose", OUR_ROWS, "x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)",
                "to_ours: this reads their rows as (3, heads, d), but they are (heads, 3, d): this is the conversion back"),
        Mistake("dims of a head first", OUR_ROWS, "x.unflatten(0, (heads, 3, -1)).permute(1, 2, 0, *range(3, x.dim() + 2))"
                ".flatten(0, 2)",
                "to_ours: the numbers of a head are no longer together: exchange only the first two dims, d stays the last"),
        Mistake("reshaped, not transposed", 'rows(theirs["query_key_value.weight"].T)',
                'rows(theirs["query_key_value.weight"].reshape(-1, theirs["query_key_value.weight"].shape[0]))',
                "to_ours: a reshape keeps the order of the numbers and only cuts rows of another length: a transpose exchanges "
                "rows and columns"),
        Mistake("threes last", OUR_ROWS, "x.unflatten(0, (heads, -1, 3)).permute(2, 0, 1, *range(3, x.dim() + 2)).flatten(0, 2)",
                "to_ours: their rows are (heads, 3, d), with the dims of a head last, but this reads them as (heads, d, 3)"),
        Mistake("the output is not transposed", '"out.weight": theirs["dense.weight"].T', '"out.weight": theirs["dense.weight"]',
                "to_ours: the output's weight is square, so it fits without a transpose, but it is wrong: theirs computes x W, "
                "ours x W'"),
        Mistake("the bias as it is", 'rows(theirs["query_key_value.bias"])', 'theirs["query_key_value.bias"]',
                "to_ours: the bias of the fused projection has its rows in the same order as the weight: reorder them too"),
        Mistake("the bias of the output reordered", '"out.bias": theirs["dense.bias"]',
                '"out.bias": theirs["dense.bias"].unflatten(0, (heads, -1)).T.flatten()',
                "to_ours: the output's bias is added to the residual stream, which has no heads: do not reorder it"),
        Mistake("columns reordered", 'rows(theirs["query_key_value.weight"].T)',
                'rows(theirs["query_key_value.weight"].T.flip(1))',
                "to_ours: the columns of the weight are features of the input, which have the same order in both"),
        Mistake("there as back", THEIR_ROWS, OUR_ROWS,
                "to_theirs: this converts to ours again, but it has to undo that: read the rows as (3, heads, d)"),
        Mistake("back without reordering", THEIR_ROWS, "x",
                "to_theirs: the rows are still ours, (3, heads, d), but theirs are head by head, (heads, 3, d)"),
        Mistake("the output back as it is", '"dense.weight": ours["out.weight"].T', '"dense.weight": ours["out.weight"]',
                "to_theirs: transpose the output's weight. It is square, so no error appears"),
        Mistake("transposed in place", 'theirs["dense.weight"].T', 'theirs["dense.weight"].t_()',
                "do not write into the arguments: work on a copy"),
        Mistake("not transposed", 'rows(theirs["query_key_value.weight"].T)', 'rows(theirs["query_key_value.weight"])',
                "to_ours: their weight is (features of the input, rows): transpose it first, then reorder the rows",
                stops="RuntimeError"),
    ),
    "publish": (
        Mistake("straight into the final folder", ALL_OF_IT, ALL_OF_IT.replace("partial", "name").replace(
            '    name = f".{name}.name"\n', "").replace("    disk.rename(name, name)\n", ""),
                "a crash while writing leaves half a folder under the name that readers look for: write under another name, "
                "and rename when everything is there"),
        Mistake("under its own name at once", 'partial = f".{name}.partial"', "partial = name",
                "the files are written under the final name, so a crash in the middle leaves half a checkpoint that looks "
                "complete: write under another name, and rename when everything is there"),
        Mistake("bytes not flushed", FLUSH_FILE, "",
                "the bytes are not flushed before the rename: the name can reach the disk first, and then the file under it is "
                "incomplete"),
        Mistake("the folder's names not flushed", FLUSH_FOLDER, "",
                "the partial folder is not flushed before the rename: the bytes are on the disk, but the names of the files "
                "are not"),
        Mistake("the folder's names flushed after the rename", FLUSH_FOLDER + RENAME, RENAME + "    disk.flush(name)\n",
                "the folder is flushed after the rename, and a crash in between may leave the new name without files: flush "
                "first, then rename"),
        Mistake("renamed first", FLUSH_FILE + FLUSH_FOLDER + RENAME,
                RENAME + '    for file in files:\n        disk.flush(f"{name}/{file}")\n    disk.flush(name)\n',
                "this renames before the bytes are flushed: a crash between the two leaves half a checkpoint under the final "
                "name"),
        Mistake("the old one removed first", ALL + FLUSH_NAME + REMOVE, REMOVE + ALL + FLUSH_NAME,
                "this removes the old checkpoint before the new one exists: after a crash in between there is none"),
        Mistake("removed before the name is safe", FLUSH_NAME + REMOVE, REMOVE + FLUSH_NAME,
                "this removes the old checkpoint before the new name is flushed, and a crash may undo the rename but not the "
                "removal: flush first, then remove"),
        Mistake("removed before the rename", RENAME + FLUSH_NAME + REMOVE, REMOVE + RENAME + FLUSH_NAME,
                "this removes the old checkpoint before the new one has its name: after a crash in between there is none"),
        Mistake("the name not flushed", FLUSH_NAME, "",
                "the new name is not flushed before the old checkpoint is removed, and a crash may undo the rename but not the "
                'removal: flush the folder that holds both, disk.flush("")'),
        Mistake("the old one stays", REMOVE, "", "the old checkpoint is still there: remove it when the new one is safe"),
        Mistake("file by file", ALL, '    for file, data in files.items():\n        disk.write(f"{name}/.{file}", data)\n'
                '        disk.flush(f"{name}/.{file}")\n        disk.rename(f"{name}/.{file}", f"{name}/{file}")\n'
                "    disk.flush(name)\n",
                "each file is complete, but the folder is not: between two renames it has its final name and only some of its "
                "files. Rename the folder once, when it has all files"),
        Mistake("the old one set aside", ALL + FLUSH_NAME + REMOVE, '    disk.rename(old, "backup")\n' + IN_PLACE + FLUSH_NAME
                + '    disk.remove("backup")\n',
                "the old checkpoint loses its name before the new one exists, so nobody finds it after a crash: do not rename "
                "it, and give the new one another name until it is complete"),
        Mistake("the first file alone", FLUSH_FILE, FLUSH_FILE.replace("disk.flush", "file == next(iter(files)) and disk.flush"),
                "not every file is flushed: flush each of them"),
    ),
}
