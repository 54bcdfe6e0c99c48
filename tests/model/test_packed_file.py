"""The disk tier: written once, whole or absent, used again while nothing has changed, made again when damaged."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from fitune.errors import UserError
from fitune.model import packed_file
from fitune.model.build import build, fill, weights_to_read
from fitune.model.outside import open_host
from fitune.model.packed_file import identity
from fitune.model.source import resolve
from tests import tiny

DISK = dict(stream_from="disk", resident_layers=0, base_format="nf4", precision="bf16")


@pytest.fixture(scope="module")
def model():
    return tiny.reference("llama", num_hidden_layers=3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path))
    return tmp_path / "streamed"


def open_for(model, name="a", **changes):
    plan = tiny.make_plan(num_layers=3, **DISK | changes)
    built = build(model.config, plan, "cpu")
    open_host(built, plan, name)
    return built, plan


def filled(model, name="a", **changes):
    built, plan = open_for(model, name, **changes)
    fill(built, model.state_dict().items(), plan)
    return built


def content(built) -> list[bytes]:
    store = built.streamed
    found = []
    for layer, layout in store.layouts.items():
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        store.backing.read_into(layer, 0, buffer)
        found.append(b"".join(bytes(p.view(buffer).contiguous().view(-1).view(torch.uint8).numpy())
                              for p in layout.pieces))  # fmt: skip
    return found


def test_the_file_holds_what_ram_would_hold(model, cache):
    assert content(filled(model)) == content(filled(model, stream_from="pageable"))


def test_a_later_run_reads_no_layer_again(model, cache):
    first = filled(model)
    assert not first.streamed.backing.reused
    second, plan = open_for(model)
    assert second.streamed.backing.reused
    left = weights_to_read(second)
    assert left and not any(name.startswith("model.layers.") for name in left)
    fill(second, ((n, t) for n, t in model.state_dict().items() if n in left), plan)
    assert content(second) == content(first)


@pytest.mark.parametrize("change", [dict(base_format="fp4"), dict(double_quant=False), dict(resident_layers=1)])
def test_another_plan_is_another_file(model, cache, change):
    filled(model)
    built, _ = open_for(model, **change)
    assert not built.streamed.backing.reused
    assert weights_to_read(built) == set(model.state_dict())


def test_a_damaged_file_is_made_again(model, cache):
    wanted = content(filled(model))
    (path,) = cache.glob("*.bin")
    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert not open_for(model)[0].streamed.backing.reused
    assert content(filled(model)) == wanted
    assert open_for(model)[0].streamed.backing.reused


@pytest.mark.parametrize("how", ["shorter", "no checksums", "nonsense"])
def test_half_a_file_is_no_file(model, cache, how):
    filled(model)
    (path,), (side,) = cache.glob("*.bin"), cache.glob("*.json")
    if how == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "no checksums":
        side.unlink()
    else:
        side.write_text(json.dumps([1, 2]))
    assert not open_for(model)[0].streamed.backing.reused


def test_what_a_killed_run_left_is_removed(model, cache):
    """Its unfinished file is hidden and nobody locks it any more."""
    filled(model)
    left = cache / ".x.bin.fitune-tmp-0123456789ab"
    left.write_bytes(b"half")
    filled(model, name="b")
    assert not left.exists()
    assert sorted(p.suffix for p in cache.iterdir()) == [".bin", ".bin", ".json", ".json"]


def test_without_an_identity_nothing_is_left(model, cache):
    built = filled(model, name=None)
    assert content(built) == content(filled(model, stream_from="pageable"))
    del built
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_read(model, cache, monkeypatch):
    def full(folder, num_bytes, what):
        raise UserError(f"not enough disk space for {what}", f"it needs {num_bytes}", "free some")

    monkeypatch.setattr(packed_file, "need_space", full)
    with pytest.raises(UserError, match="not enough disk space for the packed layers"):
        open_for(model)


def test_a_disk_that_fills_up_meanwhile(model, cache):
    built, plan = open_for(model)

    class Full:
        def seek(self, offset):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    built.streamed.backing._file = Full()
    with pytest.raises(UserError, match=r"cannot write .*\.bin(.|\n)*the disk is full"):
        fill(built, model.state_dict().items(), plan)


def test_a_file_that_shrinks_in_use(model, cache):
    built = filled(model)
    (path,) = cache.glob("*.bin")
    path.write_bytes(b"")
    with pytest.raises(OSError, match="has become shorter while it was in use"):
        content(built)


def test_identity_follows_the_files(model, tmp_path):
    import os

    folder = tmp_path / "model"
    model.save_pretrained(folder)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    before = identity(resolve(str(folder)), cpu)
    assert identity(resolve(str(folder)), cpu) == before
    assert identity(resolve(str(folder)), cuda) != before, "another device may round otherwise when it packs"
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    assert identity(resolve(str(folder)), cpu) != before
    seeds = {identity(resolve(f"random:{folder}", seed=seed), cpu) for seed in (0, 1)}
    assert len(seeds) == 2
