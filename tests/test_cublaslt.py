"""The call of cuBLASLt, by a library that notes what it is asked: layouts by columns, and what is done where nothing is fast."""

import ctypes
from unittest import mock

import pytest
import torch

from course import cublaslt, gelu


class Library:
    """Notes its calls; offers algorithms with these waves and bytes of workspace, each with a status of its own."""

    def __init__(self, *offers, state=0):
        self.offers, self.state, self.calls, self.refuses, self.attributes, self.preferences = offers, state, [], "", {}, {}

    def __getattr__(self, name):
        def function(*given):
            if name == "cublasLtMatmulDescSetAttribute":
                self.attributes[given[1]] = given[2]._obj.value
            self.calls.append((name, [x.value if hasattr(x, "value") else x for x in given]))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                limit = self.preferences[1]
                fitting = [(waves, size) for waves, size in self.offers if size <= limit]
                for slot, (waves, size) in zip(given[8], fitting, strict=False):
                    slot.waves, slot.workspace, slot.state = waves, size, self.state
                given[9]._obj.value = len(fitting)
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

    def use(library):
        monkeypatch.setattr(cublaslt, "library", lambda: library)
        return library

    yield use
    cublaslt.matmul.cache_clear()


def test_the_result_of_asking_has_the_size_of_the_librarys():
    """Eight words, a size, a status, a float and four integers (cublasLt.h): whatever is off here reads another algorithm."""
    assert ctypes.sizeof(cublaslt.Found) == 96 and cublaslt.Found.workspace.offset == 64 and cublaslt.Found.waves.offset == 76


def test_a_matrix_by_rows_is_its_transpose_by_columns(lent):
    """(6, 3) times (3, 5): A is the weight, 5 x 3 by columns; B the tokens, 3 x 6; D 5 x 6."""
    library = lent(Library((0.9, 131)))
    product = cublaslt.Matmul(6, 5, 3, torch.bfloat16, 64)
    layouts = library.made("cublasLtMatrixLayoutCreate")
    assert [given[2:] for given in layouts] == [[5, 3, 5], [3, 6, 3], [5, 6, 5]] and {given[1] for given in layouts} == {14}
    assert len(product.offered) == 1
    assert [library.preferences[which] for which in (5, 6, 7, 8)] == [64] * 4       # bytes to which A, B, C and D are aligned


def test_what_a_library_offers_and_calls_unfit_is_left_out(lent):
    lent(Library((0.9, 131), state=15))                                             # CUBLAS_STATUS_NOT_SUPPORTED
    assert not cublaslt.Matmul(6, 5, 3, torch.bfloat16, 64).offered


def test_it_is_run_on_the_tensors_in_order_and_on_this_stream(lent, monkeypatch):
    """The weight is the first factor, the tokens the second; GELU' is of aux, whose rows are n numbers apart."""
    library = lent(Library((0.9, 131)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=77))
    product = cublaslt.Matmul(6, 5, 3, torch.bfloat16, 64)
    weight, x, aux, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3, 5), (6, 3), (6, 5), (6, 5)))
    product.run(product.offered[0], weight, x, aux, out)
    (_, _, _, a, _, b, _, _, c, _, d, _, _, _, size, stream), = library.made("cublasLtMatmul")
    assert (a, b, c, d) == (weight.data_ptr(), x.data_ptr(), out.data_ptr(), out.data_ptr())
    assert (size, stream) == (cublaslt.WORKSPACE, 77)
    assert library.attributes == {7: 192, 11: aux.data_ptr(), 12: 5}                # EPILOGUE: DGELU; AUX and its leading dim
    assert library.made("cublasLtMatmulDescCreate")[0][1:] == [68, 0]               # sums and scales in float32


@pytest.mark.parametrize(("offers", "waves"), [
    ([(0.9, 131), (31.0, 4)], [0.9, 31.0]), ([(31.0, 2**22)], []), ([(31.0, 2**22), (0.9, 131)], [0.9]), ([], [])])
def test_what_takes_much_workspace_is_left_out(lent, offers, waves):
    lent(Library(*offers))
    assert [by.waves for by in cublaslt.Matmul(6, 5, 3, torch.float16, 64).offered] == pytest.approx(waves)


def test_with_little_workspace_it_is_asked_again(lent):
    """As for a shape for which the library, given much, offers one algorithm that takes all of it."""
    library = lent(Library())
    cublaslt.Matmul(6, 5, 3, torch.float16, 64)
    assert len(library.made("cublasLtMatmulAlgoGetHeuristic")) == 2 and library.preferences[1] == cublaslt.WORKSPACE


@pytest.mark.parametrize("offers", [[], [(31.0, 4)]])
def test_where_nothing_fast_is_offered_the_steps_are_apart(lent, offers, monkeypatch):
    """Also what has another format, or rows that are not aligned."""
    library = lent(Library(*offers))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    dy, weight, a = torch.randn(2, 8, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(2, 8, 24).bfloat16()
    for total in (True, False):
        torch.testing.assert_close(cublaslt.gelu_linear_backward(dy, weight, a, total),
                                   gelu.gelu_linear_backward_plain(dy, weight, a, total))
    for given in ((dy.float(), weight.float(), a.float()), (dy, weight[:, :20], a[..., :20])):
        library.calls.clear()
        torch.testing.assert_close(cublaslt.gelu_linear_backward(*given, True), gelu.gelu_linear_backward_plain(*given, True))
        assert not library.calls
    assert not library.made("cublasLtMatmul")


@pytest.mark.parametrize(("bytes_on", "aligned"), [(0, 256), (256, 256), (64, 64), (48, 16), (2, 2)])
def test_alignment_is_that_of_the_least_aligned(bytes_on, aligned):
    base = torch.empty(1024, dtype=torch.uint8)
    start = -base.data_ptr() % 512
    assert cublaslt.alignment(base[start:], base[start + bytes_on:]) == aligned


@pytest.mark.parametrize("total", [True, False])
def test_the_sum_over_tokens_is_computed_for_a_bias_alone(lent, monkeypatch, total):
    lent(Library((0.9, 131)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=77))
    monkeypatch.setattr(cublaslt.Matmul, "run", lambda self, by, weight, x, aux, out: out.copy_(aux))
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
        cublaslt.Matmul(6, 5, 3, torch.float16, 64)
