"""Sizes as people read and type them."""

from __future__ import annotations

import pytest

from fitune.units import GIB, KIB, MIB, format_bytes, format_duration, format_rate, format_share, parse_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 KiB"),
        (17 * KIB, "17 KiB"),
        (MIB - 1, "1 MiB"),
        (312 * MIB, "312 MiB"),
        (GIB - MIB, "1023 MiB"),
        (GIB - 1, "1.00 GiB"),
        (6.65 * GIB, "6.65 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_sizes_read_best_and_never_as_1024_of_a_unit(num_bytes: float, text: str):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3900, "1 h 05 min"), (200, "3 min 20 s"), (4.2, "4.2 s"), (0.0997, "0.1 s"), (0.024, "24 ms"), (0, "0.0 s")],
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(54.06e9, "54.1 GB/s"), (0.9999e9, "1.0 GB/s"), (812e6, "812 MB/s"), (0.9999e6, "1 MB/s"), (4e5, "0.4 MB/s")],
)
def test_rates(bytes_per_s: float, text: str):
    assert format_rate(bytes_per_s) == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0.0 %"), (0.0023, "0.2 %"), (1.0, "100.0 %")])
def test_shares(share: float, text: str):
    assert format_share(share) == text


@pytest.mark.parametrize(("text", "num_bytes"), [("10", 10 * GIB), ("10GiB", 10 * GIB), ("512 MB", 512 * MIB)])
def test_sizes_as_people_type_them(text: str, num_bytes: int):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "ten", "-1", "0", "10 bytes"])
def test_what_is_no_size(text: str):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
