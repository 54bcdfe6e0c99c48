"""Steps, rows, packing: nothing lost, nothing repeated, nothing crossing from one record to the next."""

from __future__ import annotations

import numpy as np
import pytest

from fitune.data.batches import StepStream, packing_gain, plan_epoch, step_batches
from fitune.data.records import Record

PAD = 99


def make(lengths, seed=0):
    rng = np.random.default_rng(seed)
    records = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, 90, length).astype(np.int32)
        labels = np.where(rng.random(length) < 0.6, ids, -100).astype(np.int32)
        records.append(Record(i + 100, ids, labels))
    return records


RECORDS = make(np.random.default_rng(1).integers(2, 60, 53))


def targets_of(batches):
    """record -> position -> (token, target), from wherever it stands in the batches."""
    found = {}
    for batch in batches:
        for b, t in zip(*np.nonzero(batch.record_ids >= 0), strict=True):
            key = (int(batch.record_ids[b, t]), int(batch.position_ids[b, t]))
            assert key not in found, "no token twice"
            found[key] = (int(batch.input_ids[b, t]), int(batch.targets[b, t]))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_every_token_once_with_the_next_label_of_its_own_record(packing):
    batches = step_batches(RECORDS, micro_batch=4, packing=packing, seq_len=64, pad_id=PAD)
    found = targets_of(batches)
    expected = {}
    for record in RECORDS:
        shifted = [*record.labels[1:].tolist(), -100]
        for t, (token, target) in enumerate(zip(record.input_ids.tolist(), shifted, strict=True)):
            expected[record.index, t] = (token, target)
    assert found == expected
    assert sum(b.num_tokens for b in batches) == sum(map(len, RECORDS))
    assert sum(b.num_targets for b in batches) == sum(r.num_targets for r in RECORDS)


@pytest.mark.parametrize("packing", [False, True])
def test_padding_and_documents(packing):
    for batch in step_batches(RECORDS, micro_batch=4, packing=packing, seq_len=64, pad_id=PAD, pad_multiple=8):
        assert batch.input_ids.dtype == batch.targets.dtype == batch.position_ids.dtype == np.int64
        rows, width = batch.input_ids.shape
        assert rows <= 4 and width % 8 == 0 and width - 8 < max(map(sum, batch.doc_lengths)) <= 64
        for b, lengths in enumerate(batch.doc_lengths):
            end = sum(lengths)
            assert (batch.input_ids[b, end:] == PAD).all() and (batch.targets[b, end:] == -100).all()
            assert (batch.record_ids[b, end:] == -1).all() and (batch.position_ids[b, end:] == 0).all()
            assert batch.position_ids[b, :end].tolist() == [t for n in lengths for t in range(n)]
            assert len(lengths) == 1 or packing
    assert len(batch.doc_lengths), "there was a batch to look at"


def test_packing_takes_fewer_rows_and_the_longest_micro_batch_comes_first():
    plain = step_batches(RECORDS, micro_batch=1, packing=False, seq_len=64, pad_id=PAD)
    packed = step_batches(RECORDS, micro_batch=1, packing=True, seq_len=64, pad_id=PAD)
    assert len(plain) == 53 and len(packed) <= -(-sum(map(len, RECORDS)) // 64) + 3
    for batches in (plain, packed):
        widths = [batch.input_ids.shape[1] for batch in batches]
        assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 8, 53, 100])
def test_an_epoch_holds_every_record_once_and_the_longest_first(batch, group):
    for epoch in (0, 1):
        steps = plan_epoch(RECORDS, batch, seed=3, epoch=epoch, group_by_length=group)
        assert sorted(i for step in steps for i in step) == list(range(53))
        assert [len(s) for s in steps[:-1]] == [batch] * (len(steps) - 1) and len(steps) == -(-53 // batch)
    longest = sorted((len(r) for r in RECORDS), reverse=True)[:batch]
    first = plan_epoch(RECORDS, batch, 3, 0, group)[0]
    assert sorted((len(RECORDS[i]) for i in first), reverse=True) == longest


def test_the_order_is_a_function_of_seed_and_epoch():
    assert plan_epoch(RECORDS, 4, 3, 1) == plan_epoch(RECORDS, 4, 3, 1)
    assert plan_epoch(RECORDS, 4, 3, 1) != plan_epoch(RECORDS, 4, 3, 2) != plan_epoch(RECORDS, 4, 4, 2)


def test_grouping_pads_less():
    records = make(np.random.default_rng(2).integers(2, 500, 800))

    def padded(group):
        steps = plan_epoch(records, 8, 0, 1, group)
        return sum(len(s) * max(len(records[i]) for i in s) for s in steps)

    assert padded(True) < 0.7 * padded(False)


def test_the_stream_is_random_access_over_epochs():
    stream = StepStream(RECORDS, batch=8, seed=5)
    assert stream.steps_per_epoch == 7
    in_order = [stream[step] for step in range(21)]
    fresh = StepStream(RECORDS, batch=8, seed=5)
    assert [fresh[step] for step in reversed(range(21))] == in_order[::-1]
    assert [epoch for epoch, _ in in_order] == [0] * 7 + [1] * 7 + [2] * 7
    with pytest.raises(IndexError):
        stream[-1]


def test_packing_gain_counts_padding():
    assert packing_gain(make([64] * 16), 8, 64) == 1.0
    assert packing_gain(make([64, 8, 8, 8, 8, 8, 8, 16]), 8, 64) == pytest.approx(8 * 64 / 128)
    assert 1 <= packing_gain(RECORDS, 8, 64, micro_batch=1) <= 1.05, "rows of one record have no padding to save"
