"""Instance prices load, point at cards of the catalog, and sort by price; a person's own table is read or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitune.catalog import clouds, gpus
from fitune.errors import UserError

STATUSES = {"verified", "partly verified", "secondary", "recalled", "doubtful"}


def test_every_instance_points_at_a_card_and_names_status_source_and_date():
    instances = clouds.all_instances()
    assert len(instances) == 113 + 6  # clouds.csv, clouds_more.csv
    for offer in instances:
        assert offer.gpu in gpus.all_gpus()
        assert offer.status in STATUSES and offer.source and offer.date
        assert offer.num_gpus >= 1
        free = offer.usd_per_hour == 0 and "free" in offer.note
        assert offer.usd_per_hour is None or free or 0.01 < offer.usd_per_hour / offer.num_gpus < 20


def test_offers_are_cheapest_first_and_filtered():
    offers = clouds.offers("h100-sxm", 8)
    prices = [offer.usd_per_hour for offer in offers]
    assert len(offers) >= 4 and prices == sorted(prices)
    assert {(offer.gpu_id, offer.num_gpus) for offer in offers} == {("h100-sxm", 8)}
    assert any(offer.instance == "p5.48xlarge" and offer.usd_per_hour == 55.04 for offer in offers)


def test_an_offer_without_a_price_is_kept_but_not_offered():
    without = [offer for offer in clouds.all_instances() if offer.usd_per_hour is None]
    assert [offer.provider for offer in without] == ["Tencent Cloud", "Crusoe"]
    assert not set(without) & set(clouds.offers())


def test_host_memory_that_only_repeats_the_gpu_memory_is_unknown():
    for offer in clouds.all_instances():
        if "repeats the GPU memory" in offer.note:
            assert offer.host_ram_gib is None and offer.provider in ("RunPod", "Paperspace")
    assert any("repeats the GPU memory" in offer.note for offer in clouds.all_instances())


def test_recalled_converted_and_old_prices_are_not_firm():
    by_provider = {}
    for offer in clouds.all_instances():
        by_provider.setdefault(offer.provider, []).append(offer)
    assert all(offer.firm for offer in by_provider["Vast.ai"])
    for provider in ("Azure", "AutoDL", "Alibaba Cloud", "Tencent Cloud", "Huawei Cloud", "Kaggle"):
        assert not any(offer.firm for offer in by_provider[provider]), provider
    paid = [offer for offer in by_provider["Colab"] if offer.usd_per_hour]
    assert paid and all(offer.status == "verified" and not offer.firm for offer in paid)
    assert {offer.year for offer in paid} == {2022}


# ---- a person's own table --------------------------------------------------------------------------------------------


def own(folder: Path, text: str) -> Path:
    path = folder / "prices.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_own_table(tmp_path: Path):
    text = "gpu,CNY_per_hour,provider,num_gpus,cny_per_hour_spot\n4090,1.98,AutoDL,,\n\nRTX 3090,2.4,,2,1.2\n"
    table = clouds.read_prices(own(tmp_path, text))
    assert (table.currency, table.symbol, table.is_own, table.name) == ("CNY", "¥", True, "prices.csv")
    first, second = table.offers
    assert (first.gpu_id, first.num_gpus, first.usd_per_hour, first.provider) == ("rtx-4090", 1, 1.98, "AutoDL")
    assert (second.gpu_id, second.num_gpus, second.usd_per_hour_spot, second.provider) == ("rtx-3090", 2, 1.2, "you")
    assert first.firm


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column gpu"),
        ("gpu,price\n4090,1\n", "no column usd_per_hour"),
        ("usd_per_hour\n1\n", "no column gpu"),
        ("gpu,usd_per_hour,cny_per_hour\n4090,1,7\n", "several currencies"),
        ("gpu,usd_per_hour,colour\n4090,1,red\n", "unknown column 'colour'"),
        ("gpu,usd_per_hour\n", "no line besides the columns' names"),
        ("gpu,usd_per_hour\n4090,1\nrtx9999,1\n", "line 3\n  why: unknown GPU 'rtx9999'"),
        ("gpu,usd_per_hour\n4090,cheap\n", "line 2\n  why: usd_per_hour is 'cheap', not a price"),
        ("gpu,usd_per_hour\n4090,-1\n", "line 2\n  why: usd_per_hour is '-1', not a price"),
        ("gpu,usd_per_hour\n4090,nan\n", "line 2\n  why: usd_per_hour is 'nan', not a price"),
        ("gpu,usd_per_hour\n4090,\n", "line 2\n  why: there is no price"),
        ("gpu,usd_per_hour,num_gpus\n4090,1,1.5\n", "num_gpus is '1.5', not a whole number"),
        ("gpu,usd_per_hour,num_gpus\n4090,1,0\n", "num_gpus is 0"),
        ("gpu,usd_per_hour\n4090\n", "line 2 has fewer values"),
        ("gpu,usd_per_hour\n4090,1,2\n", "line 2 has more values"),
        ('gpu,usd_per_hour\n"4090,1\n', "it is not CSV"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_broken_table_names_the_line(tmp_path: Path, text: str, said: str):
    with pytest.raises(UserError) as caught:
        clouds.read_prices(own(tmp_path, text))
    assert said in str(caught.value) and caught.value.fix and caught.value.exit_code == 2


def test_table_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(UserError, match="the file does not exist"):
        clouds.read_prices(tmp_path / "none.csv")
    (tmp_path / "wide.csv").write_bytes("gpu,usd_per_hour\n".encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8"):
        clouds.read_prices(tmp_path / "wide.csv")
    with pytest.raises(UserError, match="cannot read the price table"):
        clouds.read_prices(tmp_path)
