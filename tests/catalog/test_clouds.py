"""Instance prices load, point at cards of the catalog, and sort by price."""

from __future__ import annotations

from fitune.catalog import clouds, gpus

STATUSES = {"verified", "partly verified", "secondary", "recalled", "doubtful"}


def test_every_instance_points_at_a_card_and_names_status_source_and_date():
    instances = clouds.all_instances()
    assert len(instances) == 113
    for offer in instances:
        assert offer.gpu in gpus.all_gpus()
        assert offer.status in STATUSES and offer.source and offer.date
        assert offer.num_gpus >= 1
        assert offer.usd_per_hour is None or 0.01 < offer.usd_per_hour / offer.num_gpus < 20


def test_offers_are_cheapest_first_and_filtered():
    offers = clouds.offers("h100-sxm", 8)
    prices = [offer.usd_per_hour for offer in offers]
    assert len(offers) >= 4 and prices == sorted(prices)
    assert {(offer.gpu_id, offer.num_gpus) for offer in offers} == {("h100-sxm", 8)}
    assert any(offer.instance == "p5.48xlarge" and offer.usd_per_hour == 55.04 for offer in offers)


def test_an_offer_without_a_price_is_kept_but_not_offered():
    without = [offer for offer in clouds.all_instances() if offer.usd_per_hour is None]
    assert [offer.provider for offer in without] == ["Tencent Cloud"]
    assert not set(without) & set(clouds.offers())


def test_host_memory_that_only_repeats_the_gpu_memory_is_unknown():
    for offer in clouds.all_instances():
        if "repeats the GPU memory" in offer.note:
            assert offer.host_ram_gib is None and offer.provider in ("RunPod", "Paperspace")
    assert any("repeats the GPU memory" in offer.note for offer in clouds.all_instances())
