"""Base formats: how much they lose, that they are bitsandbytes', and that `meta` knows what they hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fitune.model import formats, native_unpack
from fitune.model.formats import Packed, Scratch, bytes_per_parameter, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# 17 x 10 is no whole block, 5 x 13 has an odd count, 3 x 40 x 96 is fused experts, 300 x 64 more than 256 blocks
SHAPES = [(32, 64), (17, 10), (5, 13), (3, 40, 96), (300, 64), (64,)]
QUANTISED = [("int8", True), ("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]
DENSE = [("fp32", True), ("bf16", True), ("fp16", True)]
ids = [f"{name}{'' if double else ', plain scales'}" for name, double in [*DENSE, *QUANTISED]]


def normal(shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def relative_rms(got, weight):
    return ((got.double() - weight.double()).square().mean() / weight.double().square().mean()).sqrt().item()


@pytest.mark.parametrize(("format", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)])
def test_dense_formats_are_the_rounded_weight_itself(format, dtype):
    weight = normal((12, 20))
    packed = pack(weight.t(), format)  # a transposed view is stored contiguously
    assert torch.equal(unpack(packed, dtype), weight.t().to(dtype))
    assert unpack(packed, dtype).data_ptr() == packed.tensors["weight"].data_ptr(), "no temporary where none is needed"
    assert unpack(packed, torch.float32).dtype == torch.float32
    assert packed.num_bytes() == 240 * dtype.itemsize == 240 * bytes_per_parameter(format, True)


@pytest.mark.parametrize("shape", [(64, 256), (3, 40, 96), (5, 13)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_within_half_a_step_of_each_row(shape, dtype):
    weight = normal(shape, dtype)
    weight.view(-1, shape[-1])[1] = 0  # a row of zeros has no scale
    weight.view(-1, shape[-1])[2] *= 1000  # a row of outliers does not disturb the others
    got = unpack(pack(weight, "int8"), torch.float32)
    assert got.shape == weight.shape
    step = weight.float().abs().amax(-1, keepdim=True) / 127
    assert ((got - weight.float()).abs() <= step * 0.5001).all()
    assert (got.view(-1, shape[-1])[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_is_rounded_to_the_compute_dtype_once(dtype):
    packed = pack(normal((64, 256)), "int8")
    assert torch.equal(unpack(packed, dtype), unpack(packed, torch.float32).to(dtype))


@pytest.mark.parametrize(
    ("format", "double_quant", "low", "high"),
    # Normal weights in blocks of 64: NF4 loses about 9 % of their root mean square, FP4 about 12 %; quantising the
    # scales to 8 bits adds little; int8 by rows of 512 about 0.9 %.
    [
        ("nf4", False, 0.08, 0.10), ("nf4", True, 0.08, 0.105),
        ("fp4", False, 0.10, 0.14), ("fp4", True, 0.10, 0.145),
        ("int8", True, 0.004, 0.012),
    ],
)  # fmt: skip
def test_error_of_normal_weights(format, double_quant, low, high):
    weight = normal((256, 512))
    assert low < relative_rms(unpack(pack(weight, format, double_quant), torch.float32), weight) < high


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_4bit_value_is_within_half_the_widest_gap_of_its_block(shape, dtype):
    """Whatever the shape: rows need not be whole blocks (bitsandbytes' own CPU kernel reads wrong scales then)."""
    weight = normal(shape, dtype)
    blocks = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scale = blocks.abs().amax(1).repeat_interleave(64)[: weight.numel()].view(shape)
    for format, gap in (("nf4", 0.304), ("fp4", 1 / 3)):  # widest distance between neighbouring code values
        error = (unpack(pack(weight, format, False), torch.float32) - weight.float()).abs()
        assert (error <= scale * gap / 2 * 1.01).all(), format


def test_bitsandbytes_cpu_kernel_still_needs_whole_blocks():
    """Once this fails, `unpack` may hand the weight's own shape to bitsandbytes again."""
    import bitsandbytes.functional as bnb

    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("bitsandbytes has a kernel for processors with AVX-512")
    weight = normal((40, 96))
    codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    assert (bnb.dequantize_4bit(codes, state) - weight).abs().max() > 0.25 * weight.abs().max()  # right: below 0.16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_4bit_is_what_bitsandbytes_gives(format, double_quant, shape):
    import bitsandbytes.functional as bnb

    for dtype in DTYPES:
        weight = normal(shape, dtype)
        codes, state = bnb.quantize_4bit(
            weight, blocksize=64, compress_statistics=double_quant, quant_type=format, quant_storage=torch.uint8
        )
        packed = pack(weight, format, double_quant)
        assert torch.equal(packed.tensors["codes"], codes)
        if weight.shape[-1] % 64:  # see the test of its CPU kernel
            state.shape = torch.Size([weight.numel()])
        assert torch.equal(unpack(packed, dtype), bnb.dequantize_4bit(codes, state).view(shape)), dtype


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_weight_packed_in_pieces_is_packed_as_a_whole(double_quant, monkeypatch):
    weight = torch.randn(37, 65)
    whole = pack(weight, "nf4", double_quant)
    monkeypatch.setattr("fitune.model.formats._CPU_ELEMENTS", 128)
    parts = pack(weight, "nf4", double_quant)
    assert all(torch.equal(parts.tensors[key], tensor) for key, tensor in whole.tensors.items())


def test_unpacking_twice_gives_the_same():
    """The doubly quantised scales are added to in place; that must be a temporary."""
    packed = pack(normal((300, 64)), "nf4", True)
    assert torch.equal(unpack(packed, torch.float32), unpack(packed, torch.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("format", "double_quant"), [*DENSE, *QUANTISED], ids=ids)
def test_meta_packing_has_the_same_tensors(format, double_quant, shape):
    real = pack(normal(shape), format, double_quant)
    abstract = pack(torch.empty(shape, device="meta"), format, double_quant)
    describe = lambda p: {k: (tuple(t.shape), t.dtype) for k, t in p.tensors.items()}  # noqa: E731
    assert describe(abstract) == describe(real)
    assert all(t.device.type == "meta" for t in abstract.tensors.values())
    assert abstract.num_bytes() == real.num_bytes()
    for dtype in DTYPES:
        wide = unpack(abstract, dtype)
        assert (tuple(wide.shape), wide.dtype, wide.device.type) == (shape, dtype, "meta")


@pytest.mark.parametrize(("format", "double_quant"), [*DENSE, *QUANTISED], ids=ids)
def test_bytes_per_parameter(format, double_quant):
    """Within 0.1 % of what a layer of an 8B model holds."""
    held = pack(torch.empty(14336, 4096, device="meta"), format, double_quant).num_bytes() / (14336 * 4096)
    assert bytes_per_parameter(format, double_quant) == pytest.approx(held, rel=1e-3)


def test_moving_keeps_everything():
    packed = pack(normal((32, 64)), "nf4", True)
    there = packed.to("meta")
    assert isinstance(there, Packed) and (there.format, there.shape) == ("nf4", (32, 64))
    assert there.num_bytes() == packed.num_bytes()
    assert {t.device.type for t in there.tensors.values()} == {"meta"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unknown_format(device):
    with pytest.raises(ValueError, match="unknown base format 'int3'"):
        pack(torch.empty(4, 64, device=device), "int3")


def test_no_nan_or_infinity_is_made_of_a_constant_weight():
    for format, double_quant in QUANTISED:
        for value in (0.0, 3.0):
            got = unpack(formats.pack(torch.full((8, 64), value), format, double_quant), torch.float32)
            assert torch.isfinite(got).all() and (got - value).abs().max() < 0.02, (format, value)


def test_a_scratch_makes_each_view_once():
    scratch = Scratch(64, "cpu")
    first = scratch.take((4, 8), torch.bfloat16)
    assert scratch.take((4, 8), torch.bfloat16) is first
    assert scratch.take((8, 4), torch.bfloat16).shape == (8, 4) and scratch.take((4, 4), torch.float32).numel() == 16
    assert all(t.data_ptr() == scratch.buffer.data_ptr() for t in (first, scratch.take((2, 8), torch.float32)))
    beside = scratch.take((5, 8), torch.bfloat16)
    assert beside.data_ptr() != scratch.buffer.data_ptr() and scratch.take((5, 8), torch.bfloat16) is not beside
    for length in range(200):  # chunks of any length: they are not all remembered
        scratch.take((length % 64,), torch.uint8)
        scratch.take((length % 16,), torch.float32)
    assert len(scratch._views) <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_unpacked_by_the_library_itself_as_by_its_operators(monkeypatch, format, double_quant, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    for shape in ((512, 1024), (3, 100, 65), (7, 33)):
        made = pack(torch.randn(shape, device="cuda"), format, double_quant)
        assert native_unpack.fits(made.tensors["codes"], made.tensors["absmax"])
        scratch = Scratch(4 * made.tensors["codes"].numel() * 2, "cuda")
        direct = [unpack(made, dtype), unpack(made, dtype, scratch).clone()]
        with monkeypatch.context() as patched:
            patched.setattr(native_unpack, "fits", lambda *_: False)
            expected = unpack(made, dtype)
        assert all(torch.equal(found, expected) and found.shape == shape for found in direct), shape
        other = Packed(format, shape, made.tensors | {"codes": made.tensors["codes"].repeat(1, 2)[:, :1]})
        assert not native_unpack.fits(other.tensors["codes"], other.tensors["absmax"])
        assert torch.equal(unpack(other, dtype), expected)


def test_without_cuda_the_operators_unpack():
    made = pack(torch.randn(64, 64), "nf4")
    assert not native_unpack.fits(made.tensors["codes"], made.tensors["absmax"])


def test_a_library_that_declares_other_arguments_is_not_called(monkeypatch):
    from bitsandbytes import cextension

    class Library:
        def __init__(self, argtypes):
            self.argtypes = argtypes

        def __getattr__(self, name):
            assert name.startswith("cdequantize_blockwise_")
            return SimpleNamespace(argtypes=self.argtypes)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(native_unpack, "_PROTOTYPE", lambda named: named[0])
    expected = native_unpack._ARGUMENTS
    for argtypes, known in ((None, True), (tuple(expected), True), (expected[1:], False)):
        monkeypatch.setattr(cextension, "lib", SimpleNamespace(_lib=Library(argtypes)))
        found = native_unpack.kernels.__wrapped__()
        assert (found is not None) == known
    monkeypatch.setattr(cextension, "lib", SimpleNamespace(_lib=lambda: None))  # of a library that could not be loaded
    assert native_unpack.kernels.__wrapped__() is None
