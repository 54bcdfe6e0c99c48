"""The advice of `fitune gpus MODEL` on the terminal: the picks in a line each, the cards, and each provider's best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fitune.cli.text import columns, short_name, wrapped
from fitune.cli.words import Words
from fitune.cli.words_gpus import GPUS
from fitune.planner.sentences import translated
from fitune.units import format_bytes, format_count, gib

if TYPE_CHECKING:
    from rich.console import Console

    from fitune.plan import Plan
    from fitune.planner.advise import Advice
    from fitune.planner.costs import CardAdvice, Rental

TOP = 10
Amounts = tuple[float, float, float]


def show_advice(console: Console, advice: Advice, lang: str = "en", top: int = TOP) -> None:
    """Prints an advice."""
    words = Words(lang, GPUS)

    def say(line: str, **style: str) -> None:
        console.print(line, markup=False, **style)  # type: ignore[arg-type]

    say(words("title", model=advice.recipe.model, method=method(advice, words)), style="bold")
    for line in head_lines(advice, words):
        say(line)
    if not advice.cards:
        for line in none_lines(advice, words):
            say(line)
        return
    say("")
    for line in pick_lines(advice, words):
        say(line)
    shown = advice.within or advice.cards
    if not advice.within:
        say(words("nothing_within"))
    say("")
    for line, style in card_lines(advice, shown[:top], words, console.width):
        say(line, style=style)
    if len(shown) > top:
        say("  " + words("more", n=len(shown) - top, all=len(shown)))
    console.print()
    limited = words("providers_limited") if advice.within and any(advice.limits.values()) else ""
    say(words("providers", limited=limited), style="bold")
    for line in provider_lines(advice, shown, words, console.width):
        say(line)
    say("")
    for line in foot_lines(advice, shown[:top], words):
        say(line)


# ---- text ------------------------------------------------------------------------------------------------------------


def method(advice: Advice, words: Words) -> str:
    """`LoRA r=16`, with what the person fixed of it."""
    recipe = advice.recipe
    if recipe.method == "full":
        return words("full")
    name = {"qlora": "QLoRA"}.get(recipe.method, "DoRA" if recipe.dora else "LoRA")
    return f"{name} r={recipe.lora_r}"


def head_lines(advice: Advice, words: Words) -> Iterator[str]:
    """The job, the limits, and what is to be known of them."""
    job, recipe = advice.job, advice.recipe
    epochs = words("epoch") if job.epochs == 1 else words("epochs", n=round(job.epochs, 2))
    if job.num_records is None:
        if job.basis == "unit":
            yield words("job_unit")
        yield words("job_tokens", tokens=format_count(job.tokens), epochs=epochs, steps=f"{job.steps:,}",
                    batch=job.batch, seq_len=recipe.seq_len)  # fmt: skip
    else:
        yield words(
            "job",
            records=f"{job.num_records:,}",
            file=words("of_file", file=_file_name(recipe.data)),
            tokens=format_count(job.tokens),
            epochs=epochs,
            steps=f"{job.steps:,}",
            batch=job.batch,
        )
        if job.basis == "estimated":
            low, high = (round(100 * (factor - 1)) for factor in job.error)
            yield words("estimated", model=recipe.model, low=f"{low:+d}", high=f"{high:+d}")
        if job.basis == "sampled":
            yield words("sampled", n=len(job.lengths))
    limits = []
    if advice.limits["max_cost"] is not None:
        limits.append(words("max_cost", cost=money(advice.limits["max_cost"], advice)))
    if advice.limits["max_hours"] is not None:
        limits.append(words("max_hours", hours=span(advice.limits["max_hours"], words)))
    if limits:
        yield words("limits", limits=words("comma").join(limits), within=advice.num_within, all=len(advice.cards))
    for note in advice.notes:
        yield words("note", note=translated(note, words.lang))


def _file_name(data: str | None) -> str:
    from pathlib import Path

    return Path(data or "").name


def pick_lines(advice: Advice, words: Words) -> Iterator[str]:
    """The few choices that answer the question, a line each."""
    found = advice.picks
    rows = []
    for name, card in found.items():
        hours = hours_text(card, words)
        if name == "own":
            even = words("pick_even", hours=long_span(card.break_even_hours, words)) if card.break_even_hours else ""
            year = words("year", year=card.gpu.launch_year) if card.gpu.launch_year else ""
            text = words("pick_own", gpus=gpus_text(card), hours=hours, price=money(card.buy_price, advice), year=year,
                         even=even)  # fmt: skip
        else:
            rental = card.best
            assert rental is not None and rental.lowest is not None
            spot = rental.offer.usd_per_hour_spot
            text = words(
                "pick_rent", gpus=gpus_text(card), provider=rental.offer.provider, hours=hours,
                cost=money(rental.lowest, advice), price=money(rental.per_hour or spot, advice),
                spot=words("and_spot", price=money(spot, advice)) if spot and rental.per_hour else "",
            )  # fmt: skip
        rows.append((words(name), text))
    return iter(columns(rows, left=(0, 1)) if rows else [])


def none_lines(advice: Advice, words: Words) -> Iterator[str]:
    """Why nothing does it, and what would."""
    yield ""
    if not advice.too_small:
        yield words("left_out", cards=", ".join(advice.left_out))
        return
    largest = advice.too_small[0]
    yield words("none", gpu=largest.gpu.name, has=format_bytes(largest.budget_bytes),
                need=format_bytes(min(card.needed_bytes for card in advice.too_small)))  # fmt: skip
    pool = pooled(advice)
    yield words("none_why", several=pool) if pool else words("none_alone")
    for entry in advice.nearest_fits:
        yield f"{words('would_fit')}: {entry['change']}"


def pooled(advice: Advice) -> str:
    """How many of the cards that are offered in numbers would hold the job between them, by plain division."""
    need = min(card.needed_bytes for card in advice.too_small)
    counts: dict[str, int] = {}
    for card in advice.too_small:
        count = -(-need // card.budget_bytes)
        offered = [offer.num_gpus for offer in advice.prices.offers if offer.gpu_id == card.gpu.id]
        if 1 < count <= max(offered, default=1):
            counts[short_name(card.gpu.name)] = count
    return ", ".join(f"{count} x {name}" for name, count in list(counts.items())[:3])


def foot_lines(advice: Advice, shown: Sequence[CardAdvice], words: Words) -> Iterator[str]:
    """What the marks mean, what is left out, where prices come from."""
    if advice.too_small:
        need = format_bytes(min(card.needed_bytes for card in advice.too_small))
        names = [short_name(card.gpu.name) for card in advice.too_small]
        rest = words("and_more", n=len(names) - 4) if len(names) > 4 else ""
        yield words("too_small", need=need, cards=", ".join(names[:4]) + rest)
    if advice.left_out:
        yield words("left_out", cards=", ".join(advice.left_out))
    if any(not rental.firm for card in advice.cards for rental in card.rentals):
        yield words("doubt_legend")
    if any(card.step and not card.step.verified for card in shown):
        yield words("speed_legend")
    rented = [rental for card in shown for rental in card.rentals]
    if any(rental.offer.usd_per_hour_spot for rental in rented):
        yield words("spot_legend")
    if any(rental.offer.usd_per_hour == 0 for card in advice.within for rental in card.rentals):
        yield words("free_legend")
    yield words("order")
    size = words("fetch", size=f"{model_gib(advice):.1f} GiB") if model_gib(advice) else ""
    yield words("setup", size=size)
    name = advice.prices.name if advice.prices.is_own else words("own_table")
    yield words("table", name=name, date=advice.prices.date or "-", currency=advice.prices.currency)


def model_gib(advice: Advice) -> float | None:
    """What is to be fetched of a model of the catalog."""
    from fitune.catalog import models

    shape = models.find(advice.recipe.model)
    return None if shape is None else gib(2 * shape.params_total)


# ---- tables ----------------------------------------------------------------------------------------------------------


def card_lines(advice: Advice, cards: Iterable[CardAdvice], words: Words, width: int) -> list[tuple[str, str]]:
    """(line, style): of each choice its figures in columns, and below them the plan in a phrase."""
    heads = tuple(words(key) for key in ("gpu", "memory", "rate", "time", "rent"))
    rows, below = [heads], [""]
    for card in cards:
        assert card.step is not None
        memory = f"{gib(card.needed_bytes):.1f} / {gib(card.budget_bytes):.1f}"
        mark = "" if card.step.verified else "~"
        best = card.best
        cost = "-"
        if best is not None and best.lowest is not None:
            cost = money(best.lowest, advice, words) + ("" if best.firm else "?")
        rows.append((gpus_text(card), memory, f"{mark}{card.step.tokens_per_s:,.0f}", hours_text(card, words), cost))
        below.append(phrase(card, advice, words))
    lines = []
    for i, (line, text) in enumerate(zip(columns(rows, left=(0,)), below, strict=True)):
        lines.append((line, "" if i else "bold"))
        lines += [(f"    {part}", "dim") for part in wrapped(text, width - 4)] if text else []
    return lines


def provider_lines(advice: Advice, cards: Sequence[CardAdvice], words: Words, width: int) -> list[str]:
    """Each provider's cheapest way to do the job: on demand, on spot, and how its price is known."""
    from rich.cells import cell_len

    heads = ("provider", "gpu", "per_hour", "this_job", "on_spot", "time", "price")
    rows = [tuple(words(key) for key in heads)]
    for card, rental in best_of_providers(cards, advice.limits["max_cost"] if advice.within else None):
        mark = "" if rental.firm else "?"
        hourly = money(rental.per_hour, advice, words) + mark if rental.per_hour is not None else "-"
        cost, spot = (money(c[1], advice, words) + mark if c else "-" for c in (rental.cost, rental.cost_spot))
        time = span(card.hours[1] if card.hours else None, words)
        rows.append((rental.offer.provider, gpus_text(card), hourly, cost, spot, time, price_text(rental, words)))
    lines = columns(rows, left=(0, 1, 6))
    if max(map(cell_len, lines)) > width:  # the time stands above, with the cards
        lines = columns([row[:5] + row[6:] for row in rows], left=(0, 1, 5))
    return lines


def best_of_providers(cards: Iterable[CardAdvice], max_cost: float | None = None) -> list[tuple[CardAdvice, Rental]]:
    """Of each provider the offer that costs least for this job (firm ones first), the cheapest provider first."""
    best: dict[str, tuple[tuple[bool, float], CardAdvice, Rental]] = {}
    for card in cards:
        for rental in card.rentals:
            if rental.lowest is None or (max_cost is not None and rental.lowest > max_cost):
                continue
            rank = (not rental.firm, rental.lowest)
            known = best.get(rental.offer.provider)
            if known is None or rank < known[0]:
                best[rental.offer.provider] = (rank, card, rental)
    return [(card, rental) for _, card, rental in sorted(best.values(), key=lambda entry: entry[0])]


# ---- cells -----------------------------------------------------------------------------------------------------------


def gpus_text(card: CardAdvice) -> str:
    return f"{card.num_gpus} x {short_name(card.gpu.name)}"


def phrase(card: CardAdvice, advice: Advice, words: Words) -> str:
    """The plan in a phrase, what buying would mean, and what else to know."""
    plan = card.plan
    assert plan is not None
    parts = [rent_phrase(card, advice, words), plan_phrase(plan, words)]
    if card.num_used > 1:
        parts.append(words("shared_batch", n=plan.batch, batch=advice.job.batch))
    if card.buy_price is not None:
        even = words("buy_even", hours=long_span(card.break_even_hours, words)) if card.break_even_hours else ""
        parts.append(words("buy", price=money(card.buy_price, advice), even=even))
    notes = [translated(note, words.lang) for note in card.notes]
    return words("semicolon").join([*parts, *notes])


def rent_phrase(card: CardAdvice, advice: Advice, words: Words) -> str:
    """`Vast.ai at $0.37 an hour`."""
    best = card.best
    if best is None or best.lowest is None:
        return words("no_price")
    if best.per_hour is None:
        return words("at_spot", provider=best.offer.provider, price=money(best.offer.usd_per_hour_spot, advice))
    mark = "" if best.firm else "?"
    return words("at", provider=best.offer.provider, price=money(best.per_hour, advice, words) + mark)


def plan_phrase(plan: Plan, words: Words) -> str:
    """`nf4, 2 rows at a time, 14 of 32 layers recomputed`."""
    parts = [plan.base_format, words("row") if plan.micro_batch == 1 else words("rows", n=plan.micro_batch)]
    streamed = len(plan.streamed_layers())
    if streamed:
        parts.append(words("streamed", n=streamed, all=plan.num_layers))
    if plan.recompute_layers == 0:
        parts.append(words("recompute_none"))
    elif plan.recompute_layers >= plan.num_layers:
        parts.append(words("recompute_all"))
    else:
        parts.append(words("recompute_some", n=plan.recompute_layers, all=plan.num_layers))
    return words("comma").join(parts)


def price_text(rental: Rental, words: Words) -> str:
    """How a price is known: `read 2026`, `recalled`, `of 2022`."""
    offer = rental.offer
    year = offer.year or ""
    return words(offer.status, year=year) if offer.firm or offer.status in ("recalled", "doubtful") else f"{year}"


def hours_text(card: CardAdvice, words: Words) -> str:
    """`2.1 h (1.4 to 3.2)`, in one unit."""
    assert card.hours is not None
    low, expected, high = card.hours
    unit, name = _unit(expected)
    return span(expected, words) + words("range", low=_number(low * unit, name), high=_number(high * unit, name))


def long_span(hours: float | None, words: Words) -> str:
    """Hours of use, never in days: 18,400 h."""
    return "-" if hours is None else words("hour", n=f"{float(f'{hours:.3g}'):,.0f}")


def span(hours: float | None, words: Words) -> str:
    """`8 min`, `2.1 h` or `3.4 days`."""
    if hours is None:
        return "-"
    unit, name = _unit(hours)
    return words(name, n=_number(hours * unit, name))


def _unit(hours: float) -> tuple[float, str]:
    """(units in an hour, its name) that read best."""
    if hours < 0.995:
        return 60.0, "minute"
    return (1.0, "hour") if hours < 72 else (1 / 24, "day")


def _number(value: float, unit: str) -> str:
    if unit == "minute":
        return f"{value:.0f}" if value >= 1 else "<1"
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def money(amount: float | None, advice: Advice, words: Words | None = None) -> str:
    """`$0.05`, `$12.40`, `$1,234`."""
    if amount is None:
        return "-"
    if amount == 0 and words is not None:
        return words("free")
    symbol = advice.prices.symbol
    return (
        f"{symbol}{amount:,.0f}" if amount >= 100 else f"{symbol}{amount:.2f}" if amount >= 0.005 else f"<{symbol}0.01"
    )
