"""Known wrong answers of lesson 14's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

SUM = "        dist.all_reduce(x, group=self.axis.group)\n"
NOISE = "gumbel(self.seed, end, B, columns)"
DIVIDED = f"logits = logits / self.temperature + {NOISE}"
CHOSEN = "        return tokens_of.gather(0, bests.argmax(0, keepdim=True))[0].long()"
COLUMNS = "        columns = axis.rank * rows + torch.arange(rows)\n"
LOGITS = "        logits = rms(x[:, -1], w[\"norm\"]) @ w[\"token\"].T"
MASK = "later = torch.arange(end) > torch.arange(start, end)[:, None]"
ABSENT = "a token whose row is on another rank contributes zeros here: multiply by whether it is here"
PLACE = "the first token of a second piece sees all tokens of the first: the mask begins at its place in the text"
PLACED = "            keys[:, :, start:end], values[:, :, start:end] = k, v\n"
NEW = "self.cache = k.new_zeros(DEPTH, 2, B, k.shape[1], self.most, k.shape[3])"
ATTENTION = "x = x + self.total(y.transpose(1, 2).flatten(2) @ w[f\"{i}.out\"].T)"

MISTAKES = {
    "write-text": (
        Mistake("each rank has its own choice", CHOSEN, "        return columns[place]",
                "each rank returns the best of its own columns: compare them over the ranks"),
        Mistake("the place in its own columns", "columns[place].to(best.dtype)", "place.to(best.dtype)",
                "the place of a token among this rank's columns is no token yet: column 0 of rank r is entry r · V / n"),
        Mistake("the columns of rank 0", COLUMNS, "        columns = torch.arange(rows)\n",
                "column 0 of rank r is entry r · V / n of the vocabulary: padding, noise and the token need its place there"),
        Mistake("the noise of rank 0", NOISE, "gumbel(self.seed, end, B, columns - axis.rank * rows)",
                "all ranks add the same noise to different columns: ask for the noise of the columns' places in the whole "
                "vocabulary"),
        Mistake("one noise for all texts", NOISE, "gumbel(self.seed, end, 1, columns)",
                "each text of the batch has noise of its own: `gumbel(seed, position, B, columns)`"),
        Mistake("the noise of the token before", NOISE, "gumbel(self.seed, end - 1, B, columns)",
                "the noise belongs to the position of the token that is drawn: the number of tokens before it"),
        Mistake("the noise of the call's beginning", NOISE, "gumbel(self.seed, start, B, columns)",
                "the noise belongs to the position of the token that is drawn: the number of tokens before it, those of this "
                "call among them"),
        Mistake("the noise of the call", NOISE, "gumbel(self.seed, t, B, columns)",
                "the position of a token counts from the beginning of the text, not from the beginning of the call"),
        Mistake("padding is drawn", ".masked_fill(columns >= self.words, -torch.inf)", "",
                "entries from `words` on are padding, and can have large logits: give them -inf before you look for the "
                "largest"),
        Mistake("times the temperature", "logits / self.temperature", "logits * self.temperature",
                "the logits are divided by the temperature: below 1, probable tokens become more probable"),
        Mistake("the noise is divided too", DIVIDED, f"logits = (logits + {NOISE}) / self.temperature",
                "only the logits are divided by the temperature: the noise is added afterwards"),
        Mistake("attention's part alone", ATTENTION, "x = x + y.transpose(1, 2).flatten(2) @ w[f\"{i}.out\"].T",
                "each rank has its heads' part of the output: sum it over the ranks before it is added to x"),
        Mistake("x is summed too", ATTENTION, "x = self.total(x + y.transpose(1, 2).flatten(2) @ w[f\"{i}.out\"].T)",
                "every rank has all of x: sum the parts over the ranks, and then add them to x"),
        Mistake("tokens of others", " * here[..., None])", ")", ABSENT),
        Mistake("the nearest row for tokens of others", "own * here, w[\"token\"]) * here[..., None])",
                "own.clamp(0, rows - 1), w[\"token\"]))", ABSENT),
        Mistake("positions are summed too", " * here[..., None]) + w[\"pos\"][start:end]",
                " * here[..., None] + w[\"pos\"][start:end])",
                "every rank has all positions: added before the sum over the ranks, they count once for each rank"),
        Mistake("positions from 0", "w[\"pos\"][start:end]", "w[\"pos\"][:t]",
                "the positions go on where the last call ended"),
        Mistake("a mask from 0", MASK, "later = torch.arange(end) > torch.arange(t)[:, None]", PLACE),
        Mistake("a mask from 0 for pieces", MASK,
                "later = torch.arange(end) > (torch.arange(t) + (start if t == 1 else 0))[:, None]", PLACE),
        Mistake("no mask", MASK, "later = torch.zeros(t, end, dtype=torch.bool)",
                "the tokens of a prompt must not see later ones: mask the scores"),
        Mistake("all ranks of the run", SUM, "        dist.all_reduce(x)\n",
                "sum over the axis, not over all ranks of the run: `group=axis.group`"),
        Mistake("all logits are gathered", LOGITS + "                                    # (B, V / n)\n",
                LOGITS + "\n        everything = [torch.empty_like(logits) for _ in range(axis.size)]\n"
                "        dist.all_gather(everything, logits, group=axis.group)\n",
                "logits are large, and only the largest entry matters: send that and its place", by=("sent",)),
        Mistake("logits of the whole prompt", LOGITS, "        logits = (rms(x, w[\"norm\"]) @ w[\"token\"].T)[:, -1]",
                "only the last token's logits are needed: take it before you multiply by the vocabulary", by=("prompt",)),
        Mistake("the cache is made anew", PLACED, PLACED + "            keys, values = (torch.cat([old[:, :, :start], new], 2)"
                " for old, new in ((keys, k), (values, v)))\n",
                "the keys and values are copied for each token, by `torch.cat` or since a slice of another order of dims cannot "
                "be multiplied as it is: make a cache (B, h / n, most, d) once, and write into it", by=("grows",)),
        Mistake("the noise of the whole vocabulary", NOISE,
                "gumbel(self.seed, end, B, torch.arange(rows * axis.size))[:, columns]",
                "noise is a function of its place: compute that of this rank's columns alone", by=("small",)),
        Mistake("a cache for all heads", NEW, NEW.replace("k.shape[1], self", "k.shape[1] * axis.size, self") +
                "[:, :, :, :k.shape[1]]",
                "a rank needs the keys and values of its own heads only: h / n of them", by=("kept",)),
    ),
}
