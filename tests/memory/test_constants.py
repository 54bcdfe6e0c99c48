"""Memory outside the trace: every figure says how it is known, and a card's own calibration goes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitune.memory import constants
from fitune.memory.constants import BASES, BY_CAPABILITY, Figure, overheads
from fitune.units import GIB, MIB
from tests.memory.engine_then import engine_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORD, MATRIX = RESULTS / "h200-2026-11-30.json", RESULTS / "h200-matrix-2026-11-30.json"
FIGURES = [
    (key, name, getattr(entry, name)) for key, entry in BY_CAPABILITY.items() for name in ("context", "workspace")
]


def test_the_table_has_the_cards_people_have():
    assert set(BY_CAPABILITY) == {(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}


@pytest.mark.parametrize(("key", "name", "figure"), FIGURES, ids=[f"{k[0]}.{k[1]} {n}" for k, n, _ in FIGURES])
def test_a_figure_says_how_it_is_known(key, name, figure: Figure):
    assert figure.basis in BASES and len(figure.source) > 10
    assert 0 < figure.low_bytes <= figure.num_bytes <= figure.high_bytes
    if figure.basis == "measured":
        assert "H200" in figure.source and key == (9, 0)
    if figure.basis == "assumed":
        assert figure.high_bytes > figure.low_bytes + 100 * MIB, "an assumption has a wide interval"
        assert "not measured" in figure.source


def test_what_was_measured_is_what_the_record_holds():
    """The H200's context once cuBLAS is loaded stands in the record; device minus reserved of every run is within."""
    records = {record["name"]: record for record in json.loads(RECORD.read_text(encoding="utf-8"))}
    start = constants.H200_CONTEXT_AT_START_BYTES
    assert records["overheads"]["context_at_start_bytes"] == pytest.approx(start, abs=MIB)
    assert records["overheads"]["context_bytes"] == pytest.approx(start + constants.H200_CUBLAS_BYTES, abs=MIB)
    hopper = overheads("cuda", (9, 0)).context
    assert hopper.num_bytes == start + constants.H200_CUBLAS_BYTES + constants.H200_KERNELS_BYTES
    for name, record in records.items():
        if "measured" in record:
            measured = record["measured"]
            outside = measured["device_bytes"] - measured["peak_reserved_bytes"] - constants.SECOND_HANDLE_BYTES
            assert hopper.low_bytes <= outside <= hopper.high_bytes, name


def test_every_run_of_the_matrix_lies_within_too():
    hopper = overheads("cuda", (9, 0)).context
    """Where nothing was given back to the driver in between, so that both figures are of one moment."""
    runs = [r for r in json.loads(MATRIX.read_text(encoding="utf-8")) if r["measured"].get("peak_reserved_bytes")]
    records = [record for record in runs if record["measured"]["num_alloc_retries"] == 0]
    assert len(records) > 120
    for record in records:
        outside = record["measured"]["device_bytes"] - record["measured"]["peak_reserved_bytes"]
        outside -= constants.SECOND_HANDLE_BYTES
        assert hopper.low_bytes <= outside <= hopper.high_bytes, record["name"]


def test_what_pinned_memory_takes_beside_the_context():
    """Page tables and copy streams: with the 7 MiB that the context is planned above what most runs have, to 2 MiB."""
    records = json.loads((RESULTS / "plan-points.json").read_text(encoding="utf-8"))
    pinned = {r["name"]: r["predicted_before"]["pinned_bytes"] or 0 for r in records}
    assert min(pinned.values()) == 0 and max(pinned.values()) > 50 * GIB
    for record in records:
        measured = record["measured"]["phases"]["step"]
        outside = measured["device_bytes"] - measured["peak_reserved_bytes"]
        with engine_of(record):
            expected = overheads("cuda", (9, 0)).outside_bytes(pinned[record["name"]])
        assert 5 * MIB <= expected - outside <= 9 * MIB, record["name"]
    assert overheads("cpu", None).outside_bytes(GIB) == 0


def test_cublas_workspaces_are_torchs_defaults():
    """:4096:2:16:8 KiB before Hopper, 32 MiB from Hopper on, for the one thread that multiplies."""
    assert overheads("cuda", (8, 6)).workspace_bytes == (2 * 4096 + 8 * 16) * 1024
    assert overheads("cuda", (9, 0)).workspace_bytes == overheads("cuda", (12, 0)).workspace_bytes == 32 * MIB
    assert overheads("cuda", (8, 6)).workspace.basis == "documented"
    measured = json.loads((RESULTS / "calibration-h200-2026-11-30.json").read_text(encoding="utf-8"))["memory"]
    hopper = overheads("cuda", (9, 0)).workspace
    assert hopper.low_bytes <= measured["workspace_bytes"] / 2 <= hopper.high_bytes  # of two threads, as it was then


@pytest.mark.parametrize(
    ("capability", "like"),
    [
        ((8, 7), (8, 6)),
        ((9, 1), (9, 0)),
        ((10, 3), (10, 0)),
        ((11, 0), (12, 0)),
        ((12, 1), (12, 0)),
        ((13, 0), (12, 0)),
    ],
)
def test_a_capability_between_takes_its_neighbours(capability, like):
    assert overheads("cuda", capability) == BY_CAPABILITY[like]


def test_what_is_not_known_is_assumed():
    for capability in (None, (6, 1)):
        found = overheads("cuda", capability)
        assert found.context.basis == found.workspace.basis == "assumed"
        assert found.workspace_bytes == 64 * MIB


def test_the_cpu_has_none():
    found = overheads("cpu", None)
    assert (found.context_bytes, found.workspace_bytes, found.slack_bytes) == (0, 0, (0, 0))


def test_the_slack_is_wide_where_nothing_was_measured():
    less, more = overheads("cuda", (9, 0)).slack_bytes
    assert less < 32 * MIB and more < 64 * MIB
    assert overheads("cuda", (8, 6)).slack_bytes[0] > 300 * MIB


def test_a_calibration_goes_first():
    own = {"context_bytes": 500 * MIB, "workspace_bytes": 17 * MIB}
    found = overheads("cuda", (8, 6), own)
    assert (found.context_bytes, found.workspace_bytes) == (500 * MIB, 17 * MIB)
    assert found.source == "measured on this machine by fitune calibrate"
    less, more = found.slack_bytes
    assert 0 < less < 20 * MIB and 0 < more < 20 * MIB


def test_a_figure_that_was_not_calibrated_is_the_tables():
    found = overheads("cuda", (8, 6), {"workspace_bytes": 17 * MIB})
    assert found.context == BY_CAPABILITY[8, 6].context
    assert overheads("cpu", None, {"context_bytes": MIB}).context_bytes == 0
