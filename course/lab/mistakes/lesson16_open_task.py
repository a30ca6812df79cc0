"""Known wrong answers of lesson 16's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

ALL = "return cut(read(part, i).T if transposed else read(part, i))"
ENDS = "list(permutations(tables)) if len(tables) == 2 else"
MADE = "    return {name: get(name).contiguous() for name in build_model(c).state_dict()}\n"
HELD = "        return checkpoint.read(checkpoint.index[name], name)\n"

MISTAKES = {
    "convert-foreign": (
        Mistake("square matrices are not turned", ALL,
                "x = read(part, i)\n            return cut(x.T if transposed and x.shape != (D, D) else x)",
                "a library multiplies from one side everywhere. If its maps are (in, out), the square ones are too, though their "
                "shape does not show it"),
        Mistake("rotary pairs are ours", "if interleaved else x", "if False else x",
                "some library turns elements 2i and 2i + 1 of a head, ours i and i + d/2: bring the rows of its queries and keys "
                "into our order"),
        Mistake("rotary pairs are always theirs", "if interleaved else x", "if True else x",
                "some library turns elements i and i + d/2 like ours: there the rows stay where they are. Try both"),
        Mistake("values are turned too", "v(i)])", "turned(v(i))])",
                "rotary positions turn queries and keys. The rows of the values stay where they are"),
        Mistake("the first norm is before attention", "permutations(parts_of(D))", "[tuple(parts_of(D))]",
                "two norms of a block have the same shape, and names say nothing: try both orders"),
        Mistake("gates first", "permutations(halves)", "[tuple(halves)]",
                "gates and values have the same shape, stacked or not: try both orders"),
        Mistake("the first table is the embedding", ENDS, "[tuple(tables)] if len(tables) == 2 else",
                "where the head has its own matrix, (V, D) like the embedding, try both orders"),
        Mistake("always part by part", "for by_head in (False, True)", "for by_head in (False,)",
                "a fused matrix may go head by head: its rows are (heads, 3, d) or (3, heads, d). Try both: both fit its shape"),
        Mistake("queries before keys", "for qkv in permutations(", "for qkv in (lambda three: [tuple(three)])(",
                "the parts of a fused matrix may come in any order: try all six"),
        Mistake("every table is the head", "heads[0])] if heads else", "tables[0])] if heads else",
                "a head that is (in, out) has the shape (D, V): where there is one, it is not the embedding"),
        Mistake("stale copies", HELD, "        held = [file for file in checkpoint._files if name in checkpoint.shapes(file)]\n"
                "        return checkpoint.read(next((f for f in held if f != checkpoint.index[name]), held[0]), name)\n",
                "a file can hold a tensor that an earlier save left behind. The index says which file counts"),
        Mistake("everything in float64", MADE, MADE.replace("get(name)", "get(name).double()"),
                "a converter keeps the numbers as they are: return each tensor in the format that it has in the files",
                by=("formats",)),
        Mistake("one format for all", MADE, MADE.replace("get(name)", "get(name).to(get('embed.token.weight').dtype)"),
                "not all tensors of a checkpoint have the same format: keep the format of each"),
        Mistake("asked for each layout", "    def error(layout: Any, count: int) -> float:\n",
                "    def error(layout: Any, count: int) -> float:\n        theirs = run(tokens)\n",
                "the model's logits do not depend on what you try: run it once, on a longer text, and keep them. Attention is "
                "causal, so the first token's logits are among them", by=("once",)),
        Mistake("everything is read first", "    def reader(",
                "    everything = {name: checkpoint.read(file, name) for name, file in checkpoint.index.items()}\n"
                "    everything |= {f'of {name}': 2 * x for name, x in everything.items()}\n\n    def reader(",
                "while combinations are tried, more than one copy of the weights is in memory: read a tensor when `logits` asks "
                "for it, and forget it", by=("copies",)),
    ),
}
