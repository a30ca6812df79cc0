"""The call of cuBLASLt, by a library that notes what it is asked: layouts by columns, and what is done where nothing is fast."""

import ctypes
from unittest import mock

import pytest
import torch

from course import cublaslt, gelu, trial
from course.products import product_plain, weight_gradient_plain


class Library:
    """Notes its calls; offers algorithms with these waves and bytes of workspace, all with one status.

    usual: what it offers for the second shape that it is asked about; fit: the waves and bytes of those for the first.
    """

    def __init__(self, *offers, state=0, usual=(), fit=(0.9, 131)):
        self.offers, self.state, self.usual, self.fit = offers, state, usual, fit
        self.calls, self.refuses, self.attributes, self.preferences = [], "", {}, {}
        self.tried, self.unknown = {}, ()           # tiles, clusters and options of algorithms, and those that it refuses

    def __getattr__(self, name):
        def function(*given):
            if name == "cublasLtMatmulDescSetAttribute":
                self.attributes[given[1]] = given[2]._obj.value
            self.calls.append((name, [x.value if hasattr(x, "value") else x for x in given]))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                offers = self.offers if len(self.made("cublasLtMatmulDescCreate")) == 1 else self.usual
                fitting = [(waves, size) for waves, size in offers if size <= self.preferences[1]]
                for slot, (waves, size) in zip(given[8], fitting, strict=False):
                    slot.waves, slot.workspace, slot.state = waves, size, self.state
                given[9]._obj.value = len(fitting)
            if name == "cublasLtMatmulAlgoConfigSetAttribute":
                self.tried.setdefault(given[1], []).append(given[2]._obj.value)
                return 7 if given[2]._obj.value in self.unknown else 0
            if name == "cublasLtMatmulAlgoCheck":
                given[7]._obj.waves, given[7]._obj.workspace = self.fit
            if name == "cublasLtMatmulPreferenceSetAttribute":
                self.preferences[given[1]] = given[2]._obj.value
            return 7 if name == self.refuses else 0

        return function

    def made(self, name):
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def lent(monkeypatch):
    """Cuts off all that asks a GPU; what to call with the library to be used."""
    cublaslt.matmul.cache_clear()
    monkeypatch.setattr(cublaslt, "library_handle", lambda: ctypes.c_void_p(1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=77))

    def use(library):
        monkeypatch.setattr(cublaslt, "library", lambda: library)
        return library

    yield use
    cublaslt.matmul.cache_clear()


def merged(m, n, k, kind=torch.bfloat16):
    """A product with GELU's gradient."""
    return cublaslt.Matmul(m, n, k, kind, 64, epilogue=cublaslt.DGELU)


def test_the_result_of_asking_has_the_size_of_the_librarys():
    """Eight words, a size, a status, a float and four integers (cublasLt.h): whatever is off here reads another algorithm."""
    assert ctypes.sizeof(cublaslt.Found) == 96 and cublaslt.Found.workspace.offset == 64 and cublaslt.Found.waves.offset == 76


@pytest.mark.parametrize(("turned", "weight", "tokens"), [
    ("", [5, 3, 5], [3, 6, 3]), ("weight", [3, 5, 3], [3, 6, 3]), ("x", [5, 3, 5], [6, 3, 6])])
def test_a_matrix_by_rows_is_its_transpose_by_columns(lent, turned, weight, tokens):
    """(6, 3) times (3, 5): A is the weight, 5 x 3 by columns, or, stored as (5, 3), 3 x 5 and turned; B the tokens, 3 x 6, or,
    stored as (3, 6), 6 x 3 and turned; D 5 x 6."""
    library = lent(Library((0.9, 131)))
    product = cublaslt.Matmul(6, 5, 3, torch.bfloat16, 64, turned)
    layouts = library.made("cublasLtMatrixLayoutCreate")
    assert [given[2:] for given in layouts] == [weight, tokens, [5, 6, 5]] and {given[1] for given in layouts} == {14}
    assert [library.attributes.get(which, 0) for which in (3, 4)] == [turned == "weight", turned == "x"]    # TRANSA, TRANSB
    assert len(product.offered) == 1
    assert [library.preferences[which] for which in (5, 6, 7, 8)] == [64] * 4       # bytes to which A, B, C and D are aligned


def test_what_a_library_offers_and_calls_unfit_is_left_out(lent):
    lent(Library((0.9, 131), state=15))                                             # CUBLAS_STATUS_NOT_SUPPORTED
    assert not merged(6, 5, 3).offered


@pytest.mark.parametrize("epilogue", [cublaslt.NOTHING, cublaslt.BIAS, cublaslt.DGELU])
def test_it_is_run_on_the_tensors_in_order_and_on_this_stream(lent, epilogue):
    """The weight is the first factor, the tokens the second; then a bias, or GELU' of aux, whose rows are n numbers apart."""
    library = lent(Library((0.9, 131)))
    product = cublaslt.Matmul(6, 5, 3, torch.bfloat16, 64, epilogue=epilogue)
    weight, x, extra, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3, 5), (6, 3), (6, 5), (6, 5)))
    assert product.run(product.offered[0], x, weight, *[extra] * (epilogue != cublaslt.NOTHING), out=out) is out
    (_, _, _, a, _, b, _, _, c, _, d, _, _, _, size, stream), = library.made("cublasLtMatmul")
    assert (a, b, c, d) == (weight.data_ptr(), x.data_ptr(), out.data_ptr(), out.data_ptr())
    assert (size, stream) == (cublaslt.WORKSPACE, 77)
    assert library.attributes == {cublaslt.NOTHING: {7: 1}, cublaslt.BIAS: {7: 4, 8: extra.data_ptr()},
                                  cublaslt.DGELU: {7: 192, 11: extra.data_ptr(), 12: 5}}[epilogue]
    assert library.made("cublasLtMatmulDescCreate")[0][1:] == [68, 0]               # sums and scales in float32


@pytest.mark.parametrize(("offers", "waves"), [
    ([(0.9, 131), (31.0, 4)], [0.9, 31.0]), ([(31.0, 2**22)], []), ([(31.0, 2**22), (0.9, 131)], [0.9]), ([], [])])
def test_what_takes_much_workspace_is_left_out(lent, offers, waves):
    lent(Library(*offers))
    assert [by.waves for by in merged(6, 5, 3, torch.float16).offered] == pytest.approx(waves)


def test_with_little_workspace_it_is_asked_again(lent):
    """As for a shape for which the library, given much, offers one algorithm that takes all of it."""
    library = lent(Library())
    merged(6, 5, 3, torch.float16)
    assert len(library.made("cublasLtMatmulAlgoGetHeuristic")) == 2 and library.preferences[1] == cublaslt.WORKSPACE


SLOW = (31.0, 4)


@pytest.mark.parametrize("offers", [[], [SLOW], [(31.0, 2**22)]])
def test_fast_algorithms_of_another_shape_are_taken_where_they_fit(lent, offers):
    library = lent(Library(*offers, usual=[(0.8, 99), SLOW]))
    product = merged(6, 5, 3)
    found = cublaslt.in_one_wave(product)
    assert [(by.waves, by.workspace) for by in found] == [(pytest.approx(0.9), 131)] * 2
    shapes = [given[2:4] for given in library.made("cublasLtMatrixLayoutCreate")]
    assert shapes[:3] == [[5, 3], [3, 6], [5, 6]] and shapes[3:] == [[3072, 768], [768, 65536], [3072, 65536]]
    assert len(library.made("cublasLtMatmulAlgoCheck")) == 2


@pytest.mark.parametrize("library", [Library(SLOW), Library(SLOW, usual=[SLOW], fit=SLOW),
                                     Library(SLOW, usual=[(0.8, 99)], fit=(0.9, 2**22)),
                                     Library(SLOW, usual=[(0.8, 99)], fit=SLOW)])
def test_there_may_be_none_fast(lent, library):
    lent(library)
    assert cublaslt.in_one_wave(merged(6, 5, 3)) == []


def test_what_does_not_fit_is_not_taken(lent):
    library = lent(Library(SLOW, usual=[(0.8, 99)]))
    library.refuses = "cublasLtMatmulAlgoCheck"
    assert cublaslt.in_one_wave(merged(6, 5, 3)) == []


def test_what_is_offered_for_the_shape_itself_comes_first(lent):
    library = lent(Library((0.7, 9), SLOW, usual=[(0.8, 99)]))
    assert [by.waves for by in cublaslt.in_one_wave(merged(6, 5, 3))] == [pytest.approx(0.7)]
    assert len(library.made("cublasLtMatmulDescCreate")) == 1


@pytest.mark.parametrize("offers", [[], [SLOW]])
def test_where_nothing_fast_is_offered_the_steps_are_apart(lent, offers):
    """Also what has another format, or rows that are not aligned."""
    library = lent(Library(*offers))
    dy, weight, a = torch.randn(2, 8, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(2, 8, 24).bfloat16()
    for total in (True, False):
        torch.testing.assert_close(cublaslt.gelu_linear_backward(dy, weight, a, total),
                                   gelu.gelu_linear_backward_plain(dy, weight, a, total))
    for given in ((dy.float(), weight.float(), a.float()), (dy, weight[:, :20], a[..., :20])):
        library.calls.clear()
        torch.testing.assert_close(cublaslt.gelu_linear_backward(*given, True), gelu.gelu_linear_backward_plain(*given, True))
        assert not library.calls
    assert not library.made("cublasLtMatmul")


@pytest.fixture
def timed(monkeypatch):
    """Algorithms that compute the product, or, of these waves, something else; and a clock by which each takes its waves, and
    PyTorch's way so many seconds."""
    def clock(other_bits=(), pytorch=1.0, others=False):
        def run(self, by, x, weight, extra=None, *, out):
            x = x if x.shape[1] == len(weight) else x.T             # of a weight's gradient
            found = product_plain(x, weight, False, None if extra is None or extra.dim() > 1 else extra)
            return out.copy_(found + (round(by.waves, 2) in other_bits))

        def lap(way, calls):
            way()
            return way.args[0].waves if isinstance(getattr(way, "args", [None])[0], cublaslt.Found) else pytorch

        monkeypatch.setattr(cublaslt.Matmul, "run", run)
        if not others:
            monkeypatch.setattr(cublaslt.Matmul, "others", lambda self: [])
        monkeypatch.setattr(trial, "lap", lap)
        monkeypatch.setattr(cublaslt, "WORK", 0)

    return clock


@pytest.mark.parametrize(("other_bits", "pytorch", "wins"), [
    ((), 1.0, 0.5), ((0.5,), 1.0, 0.75), ((0.5, 0.75), 1.0, None), ((), 0.5, None), ((), 0.503, None), ((), 0.51, 0.5)])
def test_the_fastest_way_to_pytorchs_bits_is_chosen(lent, timed, other_bits, pytorch, wins):
    """If it gains a percent."""
    lent(Library((0.75, 1), (0.5, 2), (2.0, 3)))
    timed(other_bits, pytorch)
    x, weight = torch.randn(16, 8).bfloat16(), torch.randn(8, 24).bfloat16()
    found = cublaslt.product(x, weight, False, None)
    assert torch.equal(found, product_plain(x, weight, False))
    by, = cublaslt.matmul(16, 24, 8, torch.bfloat16, cublaslt.alignment(x, weight), None, "", cublaslt.NOTHING).chosen
    assert (by and by.waves) == (wins and pytest.approx(wins))


def test_the_gradient_of_a_weight_is_chosen_likewise(lent, timed):
    lent(Library((0.75, 1), (0.5, 2)))
    timed()
    dy, x = torch.randn(16, 24).bfloat16(), torch.randn(16, 8).bfloat16()
    assert torch.equal(cublaslt.weight_gradient(dy, x), weight_gradient_plain(dy, x))
    by, = cublaslt.matmul(24, 8, 16, torch.bfloat16, cublaslt.alignment(dy, x), None, "x", cublaslt.NOTHING).chosen
    assert by.waves == 0.5


def test_what_is_not_offered_is_tried_too(lent, timed):
    lent(Library((0.75, 1), fit=(0.25, 4)))
    timed(others=True)
    x, weight = torch.randn(16, 8).bfloat16(), torch.randn(8, 24).bfloat16()
    cublaslt.product(x, weight, False, None)
    by, = cublaslt.matmul(16, 24, 8, torch.bfloat16, cublaslt.alignment(x, weight), None, "", cublaslt.NOTHING).chosen
    assert by.waves == 0.25


@pytest.mark.parametrize(("unknown", "left"), [((), 36), ((29,), 27), ((3,), 16)])
def test_others_are_all_tiles_clusters_and_options_that_it_knows(lent, unknown, left):
    """A 3 is a cluster and an option: without it two of three are left of both."""
    library = lent(Library((0.75, 1)))
    library.unknown = unknown
    assert len(merged(6, 5, 3).others()) == left
    assert {which: set(values) for which, values in library.tried.items()} == {1: {20, 29, 30, 33}, 8: {2, 3, 5}, 5: {0, 1, 3}}
    library.unknown = cublaslt.TILES
    assert merged(6, 5, 3).others() == []


@pytest.mark.parametrize("library", [Library(), Library((0.75, 1), fit=(0.25, 2**22))])
def test_there_may_be_no_others(lent, library):
    lent(library)
    assert merged(6, 5, 3).others() == []


def test_a_product_is_tried_once_for_each_shape(lent, timed, monkeypatch):
    lent(Library((0.5, 1), usual=[(0.5, 1)]))
    timed()
    tried = []
    monkeypatch.setattr(cublaslt, "choose", lambda one, *rest: tried.append(one) or (one.offered[0],))
    x, weight, bias = torch.randn(16, 8).bfloat16(), torch.randn(8, 24).bfloat16(), torch.randn(24).bfloat16()
    for given in ((x, weight, False, None), (x, weight, False, bias), (x, weight, False, None), (x[:8], weight, False, None)):
        torch.testing.assert_close(cublaslt.product(*given), product_plain(*given))
    assert [one.address for one in tried] == [None, cublaslt.BIAS_AT, None]


def test_a_small_product_and_one_of_other_formats_are_pytorchs(lent, timed, monkeypatch):
    library = lent(Library((0.5, 1)))
    timed()
    x, weight = torch.randn(16, 8), torch.randn(8, 24)
    torch.testing.assert_close(cublaslt.product(x, weight, False, None), x @ weight)
    monkeypatch.setattr(cublaslt, "WORK", 16 * 8 * 24 + 1)
    torch.testing.assert_close(cublaslt.product(x.half(), weight.half(), False, None), x.half() @ weight.half())
    assert not library.calls


def test_while_a_graph_is_captured_nothing_is_tried(lent, timed, monkeypatch):
    library = lent(Library((0.5, 1), usual=[(0.5, 1)]))
    timed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, weight = torch.randn(16, 8).bfloat16(), torch.randn(8, 24).bfloat16()
    torch.testing.assert_close(cublaslt.product(x, weight, False, None), x @ weight)
    one = cublaslt.matmul(16, 24, 8, torch.bfloat16, cublaslt.alignment(x, weight), None, "", cublaslt.NOTHING)
    assert one.chosen is None and not library.made("cublasLtMatmul")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cublaslt.product(x, weight, False, None)
    assert one.chosen[0].waves == 0.5


def test_without_room_for_a_trial_the_first_way_is_taken(lent, monkeypatch):
    lent(Library((0.5, 1), (0.4, 2)))

    def full(*given):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(trial, "compare", full)
    one, tensors = merged(16, 24, 8), [torch.zeros(shape).bfloat16() for shape in ((16, 8), (8, 24), (16, 24))]
    assert cublaslt.choose(one, one.offered, tensors, cublaslt.plain(False)) == (None,)
    assert cublaslt.choose(one, one.offered, tensors) == (one.offered[0],)


def test_of_several_in_one_wave_the_fastest_computes_gelus_gradient(lent, timed, monkeypatch):
    lent(Library((0.75, 1), (0.5, 2), SLOW))
    timed()
    dy, weight, a = torch.randn(2, 8, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(2, 8, 24).bfloat16()
    given, run = [], cublaslt.Matmul.run

    def noted(self, by, x, weight, extra=None, *, out):
        given.append((by.waves, extra.data_ptr()))
        return run(self, by, x.flatten(0, -2), weight, extra, out=out.view(16, 24))

    monkeypatch.setattr(cublaslt.Matmul, "run", noted)
    cublaslt.gelu_linear_backward(dy, weight, a, False)
    assert given[-1] == (0.5, a.data_ptr()) and {waves for waves, _ in given} == {0.75, 0.5}


@pytest.mark.parametrize(("bytes_on", "aligned"), [(0, 256), (256, 256), (64, 64), (48, 16), (2, 2)])
def test_alignment_is_that_of_the_least_aligned(bytes_on, aligned):
    base = torch.empty(1024, dtype=torch.uint8)
    start = -base.data_ptr() % 512
    assert cublaslt.alignment(base[start:], base[start + bytes_on:]) == aligned


@pytest.mark.parametrize("total", [True, False])
def test_the_sum_over_tokens_is_computed_for_a_bias_alone(lent, monkeypatch, total):
    lent(Library((0.9, 131)))
    monkeypatch.setattr(cublaslt.Matmul, "run", lambda self, by, x, weight, aux, out: out.copy_(aux))
    a = torch.randn(2, 8, 24).bfloat16()
    da, sums = cublaslt.gelu_linear_backward(torch.randn(2, 8, 16).bfloat16(), torch.randn(16, 24).bfloat16(), a, total)
    assert torch.equal(da, a)
    torch.testing.assert_close(sums, a.float().sum((0, 1)) if total else torch.empty(0))


def test_before_hopper_and_without_the_library_nothing_is_asked(lent, monkeypatch):
    x = torch.randn(8, 16).bfloat16()
    library = lent(Library((0.9, 131)))
    assert cublaslt.suits(x) and not cublaslt.suits(torch.empty(9 * 16).bfloat16()[1:129].view(8, 16))       # 2 bytes off
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not cublaslt.suits(x) and not library.calls
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    lent(None)
    assert not cublaslt.suits(x)


def test_a_refusal_says_which_function_and_status(lent):
    library = lent(Library((0.9, 131)))
    library.refuses = "cublasLtMatmulDescCreate"
    with pytest.raises(RuntimeError, match="cublasLtMatmulDescCreate of cuBLASLt says status 7"):
        merged(6, 5, 3, torch.float16)
