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
        Mistake("one maximum for a chunk", LOG, LOG.replace("(rows @ weight.T).log_softmax(-1)",
                "(rows @ weight.T).sub_((rows @ weight.T).amax())\n"
                "            log = log - log.exp().sum(-1, keepdim=True).log()"),
                "relative to another token's largest logit, all exponentials of a token can be 0: subtract each token's own, as "
                "log_softmax does"),
        Mistake("a logarithm of zero", LOG, LOG.replace("log_softmax(-1)", "softmax(-1).log()"),
                "exp of a large logit overflows, and a small probability becomes 0, whose logarithm is infinite: log_softmax has "
                "neither"),
        Mistake("every token has the targets of all", GRAD, "grad = log.exp()\n            grad[:, aims] -= 1",
                "this subtracts 1 at the targets of all tokens in every row: row i has only its own target"),
        Mistake("x is written over", "of_x.append(grad @ weight)                                      # (n, D)\n"
                "            of_weight += grad.T @ rows", "of_weight += grad.T @ rows\n"
                "            of_x.append(rows.copy_(grad @ weight))",
                "the rows of a chunk are a view of x, which the caller still needs: make a new tensor for the gradient"),
        Mistake("computed again", "of_x, of_weight = ctx.saved_tensors",
                "of_x, of_weight = ctx.saved_tensors\n        of_x[:1] @ of_weight.T",
                "nothing has to wait for the backward pass: compute the gradients in forward, while the logits of a chunk exist"),
        Mistake("the gradient of x from the last chunk alone", "torch.cat(of_x)", "of_x[-1]",
                "x needs the gradients of all chunks: concatenate them", silent=True),
        Mistake("the weight's gradient from the last chunk alone", "of_weight += grad.T @ rows", "of_weight = grad.T @ rows",
                "every chunk uses the whole weight, so the weight's gradient is the sum over the chunks: use +="),
        Mistake("a mean over the tokens", "return total", "return total / len(target)",
                "this is the mean over the tokens: return the sum, which the loop divides by the tokens of the global batch"),
        Mistake("means of chunks", "total - log.gather(-1, column).sum()", "total - log.gather(-1, column).mean()",
                "the mean of a chunk gives the tokens of a small last chunk a larger weight: use sums"),
        Mistake("what comes from behind is lost", "of_x * grad, of_weight * grad", "of_x, of_weight",
                "multiply by `grad`: the operations after the loss, such as a division, have a gradient too"),
        Mistake("all logits at once", CHUNKS, f"whole = x @ weight.T\n        {CHUNKS}",
                "this computes all logits at once: compute the logits of one chunk inside the loop"),
        Mistake("the logits of all chunks", CHUNKS, f"pieces = [rows @ weight.T for rows in x.split(size)]\n        {CHUNKS}",
                "this keeps the logits of all chunks, or tensors made from them, so at the end all of them exist at once. Use "
                "a chunk's logits in its own turn of the loop, and keep no reference"),
        Mistake("a gradient of the weight for each chunk", "of_weight += grad.T @ rows",
                "parts = [*(parts if of_x[1:] else []), grad.T @ rows]\n            of_weight = sum(parts)",
                "each chunk has a gradient of the whole weight, (V, D), and this keeps them all until the end: add each one to "
                "a sum at once"),
        Mistake("the logits are kept", "ctx.save_for_backward(torch.cat(of_x), of_weight)",
                "ctx.grad = grad\n        ctx.save_for_backward(torch.cat(of_x), of_weight)",
                "more than two gradients survive the forward pass: logits, their gradient, or copies of x and weight. Keep "
                "only what backward needs", by=("light",)),
        Mistake("one gradient of two multiplied", "of_x * grad, of_weight * grad", "of_x * grad, of_weight",
                "multiply both gradients by `grad`, the weight's too"),
        Mistake("two gradients for four arguments", "of_weight * grad, None, None", "of_weight * grad",
                "backward returns one value for each argument of forward: None for target and for size", stops="RuntimeError"),
        Mistake("the last chunk is left out", CHUNKS, CHUNKS + "\n            if len(rows) < size:\n"
                "                of_x.append(torch.zeros_like(rows))\n                continue",
                "the last chunk is shorter if `size` does not divide the number of tokens, and it counts too: x.split(size) "
                "includes it"),
        Mistake("the last rows have no gradient", "torch.cat(of_x)", "torch.cat(of_x)[:len(x) // size * size]",
                "the gradient of x has fewer rows than x: the last, shorter chunk is missing", stops="RuntimeError"),
        Mistake("plus one at the target", "-torch.ones_like(log[:, :1])", "torch.ones_like(log[:, :1])",
                "the gradient is the probability *minus* 1 at the target"),
        Mistake("divided by the size", "return total", "return total / size",
                "return the sum of the tokens' losses, for any chunk size: do not divide by the size"),
        Mistake("a mean within a chunk for the weight", "of_weight += grad.T @ rows", "of_weight += grad.T @ rows / len(rows)",
                "the weight's gradient is a sum over all tokens: do not divide it by the tokens of a chunk"),
        Mistake("one gradient too few", "of_weight * grad, None, None", "of_weight * grad, None",
                "backward returns one value for each of the four arguments of forward: two gradients, None for target and None "
                "for size", stops="RuntimeError"),
    ),
    "vocabulary-embedding": (
        Mistake("tokens of others count", HERE, "here = row == row",
                "a token of another rank has no row here, and its number minus this rank's first token can be outside the "
                "table: give it row 0, and mark it in `here` as not counted", stops="IndexError"),
        Mistake("one row too many", "(row < rows)", "(row <= rows)",
                "row number `rows` is the next rank's first row: the rows here are 0 to rows - 1", stops="IndexError"),
        Mistake("the first row is nobody's", "(row >= 0)", "(row > 0)", "row 0 is here too: the rows here are 0 to rows - 1"),
        Mistake("rows dealt like cards", HERE, "row, here = tokens // axis.size, tokens % axis.size == axis.rank",
                "neighboring rows belong to one rank: rank r has `rows` of them, starting at r · rows"),
        Mistake("negative rows", HERE, "here = row < rows",
                "tokens of lower ranks have negative rows, and they are not here either", stops="IndexError"),
        Mistake("the first rank's part", "axis.rank * rows", "0 * rows",
                "this uses the first rows on every rank: rank r begins with token r · rows"),
        Mistake("no sum over the ranks", LEAVE, "return leave_region(part, self.axis, self.tokens) if self.tokens else part",
                "every rank has the vectors of its own tokens, and zeros elsewhere: sum over the ranks with `leave_region`"),
        Mistake("a mean over the ranks", LEAVE, "return leave_region(part, self.axis, self.tokens) / self.axis.size",
                "only one rank has a token's vector, and the others add zeros: do not divide"),
        Mistake("a sum with a second one behind", LEAVE,
                "from course.parallel.mappings import copy\n        "
                "return copy(leave_region(part, self.axis, self.tokens), self.axis)",
                "this all-reduces the gradient too, but every rank already has all of it: the result is multiplied by the "
                "number of ranks",
                by=("gradient", "sp_trained")),
        Mistake("what is left over, and no mask", PART, "part = F.embedding(tokens % len(self.weight), self.weight)",
                "every rank looks up the remainder of the division, so it adds a vector for every token: set zeros where the "
                "token is not `here`"),
        Mistake("a mask upside down", PART, PART.replace("* here", "* ~here"),
                "this keeps what is looked up for tokens of other ranks, and drops its own: multiply by `here`"),
        Mistake("numbers for a mask", PART, "part = F.embedding(row * here, self.weight)",
                "row 0 is a token like any other: set the vectors of tokens that are not here to zero"),
        Mistake("tokens without sequence parallelism", LEAVE, "return leave_region(part, self.axis, None)",
                "pass `self.tokens` to `leave_region`: with sequence parallelism each rank keeps its own tokens",
                stops="RuntimeError"),
        Mistake("the matrix gathered", BODY, """from course.parallel import mappings
        weight = mappings.collect(self.weight, 0, self.axis)
        x = F.embedding(tokens, weight)
        return mappings.scatter(x / self.axis.size, 1, self.axis) if self.tokens else x""",
                "this gathers rows, or the vectors of all ranks, but the table is the largest matrix of the model, and it is "
                "cut so that no rank holds all of it. Look up the rows that are here, use zeros for the others, and let "
                "`leave_region` sum the vectors", by=("sent",)),
        Mistake("the matrix gathered, and its gradient scattered", BODY, """from course.parallel import mappings
        weight = mappings.gather(self.weight, 0, self.axis)
        x = F.embedding(tokens, weight)
        return mappings.shard(x, 1, self.axis) if self.tokens else x""",
                "every rank gathers the whole table, and scatters its gradient back, but the table is cut so that no rank "
                "holds all of it. Look up the rows that are here, use zeros for the others, and let `leave_region` sum the "
                "vectors", by=("sent",)),
        Mistake("only the upper bound", HERE, "row, here = row.clamp(min=0), row < rows",
                "tokens below this rank's first one count as its row 0: `here` has two bounds, 0 <= row and row < rows"),
        Mistake("only the upper bound, and what is left over", HERE, "here = row < rows\n    row = tokens % rows",
                "a token of a lower rank counts here too, at the row that is its remainder: `here` has two bounds, this rank's "
                "first token and its last"),
        Mistake("only the lower bound", HERE, "row, here = row.clamp(max=rows - 1), row >= 0",
                "tokens above this rank's last one count as its last row: `here` has two bounds, 0 <= row and row < rows"),
        Mistake("rank 1", "axis.rank * rows", "(axis.rank > 0) * rows",
                "every rank but the first takes the rows of rank 1, which is right for two ranks only: rank r begins at r · "
                "rows"),
        Mistake("a door in front as well", PART, PART + "\n        from course.parallel.mappings import copy\n"
                "        part = copy(part, self.axis)",
                "there is a `copy` before `leave_region`. Its backward pass sums a gradient that every rank already has, so "
                "the result is multiplied by the number of ranks", by=("gradient",)),
    ),
    "vocabulary-loss": (
        Mistake("a maximum of one's own", MOST, "",
                "each rank subtracts its own maximum, so the exponentials of different ranks cannot be summed: all-reduce the "
                "maximum, with MAX"),
        Mistake("maxima added up", "dist.ReduceOp.MAX, ", "",
                "all-reduce sums by default: for the largest, pass dist.ReduceOp.MAX"),
        Mistake("no maximum", "s = s - largest[..., None]", "s = s.clone()",
                "exp overflows: subtract the largest logit of the token first"),
        Mistake("one maximum for all tokens", "largest = s.amax(-1)", "largest = s.amax().repeat(s.shape[:-1])",
                "relative to another token's largest logit, all exponentials of a token can be 0, whose logarithm is -inf: take "
                "the maximum over the last dim"),
        Mistake("minus infinity for those of others", WANTED,
                "wanted = s.gather(-1, column[..., None]).squeeze(-1).where(here, -torch.inf)",
                "the target's logit is a sum over the ranks, and a sum with -inf is -inf: ranks without the target add 0"),
        Mistake("a sum of one's own", ADD, "",
                "each rank has the sum over its own columns, and the target's logit if it is here: sum both over the ranks"),
        Mistake("all ranks for those of the axis", ", group=axis.group", "",
                "without `group`, all ranks of the job take part, but the axis may have fewer: pass group=axis.group"),
        Mistake("the largest of all ranks", MOST, MOST.replace(", group=axis.group", ""),
                "without `group`, the maximum is taken over all ranks of the job, and some of them have other samples. "
                "Compared with it, all logits here may be too small for exp: pass group=axis.group here too"),
        Mistake("maxima for sums", ADD, ADD.replace("sums,", "sums, dist.ReduceOp.MAX,"),
                "the maximum was the first all-reduce: the sum of exponentials and the target's logit are summed"),
        Mistake("every rank has a target", WANTED, "wanted = s.gather(-1, column[..., None]).squeeze(-1)",
                "if the target belongs to another rank, this counts column 0: multiply by `here`"),
        Mistake("in the format of the logits", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))", "s = logits",
                "sums of exponentials in a 16-bit format are too inaccurate: convert to float32 first if the logits have fewer "
                "bits", stops="InvalidReturn"),
        Mistake("one of two 16-bit formats", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))",
                "s = logits.float() if logits.dtype == torch.bfloat16 else logits",
                "float16 has 16 bits too: torch.promote_types(logits.dtype, torch.float32) is right for every dtype",
                stops="InvalidReturn"),
        Mistake("dims from the front", "s.gather(-1, column[..., None]).squeeze(-1)", "s.gather(2, column[..., None]).squeeze(2)",
                "the tokens of a chunk have the shape (n, V / tp): count dims from the end, -1", stops="IndexError"),
        Mistake("always in float32", "s = logits.to(torch.promote_types(logits.dtype, torch.float32))", "s = logits.float()",
                "convert 16 bits to float32, and keep float64: logits.to(torch.promote_types(logits.dtype, torch.float32))",
                stops="InvalidReturn"),
        Mistake("logits written in place", "s = s - largest[..., None]", "s = s.sub_(largest[..., None]).clone()",
                "this writes into the logits: subtract into a new tensor"),
        Mistake("minus one on every rank", MINUS, "-torch.ones_like(column[..., None]).to(softmax.dtype)",
                "only the rank that has the target subtracts the 1"),
        Mistake("nothing from the target", f"return softmax.scatter_add_(-1, column[..., None], {MINUS})", "return softmax",
                "the gradient is the softmax minus 1 at the target: the 1 is missing"),
        Mistake("minus one over the softmax", "softmax.scatter_add_(", "softmax.scatter_(",
                "scatter_ overwrites the softmax: add the -1 with scatter_add_"),
        Mistake("a softmax of one's own", "s.div_(total[..., None])", "logits.to(s.dtype).softmax(-1)",
                "this is the softmax over this rank's columns only: divide by the sum over all ranks"),
        Mistake("a sum of one's own below", "s.div_(total[..., None])", "s.div_(s.sum(-1, keepdim=True))",
                "the loss uses the sum over all ranks, but the softmax still uses this rank's columns only: divide by `total`"),
        Mistake("the target's logit as it was", "total.log() - wanted", "total.log() - wanted - largest",
                "the sum is relative to the largest logit, but the target's logit is not: subtract the largest from it too"),
        Mistake("the largest added back", "total.log() - wanted", "total.log() - wanted + largest",
                "the sum and the target's logit are both relative to the largest logit, which cancels: add nothing"),
        Mistake("a sign", "total.log() - wanted", "wanted - total.log()",
                "this is the logarithm of the probability: the loss is its negative"),
        Mistake("logits of all", "sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "everyone = torch.empty(axis.size * s.numel(), dtype=s.dtype)\n"
                "    getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)(everyone, s.flatten(), group=axis.group)\n"
                "    sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "the ranks exchange whole logits: three numbers a token are enough", by=("numbers",)),
        Mistake("the largest of the first rank", MOST, "    dist.broadcast(largest, axis.ranks[0], group=axis.group)\n",
                "the first rank's largest logit need not be the largest. If another rank's is far larger, exp overflows: "
                "all-reduce with MAX"),
        Mistake("more than three numbers", ADD, ADD + "    dist.all_reduce(here.to(s.dtype), group=axis.group)\n",
                "the ranks exchange more than three numbers a token: the largest logit, the sum of exponentials and the "
                "target's logit are enough", by=("numbers",)),
        Mistake("a total too large", "s.div_(total[..., None])", "s.div_(axis.size * total[..., None])",
                "`total` is already the sum over all ranks: dividing by the number of ranks too makes the gradient too small"),
        Mistake("the target's probability taken away", "total.log() - wanted", "(total - wanted.exp()).log()",
                "log(total) - wanted is the loss: keep the target's exponential in the sum"),
        Mistake("a logarithm too early", "sums = torch.stack([wanted, s.exp_().sum(-1)])",
                "sums = torch.stack([wanted, s.exp_().sum(-1).log()])",
                "this sums logarithms: sum over the ranks first, then take the logarithm"),
    ),
    "read-index": (
        Mistake("no look at the file", CHECK, "",
                "call `check_header(path)` first: it reports what is wrong with a damaged file"),
        Mistake("a look at the file at the end", CHECK + UNPACK, UNPACK + CHECK,
                "call `check_header(path)` before you unpack anything: on a truncated file, your code stops before it reaches "
                "the check"),
        Mistake("read rather than mapped", 'np.memmap(path, np.uint8, "r")', "np.fromfile(path, np.uint8)",
                "this reads the whole file: np.memmap reads only the parts that you use"),
        Mistake("a copy of the pointers", POINTERS, POINTERS + ".copy()",
                "np.frombuffer leaves the pointers in the file: a copy reads all of them"),
        Mistake("lengths of eight bytes", LENGTHS, LENGTHS.replace("<i4", "<i8"),
                "lengths are int32, of 4 bytes each: with 8 bytes, everything after them is read from the wrong place",
                stops="ValueError"),
        Mistake("pointers from the start", POINTERS, POINTERS.replace(" + lengths.nbytes", ""),
                "the pointers come after the lengths, which are S int32 numbers"),
        Mistake("documents without the pointers", DOCUMENTS, DOCUMENTS.replace(" + pointers.nbytes", ""),
                "the documents come after the pointers, which are S int64 numbers"),
        Mistake("one document too few", DOCUMENTS, DOCUMENTS.replace(", D,", ", D - 1,"),
                "the header's D includes the S at the end: there are D numbers"),
        Mistake("documents to the end of the file", DOCUMENTS,
                'rest = raw[HEADER.size + lengths.nbytes + pointers.nbytes:]\n'
                '    documents = np.frombuffer(rest[:len(rest) // 8 * 8], "<i8")',
                "a file of multimodal data has more after the documents: read D of them"),
        Mistake("always int32", "DTYPES[code]", '"int32"', "the header gives the kind of number: look up `code` in DTYPES"),
        Mistake("a name for a dtype", 'np.dtype(DTYPES[code]).newbyteorder("<")', "DTYPES[code]",
                "DTYPES gives a name: make a dtype of it with np.dtype(...), which knows how many bytes a token has"),
        Mistake("pointers in tokens", "lengths, pointers, documents)",
                "lengths, pointers // np.dtype(DTYPES[code]).itemsize, documents)",
                "return the pointers as they are in the file, in bytes"),
        Mistake("pointers of four bytes", POINTERS, POINTERS.replace("<i8", "<i4"), "pointers are int64, of 8 bytes each"),
        Mistake("another code", "DTYPES[code]", 'DTYPES[code].replace("uint16", "int16")',
                "code 8 is uint16, without a sign: as int16, tokens from 32,768 on are negative"),
        Mistake("big-endian", '.newbyteorder("<"), lengths', ', lengths.byteswap()',
                'the file is little-endian: write it in the dtype, "<i4"'),
        Mistake("one document a sequence", DOCUMENTS, DOCUMENTS.replace(", D,", ", S + 1,"),
                "the header gives the number of entries in documents, D: it is S + 1 only if every document has one sequence",
                stops="ValueError"),
        Mistake("one document too many", DOCUMENTS, DOCUMENTS.replace(", D,", ", D + 1,"),
                "D already includes the S at the end: D numbers, not D + 1", stops="ValueError"),
        Mistake("as many documents as sequences", DOCUMENTS, DOCUMENTS.replace(", D,", ", S,"),
                "a document may have several sequences, or none: documents has D numbers, not S", stops="ValueError"),
        Mistake("always uint16", "DTYPES[code]", '"uint16"',
                "two bytes a token is right for small vocabularies only: the header gives the kind of number, so look up "
                "`code` in DTYPES"),
        Mistake("only two kinds", "DTYPES[code]", '{8: "uint16", 4: "int32"}[code]',
                "there are more than two kinds of numbers: DTYPES has all of them", stops="KeyError"),
        Mistake("lengths of two bytes", LENGTHS, LENGTHS.replace("<i4", "<u2"), "lengths are int32, of 4 bytes, not of 2"),
        Mistake("sequences and documents changed over", "_, _, code, S, D", "_, _, code, D, S",
                "S comes before D in the header: first the number of sequences, then the number of entries in documents"),
        Mistake("pointers big-endian", POINTERS, POINTERS.replace("<i8", ">i8"), 'all numbers are little-endian: "<i8"'),
        Mistake("documents of four bytes", DOCUMENTS, DOCUMENTS.replace("<i8", "<i4"), "documents are int64, of 8 bytes each"),
        Mistake("a copy of the lengths", LENGTHS, LENGTHS + ".copy()",
                "something is copied, or converted with astype: leave the parts in the file, where np.frombuffer finds them",
                by=("mapped",)),
        Mistake("to the end of the file",
                '"<i8", D, HEADER',
                '"<i8", -1, HEADER',
                "the file may go on after the documents: read D numbers, as the header says, not all that follow",
                stops="ValueError"),
        Mistake("the other byte order",
                '"<i4"',
                '">i4"',
                "the numbers are little-endian, the lowest byte first: the sign is <, not >"),
    ),
    "one-document": (
        Mistake("bytes for tokens", "index.pointers[first] // index.dtype.itemsize", "index.pointers[first]",
                "pointers count bytes, but slices of `tokens` count tokens: divide by index.dtype.itemsize"),
        Mistake("two bytes always", "// index.dtype.itemsize", "// 2",
                "the index gives the bytes of a token: index.dtype.itemsize"),
        Mistake("the first sequence alone", "index.lengths[first:last].sum()", "index.lengths[first:last][:1].sum()",
                "a document may have several sequences: sum the lengths of all of them"),
        Mistake("sequence i for document i", "first, last = index.documents[i:i + 2]", "first, last = i, i + 1",
                "documents[i] is the first sequence of document i: it need not be sequence i"),
        Mistake("one sequence too many", "index.lengths[first:last].sum()", "index.lengths[first:last + 1].sum()",
                "documents[i + 1] is the next document's first sequence: this document ends before it"),
        Mistake("an empty document", START, "start = index.pointers[first] // index.dtype.itemsize",
                "a document without sequences at the end begins after the last sequence, where there is no pointer",
                stops="IndexError"),
        Mistake("without the last token", STOP, STOP.replace(".sum()]", ".sum() - (first < last)]"),
                "a slice already excludes its end: subtract nothing"),
        Mistake("one token more", STOP, STOP.replace(".sum()]", ".sum() + 1]"),
                "a slice excludes its end, so the end is start + the number of tokens: add nothing"),
        Mistake("up to the next pointer", STOP, "stop = index.pointers[last] // index.dtype.itemsize if last < "
                "len(index.pointers) else None\n"
                "    return tokens[start:stop]",
                "a document without sequences has no pointer, so the pointers do not give its start and end: sum its lengths"),
        Mistake("the lengths before", START, "start = index.lengths[:i].sum()",
                "documents[i] is the first sequence of document i, so documents[i] sequences come before it, not i: "
                "lengths[:first]"),
        Mistake("without its last sequence", STOP, STOP.replace("first:last]", "first:max(last - 1, first)]"),
                "documents[i + 1] is the next document's first sequence, and a slice excludes its end: subtract nothing"),
        Mistake("four bytes always", "// index.dtype.itemsize", "// 4",
                "four bytes a token is right for int32 only: the index gives the bytes, index.dtype.itemsize"),
        Mistake("the first length for all", "index.lengths[first:last].sum()", "(index.lengths[first:last].sum() and "
                "index.lengths[first] * (last - first))", "each sequence has its own length: sum the lengths from first to last"),
    ),
}
