"""Known wrong answers of lesson 14."""

from course.lab.checks.exercise import Mistake

GRAD = "grad = log.exp().scatter_add(-1, column, -torch.ones_like(log[:, :1]))"
LOG = "log = (rows @ weight.T).log_softmax(-1)"
CHUNKS = "for rows, aims in zip(x.split(size), target.split(size), strict=True):"
HERE = "here = (row >= 0) & (row < rows)"
PART = "part = F.embedding(row, self.weight) * here[..., None]"
BODY = """row, here = own(tokens, len(self.weight), self.axis)            # 2 x (B, T)
        part = F.embedding(row, self.weight) * here[..., None]          # (B, T, D)
        return leave_region(part, self.axis, self.tokens)               # (B, T, D), sequence parallel (B, T / tp, D)"""
LEAVE = "return leave_region(part, self.axis, self.tokens)"
WANTED = "wanted = s.gather(-1, column[..., None]).squeeze(-1) * here"
MOST = "    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)\n"
ADD = "    dist.all_reduce(sums, group=axis.group)\n"
MINUS = "-here[..., None].to(softmax.dtype)"
LENGTHS = 'lengths = np.frombuffer(raw, "<i4", S, HEADER.size)'
POINTERS = 'pointers = np.frombuffer(raw, "<i8", S, HEADER.size + lengths.nbytes)'
DOCUMENTS = 'documents = np.frombuffer(raw, "<i8", D, HEADER.size + lengths.nbytes + pointers.nbytes)'
START = "start = index.pointers[first] // index.dtype.itemsize if first < last else 0"
STOP = "return tokens[start:start + index.lengths[first:last].sum()]"

CHECK = "    check_header(path)\n"
UNPACK = f"""    raw = np.memmap(path, np.uint8, "r")
    _, _, code, S, D = HEADER.unpack_from(raw.data)
    {LENGTHS}
    {POINTERS}
    {DOCUMENTS}
"""

MISTAKES = {
    "loss-in-chunks": (
        Mistake("nothing from the target", GRAD, "grad = log.exp()",
                "the gradient of a token's loss is softmax(logits) minus 1 at the target: the 1 is missing"),
        Mistake("logits for probabilities", GRAD, GRAD.replace("log.exp()", "log"),
                "the gradient begins with probabilities: take exp of the logarithms"),
        Mistake("a logarithm of zero", LOG, LOG.replace("log_softmax(-1)", "softmax(-1).log()"),
                "exp of a large logit overflows, and a small probability becomes 0, whose logarithm is infinite: log_softmax has "
                "neither"),
        Mistake("every token has the targets of all", GRAD, "grad = log.exp()\n            grad[:, aims] -= 1",
                "this takes 1 at the targets of all tokens from every token: row i has its own target alone"),
        Mistake("x is written over", "of_x.append(grad @ weight)                                      # (n, D)\n"
                "            of_weight += grad.T @ rows", "of_weight += grad.T @ rows\n"
                "            of_x.append(rows.copy_(grad @ weight))",
                "the rows of a chunk are a view of x, which whoever gave it still needs: make a new tensor of the gradient"),
        Mistake("computed again", "of_x, of_weight = ctx.saved_tensors",
                "of_x, of_weight = ctx.saved_tensors\n        of_x[:1] @ of_weight.T",
                "nothing has to wait for the backward pass: compute the gradients in forward, while a chunk's logits are there"),
        Mistake("the gradient of x from the last chunk alone", "torch.cat(of_x)", "of_x[-1]",
                "x needs the gradients of all chunks, one below the other", silent=True),
        Mistake("the weight's gradient from the last chunk alone", "of_weight += grad.T @ rows", "of_weight = grad.T @ rows",
                "every chunk uses the whole weight, so its gradient is the sum over the chunks: +="),
        Mistake("a mean over the tokens", "return total", "return total / len(target)",
                "this is the mean over the tokens: the sum is wanted, which the loop divides by the tokens of the global batch"),
        Mistake("means of chunks", "total - log.gather(-1, column).sum()", "total - log.gather(-1, column).mean()",
                "the mean of a chunk weighs tokens of a small last chunk more: take sums"),
        Mistake("what comes from behind is lost", "of_x * grad, of_weight * grad", "of_x, of_weight",
                "multiply with `grad`: what comes after the loss, such as a division, has a gradient too"),
        Mistake("all logits at once", CHUNKS, f"whole = x @ weight.T\n        {CHUNKS}",
                "here all logits are there at once: compute those of a chunk inside the loop"),
        Mistake("the logits of all chunks", CHUNKS, f"pieces = [rows @ weight.T for rows in x.split(size)]\n        {CHUNKS}",
                "logits, or what was made of them, are kept of all chunks, in a list perhaps, so that in the end all are there "
                "again: use a chunk's within its turn of the loop, and let them go"),
        Mistake("a gradient of the weight for each chunk", "of_weight += grad.T @ rows",
                "parts = [*(parts if of_x[1:] else []), grad.T @ rows]\n            of_weight = sum(parts)",
                "each chunk has a gradient of the whole weight, (V, D), and all are kept until the end: add each to one sum at "
                "once"),
        Mistake("the logits are kept", "ctx.save_for_backward(torch.cat(of_x), of_weight)",
                "ctx.grad = grad\n        ctx.save_for_backward(torch.cat(of_x), of_weight)",
                "more than two gradients outlives the forward pass: logits, their gradient, or copies of x and weight. Keep what "
                "backward needs and nothing else", by=("light",)),
        Mistake("one gradient of two multiplied", "of_x * grad, of_weight * grad", "of_x * grad, of_weight",
                "both gradients have to be multiplied with `grad`, that of weight too"),
        Mistake("two gradients for four arguments", "of_weight * grad, None, None", "of_weight * grad",
                "backward returns something for each argument of forward: None for target and for size"),
        Mistake("the last chunk is left out", CHUNKS, CHUNKS + "\n            if len(rows) < size:\n"
                "                of_x.append(torch.zeros_like(rows))\n                continue",
                "the last chunk is shorter where `size` does not divide the tokens, and counts as well: x.split(size) gives it "
                "too"),
        Mistake("the last rows have no gradient", "torch.cat(of_x)", "torch.cat(of_x)[:len(x) // size * size]",
                "there are fewer rows of x's gradient than of x: the last, shorter chunk is missing"),
        Mistake("plus one at the target", "-torch.ones_like(log[:, :1])", "torch.ones_like(log[:, :1])",
                "the gradient is the probability *minus* 1 at the target"),
        Mistake("divided by the size", "return total", "return total / size",
                "the sum of the tokens' losses is wanted, whatever the chunks: do not divide by their size"),
        Mistake("a mean within a chunk for the weight", "of_weight += grad.T @ rows", "of_weight += grad.T @ rows / len(rows)",
                "the weight's gradient is a sum over all tokens: do not divide by those of a chunk"),
        Mistake("one gradient too few", "of_weight * grad, None, None", "of_weight * grad, None",
                "backward returns something for each of the four arguments of forward: two gradients, None for target and None "
                "for size"),
    ),
    "vocabulary-embedding": (
        Mistake("tokens of others count", HERE, "here = row == row",
                "a token of another rank has no row here, and its number minus the first of this rank's can be beyond the "
                "table: give it row 0, and let `here` say that it does not count"),
        Mistake("one row too many", "(row < rows)", "(row <= rows)",
                "row `rows` is the next rank's first: the rows here are 0 to rows - 1"),
        Mistake("the first row is nobody's", "(row >= 0)", "(row > 0)", "row 0 is here too: the rows here are 0 to rows - 1"),
        Mistake("rows dealt like cards", HERE, "row, here = tokens // axis.size, tokens % axis.size == axis.rank",
                "neighbouring rows belong to one rank: rank r has `rows` of them, from r · rows on"),
        Mistake("negative rows", HERE, "here = row < rows",
                "tokens of the ranks before have negative rows, and are not here either"),
        Mistake("the first rank's part", "axis.rank * rows", "0 * rows",
                "this takes every rank's rows for the first ones: rank r begins with token r · rows"),
        Mistake("no sum over the ranks", LEAVE, "return leave_region(part, self.axis, self.tokens) if self.tokens else part",
                "every rank has the vectors of its own tokens, and zeros: add up over the ranks, with `leave_region`"),
        Mistake("a mean over the ranks", LEAVE, "return leave_region(part, self.axis, self.tokens) / self.axis.size",
                "only one of the ranks has a token's vector, the others add zeros: do not divide"),
        Mistake("a sum with a second one behind", LEAVE,
                "from course.parallel.mappings import copy\n        "
                "return copy(leave_region(part, self.axis, self.tokens), self.axis)",
                "the gradient is all-reduced too: every rank has it whole already, so it comes out multiplied by their number",
                by=("gradient", "sp_trained")),
        Mistake("what is left over, and no mask", PART, "part = F.embedding(tokens % len(self.weight), self.weight)",
                "every rank looks up what is left over, and so adds a vector for every token: zeros where the token is not "
                "`here`"),
        Mistake("numbers for a mask", PART, "part = F.embedding(row * here, self.weight)",
                "row 0 is a token like any other: the vectors of tokens that are not here have to be zeros"),
        Mistake("tokens without sequence parallelism", LEAVE, "return leave_region(part, self.axis, None)",
                "pass `self.tokens` to `leave_region`: with sequence parallelism each rank keeps its own tokens"),
        Mistake("the matrix gathered", BODY, """from course.parallel import mappings
        weight = mappings.collect(self.weight, 0, self.axis)
        x = F.embedding(tokens, weight)
        return mappings.scatter(x / self.axis.size, 1, self.axis) if self.tokens else x""",
                "rows are gathered, or all ranks' vectors: the matrix is the largest there is, and cut so that no rank has it. "
                "Look up what is here, zeros for the rest, and let `leave_region` add up the vectors", by=("sent",)),
        Mistake("the matrix gathered, and its gradient scattered", BODY, """from course.parallel import mappings
        weight = mappings.gather(self.weight, 0, self.axis)
        x = F.embedding(tokens, weight)
        return mappings.shard(x, 1, self.axis) if self.tokens else x""",
                "every rank gathers the whole matrix, and its gradient is scattered back: it was cut so that no rank has it. "
                "Look up what is here, zeros for the rest, and let `leave_region` add up the vectors", by=("sent",)),
        Mistake("only the upper bound", HERE, "row, here = row.clamp(min=0), row < rows",
                "tokens below this rank's first one count as its row 0 here: `here` has two ends, 0 <= row and row < rows"),
        Mistake("only the upper bound, and what is left over", HERE, "here = row < rows\n    row = tokens % rows",
                "a token of a lower rank counts here too, as the row that is left over: `here` has two ends, the first of this "
                "rank's tokens as well as the last"),
        Mistake("only the lower bound", HERE, "row, here = row.clamp(max=rows - 1), row >= 0",
                "tokens behind this rank's last one count as its last row here: `here` has two ends, 0 <= row and row < rows"),
        Mistake("everybody counts", "* here[..., None]", "* torch.ones_like(here)[..., None]",
                "every rank adds a vector for every token, of row 0 if it has none: zeros where the token is not `here`"),
        Mistake("rank 1", "axis.rank * rows", "(axis.rank > 0) * rows",
                "every rank but the first takes the rows of rank 1, which is right for two ranks alone: rank r begins at r · "
                "rows"),
        Mistake("a door in front as well", PART, PART + "\n        from course.parallel.mappings import copy\n"
                "        part = copy(part, self.axis)",
                "in front of `leave_region` stands a copy, whose backward pass adds up a gradient that every rank has whole "
                "already: it "
                "comes out multiplied by their number", by=("gradient",)),
    ),
    "vocabulary-loss": (
        Mistake("a maximum of one's own", MOST, "",
                "each rank subtracts a maximum of its own, so their exponentials cannot be added up: all-reduce it, with MAX"),
        Mistake("maxima added up", "dist.ReduceOp.MAX, ", "",
                "all-reduce adds up unless you ask for something else: the largest is dist.ReduceOp.MAX"),
        Mistake("no maximum", "s = s - largest[..., None]", "s = s.clone()",
                "exp overflows: subtract the largest logit of the token first"),
        Mistake("a sum of one's own", ADD, "",
                "each rank has the sum over its own columns, and the target's logit if that is here: add up over the ranks"),
        Mistake("all ranks for those of the axis", ", group=axis.group", "",
                "without `group` all ranks take part, and the axis need not have all: group=axis.group"),
        Mistake("the largest of all ranks", MOST, MOST.replace(", group=axis.group", ""),
                "without `group` the largest is that of all ranks, some of which have other samples: beside it all logits here "
                "may be too small for exp, so group=axis.group here too"),
        Mistake("maxima for sums", ADD, ADD.replace("sums,", "sums, dist.ReduceOp.MAX,"),
                "the maximum was the first all-reduce: the sum of exponentials and the target's logit are added up"),
        Mistake("every rank has a target", WANTED, "wanted = s.gather(-1, column[..., None]).squeeze(-1)",
                "where the target is another rank's, column 0 counts as well: multiply with `here`"),
        Mistake("in the format of the logits", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))", "s = logits",
                "sums of exponentials of 16-bit numbers are too coarse: go to float32 first, where logits have less"),
        Mistake("one of two 16-bit formats", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))",
                "s = logits.float() if logits.dtype == torch.bfloat16 else logits",
                "float16 has 16 bits as well: torch.promote_types(logits.dtype, torch.float32) is right for every format"),
        Mistake("dims from the front", "s.gather(-1, column[..., None]).squeeze(-1)", "s.gather(2, column[..., None]).squeeze(2)",
                "a chunk's tokens come end to end, (n, V / tp): count dims from the end, -1"),
        Mistake("always in float32", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))", "s = logits.float()",
                "take 16 bits to float32, and leave float64 as it is: logits.to(torch.promote_types(logits.dtype, "
                "torch.float32))"),
        Mistake("logits written in place", "s = s - largest[..., None]", "s = s.sub_(largest[..., None]).clone()",
                "this writes into the logits: subtract into new memory"),
        Mistake("minus one on every rank", MINUS, "-torch.ones_like(column[..., None]).to(softmax.dtype)",
                "the 1 is subtracted where the target is: by one rank, the one that has it"),
        Mistake("nothing from the target", f"return softmax.scatter_add_(-1, column[..., None], {MINUS})", "return softmax",
                "the gradient is the softmax minus 1 at the target: the 1 is missing"),
        Mistake("minus one over the softmax", "softmax.scatter_add_(", "softmax.scatter_(",
                "scatter_ writes over the softmax: add the -1 to what is there, with scatter_add_"),
        Mistake("a softmax of one's own", "s.div_(total[..., None])", "logits.to(s.dtype).softmax(-1)",
                "this is the softmax over this rank's columns alone: divide by the sum over all ranks"),
        Mistake("a sum of one's own below", "s.div_(total[..., None])", "s.div_(s.sum(-1, keepdim=True))",
                "the loss has the sum over all ranks, the softmax still that of this rank's columns: divide by `total`"),
        Mistake("the target's logit as it was", "total.log() - wanted", "total.log() - wanted - largest",
                "the sum is relative to the largest logit, and the target's logit is not: subtract the largest from it as well"),
        Mistake("the largest added back", "total.log() - wanted", "total.log() - wanted + largest",
                "sum and target's logit are both relative to the largest logit, which cancels out: add nothing"),
        Mistake("a sign", "total.log() - wanted", "wanted - total.log()",
                "this is the logarithm of the probability: the loss is minus that"),
        Mistake("logits of all", "sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "everyone = torch.empty(axis.size * s.numel(), dtype=s.dtype)\n"
                "    getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)(everyone, s.flatten(), group=axis.group)\n"
                "    sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "whole logits are exchanged: three numbers a token are enough", by=("numbers",)),
        Mistake("the largest of the first rank", MOST, "    dist.broadcast(largest, axis.ranks[0], group=axis.group)\n",
                "the first rank's largest logit is not the largest: where another's is far above it, exp overflows. All-reduce "
                "with MAX"),
        Mistake("more than three numbers", ADD, ADD + "    dist.all_reduce(here.to(s.dtype), group=axis.group)\n",
                "more than three numbers a token are exchanged: the largest logit, the sum of exponentials and the target's "
                "logit are enough", by=("numbers",)),
        Mistake("a total too large", "s.div_(total[..., None])", "s.div_(axis.size * total[..., None])",
                "`total` is the sum over all ranks already: dividing by their number as well makes the gradient too small"),
        Mistake("the target's probability taken away", "total.log() - wanted", "(total - wanted.exp()).log()",
                "log(total) - wanted is the loss: the target's exponential stays in the sum"),
        Mistake("a logarithm too early", "sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "sums = torch.stack([wanted, s.exp_().sum(-1).log()])",
                "logarithms of sums are added up here: add up the sums over the ranks, then take the logarithm"),
    ),
    "read-index": (
        Mistake("no look at the file", CHECK, "",
                "call `check_header(path)` first: it says what is wrong with a file that is not whole"),
        Mistake("a look at the file at the end", CHECK + UNPACK, UNPACK + CHECK,
                "call `check_header(path)` before you unpack anything: a file that is cut off stops your code before it gets "
                "there"),
        Mistake("read rather than mapped", 'np.memmap(path, np.uint8, "r")', "np.fromfile(path, np.uint8)",
                "this reads the whole file: with np.memmap only what is touched is read"),
        Mistake("a copy of the pointers", POINTERS, POINTERS + ".copy()",
                "np.frombuffer gives the pointers where they lie in the file: a copy reads all of them"),
        Mistake("lengths of eight bytes", LENGTHS, LENGTHS.replace("<i4", "<i8"),
                "lengths are int32, of 4 bytes each: with 8 bytes all that follows is looked for too far behind"),
        Mistake("pointers from the start", POINTERS, POINTERS.replace(" + lengths.nbytes", ""),
                "the pointers come after the lengths, S int32"),
        Mistake("documents without the pointers", DOCUMENTS, DOCUMENTS.replace(" + pointers.nbytes", ""),
                "the documents come after the pointers, S int64"),
        Mistake("one document too few", DOCUMENTS, DOCUMENTS.replace(", D,", ", D - 1,"),
                "the header's D counts the S at the end too: there are D numbers"),
        Mistake("documents to the end of the file", DOCUMENTS,
                'rest = raw[HEADER.size + lengths.nbytes + pointers.nbytes:]\n'
                '    documents = np.frombuffer(rest[:len(rest) // 8 * 8], "<i8")',
                "a file of multimodal data goes on after the documents: read D of them"),
        Mistake("always int32", "DTYPES[code]", '"int32"', "the kind of number stands in the header: look `code` up in DTYPES"),
        Mistake("a name for a dtype", 'np.dtype(DTYPES[code]).newbyteorder("<")', "DTYPES[code]",
                "DTYPES gives a name: make a dtype of it, np.dtype(...), which knows how many bytes a token has"),
        Mistake("pointers in tokens", "lengths, pointers, documents)",
                "lengths, pointers // np.dtype(DTYPES[code]).itemsize, documents)",
                "return the pointers as they stand in the file, in bytes"),
        Mistake("pointers of four bytes", POINTERS, POINTERS.replace("<i8", "<i4"), "pointers are int64, of 8 bytes each"),
        Mistake("another code", "DTYPES[code]", 'DTYPES[code].replace("uint16", "int16")',
                "code 8 is uint16, without a sign: as int16 tokens from 32,768 on are negative"),
        Mistake("big-endian", '.newbyteorder("<"), lengths', ', lengths.byteswap()',
                "the file is little-endian: ask for that in the dtype, \"<i4\""),
        Mistake("one document a sequence", DOCUMENTS, DOCUMENTS.replace(", D,", ", S + 1,"),
                "documents has D numbers, which the header says: S + 1 of them only where every document has one sequence"),
        Mistake("one document too many", DOCUMENTS, DOCUMENTS.replace(", D,", ", D + 1,"),
                "D counts the S at the end already: D numbers, not D + 1"),
        Mistake("as many documents as sequences", DOCUMENTS, DOCUMENTS.replace(", D,", ", S,"),
                "a document may have several sequences, or none: documents has D numbers, not S"),
        Mistake("always uint16", "DTYPES[code]", '"uint16"',
                "two bytes a token is right for small vocabularies alone: the kind of number stands in the header, look `code` "
                "up in DTYPES"),
        Mistake("only two kinds", "DTYPES[code]", '{8: "uint16", 4: "int32"}[code]',
                "there are more kinds of number than two: DTYPES has all of them"),
        Mistake("lengths of two bytes", LENGTHS, LENGTHS.replace("<i4", "<u2"), "lengths are int32, of 4 bytes, not of 2"),
        Mistake("sequences and documents changed over", "_, _, code, S, D", "_, _, code, D, S",
                "S comes before D in the header: how many sequences, then how many numbers documents has"),
        Mistake("pointers big-endian", POINTERS, POINTERS.replace("<i8", ">i8"), "everything is little-endian: \"<i8\""),
        Mistake("documents of four bytes", DOCUMENTS, DOCUMENTS.replace("<i8", "<i4"), "documents are int64, of 8 bytes each"),
        Mistake("a copy of the lengths", LENGTHS, LENGTHS + ".copy()",
                "something is copied, or made another type with astype: the parts stay in the file, where np.frombuffer finds "
                "them",
                by=("mapped",)),
    ),
    "one-document": (
        Mistake("bytes for tokens", "index.pointers[first] // index.dtype.itemsize", "index.pointers[first]",
                "pointers count bytes, slices of `tokens` count tokens: divide by index.dtype.itemsize"),
        Mistake("two bytes always", "// index.dtype.itemsize", "// 2",
                "how many bytes a token has stands in the index: index.dtype.itemsize"),
        Mistake("the first sequence alone", "index.lengths[first:last].sum()", "index.lengths[first:last][:1].sum()",
                "a document may have several sequences: add up the lengths of all"),
        Mistake("sequence i for document i", "first, last = index.documents[i:i + 2]", "first, last = i, i + 1",
                "documents[i] says with which sequence document i begins: it need not be sequence i"),
        Mistake("one sequence too many", "index.lengths[first:last].sum()", "index.lengths[first:last + 1].sum()",
                "documents[i + 1] is the next document's first sequence: this one ends before it"),
        Mistake("an empty document", START, "start = index.pointers[first] // index.dtype.itemsize",
                "a document of no sequences at the end begins behind the last one, where there is no pointer"),
        Mistake("without the last token", STOP, STOP.replace(".sum()]", ".sum() - (first < last)]"),
                "the end of a slice is not part of it: take nothing away"),
        Mistake("one token more", STOP, STOP.replace(".sum()]", ".sum() + 1]"),
                "a slice ends before its end, so start + the number of tokens: nothing to add"),
        Mistake("up to the next pointer", STOP, "stop = index.pointers[last] // index.dtype.itemsize if last < "
                "len(index.pointers) else None\n"
                "    return tokens[start:stop]",
                "a document of no sequences has no pointer of its own: its start and its end are not to be found there. Add up "
                "its lengths"),
        Mistake("the lengths before", START, "start = index.lengths[:i].sum()",
                "documents[i] says with which sequence document i begins, and before it come those, not i: lengths[:first]"),
        Mistake("without its last sequence", STOP, STOP.replace("first:last]", "first:max(last - 1, first)]"),
                "documents[i + 1] is the next one's first sequence, and a slice ends before it: take nothing away"),
        Mistake("four bytes always", "// index.dtype.itemsize", "// 4",
                "four bytes a token is right for int32 alone: how many it is stands in the index, index.dtype.itemsize"),
        Mistake("the first length for all", "index.lengths[first:last].sum()", "(index.lengths[first:last].sum() and "
                "index.lengths[first] * (last - first))", "sequences have lengths of their own: add them up, first to last"),
    ),
}
