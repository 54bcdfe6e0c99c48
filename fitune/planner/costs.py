"""Prices times hours: what a job costs at each offer, the order of the answer, and when buying beats renting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fitune.catalog.clouds import Instance

if TYPE_CHECKING:
    from fitune.catalog.gpus import Gpu
    from fitune.plan import Plan
    from fitune.speed import StepTime

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


@dataclass(frozen=True)
class CardAdvice:
    """What a card, or several of one kind, make of the job.

    Attributes:
        num_used: cards that get records; fewer than `num_gpus` where a step has fewer records than there are cards.
        plan: of one card, with its share of the records; None where nothing fits.
        needed_bytes, budget_bytes: of one card.
        step, hours: seconds of a step, (low, expected, high) hours of the whole run; None where nothing fits.
        rentals: where such cards are to be had, cheapest for this job first.
        buy_price: of all of them when they came out, recalled; None: not sold by the card, or not known.
        break_even_hours: of use after which buying has cost less than renting at the cheapest price; None: unknown.
        notes: what a person should know of this card.
    """

    gpu: Gpu
    num_gpus: int
    num_used: int
    plan: Plan | None
    needed_bytes: int
    budget_bytes: int
    step: StepTime | None
    hours: tuple[float, float, float] | None
    rentals: tuple[Rental, ...] = ()
    buy_price: float | None = None
    break_even_hours: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def best(self) -> Rental | None:
        return self.rentals[0] if self.rentals else None

    @property
    def jobs_to_break_even(self) -> float | None:
        """Such jobs after which buying has cost less than renting."""
        return self.break_even_hours / self.hours[1] if self.break_even_hours and self.hours else None

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "gpu": self.gpu.id, "name": self.gpu.name, "num_gpus": self.num_gpus, "num_used": self.num_used,
            "fits": self.fits, "needed_bytes": self.needed_bytes, "budget_bytes": self.budget_bytes,
            "plan": plan.with_(predicted={}, reasons=()).as_dict() if plan else None,
            "step_s": self.step.step_s if self.step else None,
            "tokens_per_s": self.step.tokens_per_s if self.step else None,
            "tokens_per_s_low": self.step.tokens / self.step.high_s if self.step else None,
            "tokens_per_s_high": self.step.tokens / self.step.low_s if self.step else None,
            "basis": self.step.basis if self.step else None,
            "verified": self.step.verified if self.step else None,
            "hours_low": self.hours[0] if self.hours else None, "hours": self.hours[1] if self.hours else None,
            "hours_high": self.hours[2] if self.hours else None,
            "rentals": [rental.as_dict() for rental in self.rentals],
            "buy_price_usd": self.buy_price, "break_even_hours": self.break_even_hours,
            "break_even_jobs": self.jobs_to_break_even, "notes": list(self.notes),
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


def picks(cards: Sequence[CardAdvice], max_cost: float | None = None) -> dict[str, CardAdvice]:
    """The few that answer the question: `cheapest` and `fastest` to rent at a firm price, and `own`, the least
    expensive card to buy. Of kinds that fitune was never run on (AMD, boards) none.

    Args:
        cards: those within the limits, in the order of `order`.
        max_cost: what a job may cost. A card may keep to it by a doubtful price only, and its firm one be above it.
    """
    found: dict[str, CardAdvice] = {}
    cards = [c for c in cards if c.gpu.vendor == "NVIDIA" and c.gpu.memory_kind != "shared"]
    priced = [c for c in cards if c.best is not None and c.best.firm and c.best.lowest is not None
              and (max_cost is None or c.best.lowest <= max_cost)]  # fmt: skip
    if priced:
        found["cheapest"] = priced[0]
        found["fastest"] = min(priced, key=lambda c: c.hours[1] if c.hours else 0.0)
    sold = [c for c in cards if c.buy_price is not None and c.num_gpus == 1 and not c.gpu.doubt]
    if sold:
        found["own"] = min(sold, key=lambda c: (c.buy_price or 0.0, c.hours[1] if c.hours else 0.0))
    return found
