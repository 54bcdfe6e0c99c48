"""Counter dropout: its share, its independence, and that a mask depends on the counter and on nothing else."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from fitune.memory.follow import Follower
from fitune.model import dropout

FEATURES = 256


def keys(records=4, positions=64, *, seed=0, step=0, first_record=0, first_position=0):
    ids = torch.arange(records)[:, None] + first_record
    at = torch.arange(positions)[None] + first_position
    return dropout.token_keys(ids.expand(records, positions), at.expand(records, positions), seed, step)


def mask(p=0.5, module=1, features=FEATURES, **counter):
    """True where an element is kept, [tokens, features]."""
    k = keys(**counter)
    return dropout.apply(torch.ones(len(k), features), p, k, dropout.scramble_int(module)) > 0


def agreement_z(a, b):
    """How many standard deviations the share of equal bits of two masks of p = 0.5 is from one half."""
    return abs((a == b).double().mean().item() - 0.5) * 2 * a.numel() ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.5, 0.9])
def test_share_of_zeros_overall_per_token_and_per_feature(p):
    kept = mask(p, records=16, positions=64).double()
    tokens = kept.shape[0]
    assert abs(kept.mean().item() - (1 - p)) < 4.5 * (p * (1 - p) / kept.numel()) ** 0.5
    for axis, count in ((0, tokens), (1, FEATURES)):
        deviation = (kept.mean(axis) - (1 - p)) / (p * (1 - p) / count) ** 0.5
        assert 0.75 < deviation.square().mean().item() < 1.3, "sums along an axis vary as independent bits do"
        assert deviation.abs().max() < 6


def test_expectation_is_kept():
    k = keys(16)
    x = torch.ones(len(k), FEATURES)
    got = dropout.apply(x, 0.3, k, 5)
    assert got.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert got.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "other",
    [dict(seed=1), dict(step=1), dict(step=1000), dict(first_record=1), dict(first_record=4), dict(first_position=1),
     dict(module=2), dict(module=3)],
    ids=str,
)  # fmt: skip
def test_masks_of_other_counters_are_independent(other):
    """Also where counters overlap but for a shift by one record or position: the same row must not come back."""
    assert agreement_z(mask(), mask(**other)) < 4.5


def test_masks_are_independent_between_neighbours():
    """Of tokens, of features, and along both at once."""
    bits = mask(records=8)
    for shifted in (bits[1:] == bits[:-1], bits[:, 1:] == bits[:, :-1], bits[1:, 1:] == bits[:-1, :-1]):
        assert agreement_z(shifted, torch.ones_like(shifted)) < 4.5
    # three-way parity, which a linear generator would get wrong
    parity = bits[2:] ^ bits[1:-1] ^ bits[:-2]
    assert agreement_z(parity, torch.ones_like(parity)) < 4.5


def test_pairs_of_bits_are_uniform():
    """Chi-square with 15 degrees of freedom over four neighbouring features."""
    bits = mask(records=16).view(-1, FEATURES // 4, 4).long()
    code = (bits * torch.tensor([1, 2, 4, 8])).sum(-1).flatten()
    counts = torch.bincount(code, minlength=16).double()
    expected = len(code) / 16
    assert ((counts - expected) ** 2 / expected).sum().item() < 44, "p = 0.0001"


def test_hash_of_one_integer_is_that_of_a_tensor():
    values = [0, 1, 2, 12345, 2**31 - 1, -1, -(2**31)]
    got = dropout._scramble(torch.tensor(values, dtype=torch.int32)).tolist()
    assert got == [dropout.scramble_int(v) for v in values]
    # what the published C function gives for 1, 2, 12345 and 2^32 - 1
    assert [dropout.scramble_int(v) & 0xFFFFFFFF for v in (1, 2, 12345, -1)] == [
        1753845952, 3507691905, 2435775735, 1734902346,
    ]  # fmt: skip


def test_keys_follow_record_and_position_not_the_place_in_the_batch():
    whole = keys(records=4, positions=64).view(4, 64)
    assert torch.equal(keys(records=2, positions=64, first_record=2).view(2, 64), whole[2:])
    assert torch.equal(keys(records=4, positions=10, first_position=5).view(4, 10), whole[:, 5:15])
    assert len(whole.unique()) == whole.numel()
    assert whole.dtype == torch.int32


def test_masks_do_not_depend_on_chunks(monkeypatch):
    whole = mask(records=4)
    monkeypatch.setattr(dropout, "_CHUNK_ELEMENTS", FEATURES * 7)  # 256 tokens in chunks of 7: the last has 4
    assert torch.equal(mask(records=4), whole)
    monkeypatch.setattr(dropout, "_CHUNK_ELEMENTS", FEATURES - 1)  # wider than a chunk: a row at a time
    assert torch.equal(mask(records=4), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masks_do_not_depend_on_values_or_dtype(dtype):
    k = keys()
    x = torch.randn(len(k), FEATURES).to(dtype)
    got = dropout.apply(x, 0.5, k, dropout.scramble_int(1))
    assert got.dtype == dtype
    assert torch.equal(got, torch.where(mask(), x * 2, 0))


def test_backward_mask_is_the_forward_mask():
    """`apply` is linear and symmetric: <apply(x), g> = <x, apply(g)>."""
    k = keys()
    torch.manual_seed(0)  # a sum close to zero would be off by more than allclose lets pass
    x, g = torch.randn(len(k), FEATURES).double(), torch.randn(len(k), FEATURES).double()
    left, right = ((a * b).sum() for a, b in ((dropout.apply(x, 0.3, k, 9), g), (x, dropout.apply(g, 0.3, k, 9))))
    assert torch.allclose(left, right)
    assert torch.equal(dropout.apply(x, 0.3, k, 9) == 0, dropout.apply(g, 0.3, k, 9) == 0)


def test_runs_on_meta():
    k = torch.empty(10, dtype=torch.int32, device="meta")
    assert dropout.apply(torch.empty(10, 8, device="meta"), 0.1, k, 1).shape == (10, 8)


def test_on_meta_a_gpu_plan_makes_the_result_alone():
    """The kernel has no temporaries; the plain way has hashes."""
    k, x = torch.empty(10, dtype=torch.int32, device="meta"), torch.empty(10, 8, device="meta")
    for on_cuda, least, most in ((True, 1, 1), (False, 3, 99)):
        with Follower("meta") as follower:
            dropout.apply(x, 0.1, k, 1, on_cuda=on_cuda)
        assert least <= sum(event > 0 for event in follower.events) <= most


class TritonError(Exception):
    """As Triton's own: no RuntimeError."""


def fails(*arguments):
    raise TritonError("PTXAS error: sm_999 is not defined")


@pytest.mark.parametrize(
    ("launch", "why"), [(fails, "PTXAS error: sm_999"), (lambda kernel, x, *others: x, "not what plain torch gives")]
)
def test_a_kernel_that_cannot_be_used_is_left_out_and_said(launch, why, monkeypatch, caplog):
    for name, value in (("triton.errors", dict(TritonError=TritonError)),
                        ("fitune.model.dropout_kernel", dict(dropout_kernel=None))):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**value))
    monkeypatch.setattr(dropout, "_launch", launch)
    assert dropout._fused.__wrapped__(torch.device("cpu")) is None
    (said,) = caplog.messages
    assert said.startswith("LoRA dropout runs without its Triton kernel, which is slower: ") and why in said


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (7, 14336), (5, 100), (3, 1), (0, 8)], ids=str)
def test_the_kernel_gives_what_plain_torch_gives(dtype, shape):
    device = torch.device("cuda", 0)
    assert dropout._fused(device) is not None, "Triton is here with any CUDA build for Linux"
    k = keys(records=1, positions=shape[0]).to(device)
    x = torch.randn(shape[1], shape[0], device=device).to(dtype).t()  # not contiguous
    for each in (x, x.contiguous()):
        for p, module in ((0.05, 3), (0.5, 12345)):
            key = dropout.scramble_int(module)
            assert torch.equal(dropout.apply(each, p, k, key), dropout._plain(each, p, k, key))
