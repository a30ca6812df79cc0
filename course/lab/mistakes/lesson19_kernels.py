"""Known wrong answers of lesson 19: copy, fused GELU, softmax, residual add with LayerNorm."""

from course.lab.checks.exercise import Mistake

INSIDE = "inside = (row < R) & (column < C)"
GRID = "grid = (triton.cdiv(R, rows), triton.cdiv(C, columns))"
NO_MASK = "the last tiles reach beyond the matrix: give tl.load and tl.store a mask that is true inside, row < R and column < C"
ROUNDED_DOWN = "tiles that the matrix fills only in part need a program too: round up, triton.cdiv"
FIRST_TILE = "every program works on the first tile: it begins at program_id * (numbers per tile)"
ELEMENTS = "a program has a tile, not one number: begin at program_id times the size of a tile"
BIAS = """b = tl.load(bias + column, mask=column < C).to(tl.float32)
    inside = (row < R) & (column < C)[None, :]                                          # (ROWS, COLUMNS)
    z = tl.load(x + row * x_row + column[None, :], mask=inside).to(tl.float32) + b[None, :]"""
BIAS_2D = "bias + 0 * row + column[None, :], mask=(row < R) & (column < C)[None, :]"

MISTAKES = {
    "copy": (
        Mistake("no mask for rows", INSIDE, "inside = (row >= 0) & (column < C)", NO_MASK),
        Mistake("no mask for columns", INSIDE, "inside = (row < R) & (column >= 0)", NO_MASK),
        Mistake("a mask for the load alone", "tile, mask=inside)", "tile)",
                "the store has no mask: the last tiles write beyond the matrix"),
        Mistake("one row too many", INSIDE, "inside = (row <= R) & (column < C)", NO_MASK),
        Mistake("the first rows everywhere", "tl.program_id(0).to(tl.int64) * ROWS + ", "", FIRST_TILE),
        Mistake("the first columns everywhere", "tl.program_id(1).to(tl.int64) * COLUMNS + ", "", FIRST_TILE),
        Mistake("a step of one row", "tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0).to(tl.int64)", ELEMENTS),
        Mistake("program ids changed over", "row = tl.program_id(0)", "row = tl.program_id(1)",
                "the grid is (tiles of rows, tiles of columns): rows go with program_id(0), columns with program_id(1)"),
        Mistake("strides changed over", "row * x_row + column * x_column", "row * x_column + column * x_row",
                "the strides are changed over: a step to the next row is x_row elements of memory"),
        Mistake("as if contiguous", "row * x_row + column * x_column", "row * C + column",
                "x need not be contiguous: element (row, column) lies at x + row * x_row + column * x_column"),
        Mistake("y with the strides of x", "y + row * y_row + column * y_column", "y + row * x_row + column * x_column",
                "y has strides of its own, y_row and y_column"),
        Mistake("a grid rounded down", GRID, "grid = (R // rows, C // columns)", ROUNDED_DOWN),
        Mistake("a program for each row", GRID, "grid = (R, triton.cdiv(C, columns))",
                "a program copies a tile of several rows: triton.cdiv(R, rows) programs are enough for R rows"),
        Mistake("one program for everything", GRID,
                "rows, columns, grid = triton.next_power_of_2(R), triton.next_power_of_2(C), (1, 1)",
                "one program runs on one multiprocessor while the others wait: launch one for each tile"),
        Mistake("a contiguous copy first", "    R, C = x.shape", "    R, C = x.shape\n    x = x.contiguous()",
                "x.contiguous() is a copy that PyTorch makes: your kernel can read any strides"),
        Mistake("PyTorch's copy", GRID, f"y.copy_(x)\n    {GRID}",
                "this is PyTorch's copy: let your kernel load and store"),
    ),
    "fused-gelu": (
        Mistake("the sigmoid of u", "tl.sigmoid(2 * u)", "tl.sigmoid(u)", "(1 + tanh u) / 2 is the sigmoid of 2 u, not of u"),
        Mistake("a square for a cube", "0.044715 * z * z * z", "0.044715 * z * z", "the small term is 0.044715 times z cubed"),
        Mistake("GELU by the error function", "gelu = z * tl.sigmoid(2 * u)",
                "gelu = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))",
                "this is the exact GELU, by the error function: the tanh approximation is asked for"),
        Mistake("SiLU", "tl.sigmoid(2 * u)", "tl.sigmoid(z)", "z times sigmoid(z) is SiLU: GELU takes the sigmoid of 2 u"),
        Mistake("without the factor z", "gelu = z * tl.sigmoid(2 * u)", "gelu = tl.sigmoid(2 * u)",
                "this is GELU(z) / z: multiply by z"),
        Mistake("the bias after GELU", ".to(tl.float32) + b[None, :]\n", ".to(tl.float32)\n",
                "the bias is missing, or added too late: z = x + bias before anything else"),
        Mistake("the bias behind GELU", "gelu = z * tl.sigmoid(2 * u)", "gelu = z * tl.sigmoid(2 * u) + b[None, :]",
                "the bias is added once, before GELU"),
        Mistake("a bias for each element", BIAS,
                BIAS.replace("bias + column, mask=column < C", BIAS_2D).replace("b[None, :]", "b"),
                "each row loads the bias again: load COLUMNS numbers, (COLUMNS,), and let b[None, :] broadcast them",
                by=("bias",)),
        Mistake("the bias of the first columns", "bias + column, mask", "bias + tl.arange(0, COLUMNS), mask",
                "the bias belongs to columns, and this tile's begin at program_id(1) * COLUMNS"),
        Mistake("as if contiguous", "row * x_row + column", "row * C + column",
                "rows of x need not follow each other: they are x_row elements apart"),
        Mistake("y with the rows of x", "y + row * y_row", "y + row * x_row", "rows of y are y_row elements apart"),
        Mistake("no mask", "inside = (row < R) & (column < C)[None, :]", "inside = (row >= 0) & (column >= 0)[None, :]", NO_MASK),
        Mistake("two kernels in one", "    tl.store(y + row", "    tl.store(y + row * y_row + column[None, :], "
                "z.to(y.dtype.element_ty), mask=inside)\n    tl.store(y + row",
                "x + bias goes to memory although nobody needs it: keep it in registers, and store the result alone",
                by=("stores",)),
        Mistake("a grid rounded down", GRID, "grid = (R // rows, C // columns)", ROUNDED_DOWN),
        Mistake("PyTorch adds the bias", "    R, C = x.shape", "    x += bias\n    bias = 0 * bias\n    R, C = x.shape",
                "PyTorch adds the bias in one more pass over x: add it in your kernel"),
    ),
}
