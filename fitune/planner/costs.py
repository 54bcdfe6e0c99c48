"""Prices times hours: what a job costs at each offer, the order of the answer, and when buying beats renting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.catalog.clouds import Instance

if TYPE_CHECKING:
    from fitune.planner.advise import CardAdvice

ORDER = (
    "within the limits first; of these those with a firm price by what the job costs there, then those whose prices "
    "are all doubtful by what it would cost, then those without a price by hours"
)


@dataclass(frozen=True)
class Rental:
    """The job at one offer. Amounts are (low, expected, high), as the hours are; None: no such price."""

    offer: Instance
    hours: tuple[float, float, float]

    @property
    def per_hour(self) -> float | None:
        return self.offer.usd_per_hour

    @property
    def cost(self) -> tuple[float, float, float] | None:
        return _times(self.hours, self.offer.usd_per_hour)

    @property
    def cost_spot(self) -> tuple[float, float, float] | None:
        return _times(self.hours, self.offer.usd_per_hour_spot)

    @property
    def lowest(self) -> float | None:
        """Expected cost on demand; at the spot price where there is no other."""
        amounts = self.cost or self.cost_spot
        return amounts[1] if amounts else None

    @property
    def firm(self) -> bool:
        return self.offer.firm

    def as_dict(self) -> dict[str, Any]:
        offer = self.offer
        return {
            "provider": offer.provider, "instance": offer.instance, "region": offer.region,
            "per_hour": offer.usd_per_hour, "per_hour_spot": offer.usd_per_hour_spot,
            "cost": list(self.cost) if self.cost else None,
            "cost_spot": list(self.cost_spot) if self.cost_spot else None, "firm": self.firm, "status": offer.status,
            "date": offer.date, "source": offer.source, "note": offer.note,
        }  # fmt: skip


def _times(hours: tuple[float, float, float], price: float | None) -> tuple[float, float, float] | None:
    return None if price is None else (hours[0] * price, hours[1] * price, hours[2] * price)


def rentals(offers: Iterable[Instance], hours: tuple[float, float, float]) -> tuple[Rental, ...]:
    """Offers for so many hours: firm ones first, the cheapest first; those without any price last."""
    made = [Rental(offer, hours) for offer in offers]
    return tuple(sorted(made, key=lambda r: (r.lowest is None, not r.firm, r.lowest or 0.0, r.offer.provider)))


def break_even_hours(price: float | None, priced: Sequence[Rental]) -> float | None:
    """Hours of renting at the lowest firm price that cost as much as buying. Leaves out electricity, the rest of the
    computer, and what the card can be sold for later."""
    rates = [r.per_hour for r in priced if r.firm and r.per_hour]
    return price / min(rates) if price and rates else None


def within(card: CardAdvice, max_cost: float | None, max_hours: float | None) -> bool:
    """Whether a card keeps to the limits as expected. Where nothing is known of its price it does not keep to a limit
    of cost, unless one can own it for nothing."""
    assert card.hours is not None
    if max_hours is not None and card.hours[1] > max_hours:
        return False
    if max_cost is None:
        return True
    amounts = [r.lowest for r in card.rentals if r.lowest is not None]
    return bool(amounts) and min(amounts) <= max_cost


def order(cards: Sequence[CardAdvice], max_cost: float | None, max_hours: float | None) -> tuple[list[CardAdvice], int]:
    """Cards by the rule of `ORDER`, and how many of them are within the limits."""

    def rank(card: CardAdvice) -> tuple[Any, ...]:
        assert card.hours is not None
        best = card.best
        known = best is not None and best.lowest is not None
        cost = best.lowest if best is not None and best.lowest is not None else 0.0
        group = 2 if not known else 0 if best is not None and best.firm else 1
        return (not within(card, max_cost, max_hours), group, cost, card.hours[1], card.gpu.name, card.num_gpus)

    ordered = sorted(cards, key=rank)
    return ordered, sum(within(card, max_cost, max_hours) for card in cards)


def picks(cards: Sequence[CardAdvice]) -> dict[str, CardAdvice]:
    """The few that answer the question: `cheapest` and `fastest` to rent at a firm price, and `own`, the least
    expensive card to buy. Of kinds that fitune was never run on (AMD, boards) none. `cards` are in the order of
    `order`."""
    found: dict[str, CardAdvice] = {}
    cards = [c for c in cards if c.gpu.vendor == "NVIDIA" and c.gpu.memory_kind != "shared"]
    priced = [c for c in cards if c.best is not None and c.best.firm and c.best.lowest is not None]
    if priced:
        found["cheapest"] = priced[0]
        found["fastest"] = min(priced, key=lambda c: c.hours[1] if c.hours else 0.0)
    sold = [c for c in cards if c.buy_price is not None and c.num_gpus == 1 and not c.gpu.doubt]
    if sold:
        found["own"] = min(sold, key=lambda c: (c.buy_price or 0.0, c.hours[1] if c.hours else 0.0))
    return found
