"""The cheapest tracer for a model and a plan: shipped with fitune, kept from an earlier time, or made now.

A step's script depends on the model's configuration and on some of a plan's fields only (its *variant*). Scripts of the
catalog's models ship for the common variants (`memory.shipped`); others are made by `memory.trace`, once per user: they
are kept in fitune's cache folder under a name that changes with the configuration, the variant, the source of whatever
a trace runs, and the versions of fitune, torch and transformers. Plain Python, until something must be traced.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitune.memory import codec, shipped, trace_cache
from fitune.memory.entry import Entry
from fitune.memory.events import Event
from fitune.memory.in_host import InHost
from fitune.memory.replay import StepTerms
from fitune.memory.script import Script
from fitune.memory.shipped import CatalogConfig
from fitune.memory.states import dims_of, terms_with_optimizer, with_optimizer
from fitune.memory.variant import BASE, compact, variant_of
from fitune.plan import Plan

TRACED_CODE = ("memory", "engine", "model")  # folders whose source a script depends on
_NAMELESS = ("transformers_version", "architectures")  # what a configuration says besides the model's shape


def tracer_for(config: Any, plan: Plan) -> Known:
    """What gives terms and events for a model and the variant of a plan.

    Args:
        config: transformers configuration, or a catalog model's (`shipped.catalog_config`).
    """
    found = shipped.find(config, plan) if isinstance(config, CatalogConfig) else None
    if found is not None and found.script is not None:
        return Known(config, plan, found)
    key = cache_key(config, plan)
    value = trace_cache.load(key)
    if value is not None:
        try:
            kept = codec.decode(Entry, value)
            shapes = kept.terms if found is None else found.terms | kept.terms
            return Known(config, plan, replace(kept, terms=shapes), key)
        except (ValueError, TypeError, KeyError, AttributeError):  # whole, but not what this version writes
            trace_cache.remove(key)
    return Known(config, plan, found, key)


class Known:
    """A tracer that traces as late as it can, with the answers of `memory.trace.Tracer`.

    What is kept is a trace with AdamW; other optimizers' state follows from the shapes of what is trained.

    Args:
        entry: what is known; None: nothing yet.
        key: of the cache entry in which to keep what is traced; None: nothing is kept.
    """

    def __init__(self, config: Any, plan: Plan, entry: Entry | None, key: str | None = None):
        self.config, self.plan, self._entry, self._key = config, plan, entry, key
        self._script = self._scripted(entry)
        self._terms: dict[str, StepTerms] = {}
        self._scripts: dict[tuple[int | None, ...], Script] = {}  # of one shape, with another optimizer than BASE
        self._tracer: Any = None

    def _scripted(self, entry: Entry | None) -> Script | None:
        if entry is None or entry.script is None:
            return None
        script = Script.from_json(entry.script)
        return script if self.plan.optimizer == BASE else with_optimizer(script, entry.dims, self.plan.optimizer)

    def terms(self, num_rows: int, num_columns: int, loss_chunk: int) -> StepTerms:
        """Terms of a step at micro-batches of [num_rows, num_columns]. Cached per shape."""
        shape = f"{num_rows},{num_columns},{loss_chunk}"
        if shape not in self._terms:
            self._terms[shape] = self._terms_at(shape, num_rows, num_columns, loss_chunk)
        return self._terms[shape]

    def _terms_at(self, name: str, *shape: int) -> StepTerms:
        if self._script is None and (self._entry is None or name not in self._entry.terms):
            source = self._source()
            if not isinstance(source, Script):
                entry = self._entry
                assert entry is not None
                self._keep(replace(entry, terms=entry.terms | {name: source.terms(*shape)}))
        if self._script is not None:
            return self._script.terms(*shape)
        assert self._entry is not None
        made = self._entry.terms[name]
        if self.plan.optimizer == BASE:
            return made
        return terms_with_optimizer(made, self._entry.dims, self.plan.optimizer, self._entry.granule)

    def script(self) -> Script:
        """The step at any shape.

        Raises:
            NotRegular: there is none (see `memory.trace.Tracer.script`).
        """
        source = self._source()
        return source if isinstance(source, Script) else source.script()

    def in_host_sizes(self) -> InHost:
        """What is trained, where its masters are in host memory (see `memory.trace.Tracer`)."""
        found: InHost = self._source().in_host_sizes()
        return found

    def script_at(
        self, num_rows: int, num_columns: int, loss_chunk: int, together: int | None = None, keeps: bool = True
    ) -> Script:
        """The step at one shape: the script for every shape where there is one, else a trace of this shape.

        Args:
            together: micro-batches that pass each layer before the next; None: the plan's.
            keeps: see `memory.trace.Tracer.script_at`.
        """
        source = self._source()
        if isinstance(source, Script):
            return source
        assert self._entry is not None
        made: Script = source.script_at(num_rows, num_columns, loss_chunk, together, keeps)
        if self.plan.optimizer == BASE:
            return made
        key = (num_rows, num_columns, loss_chunk, together, keeps)
        if key not in self._scripts:
            self._scripts[key] = with_optimizer(made, self._entry.dims, self.plan.optimizer)
        return self._scripts[key]

    def step_events(self, num_rows: int, num_columns: int, loss_chunk: int, **how: Any) -> list[Event]:
        """See `Script.step_events`."""
        script = self.script_at(num_rows, num_columns, loss_chunk)
        return script.step_events(num_rows, num_columns, loss_chunk, **how)

    def eval_events(self, num_rows: int, num_columns: int, loss_chunk: int) -> list[Event]:
        """See `Script.eval_events`."""
        return self.script_at(num_rows, num_columns, loss_chunk).eval_events(num_rows, num_columns, loss_chunk)

    def _source(self) -> Any:
        """The script for every shape, or a live tracer where there is none."""
        if self._script is None and self._tracer is None:
            config = self.config.full() if isinstance(self.config, CatalogConfig) else self.config
            irregular = self._entry is not None and self._entry.script is None  # found out at an earlier time
            self._tracer, entry = traced(config, self.plan, irregular=irregular)
            if entry.script is not None or self._entry is None:
                self._keep(entry)
                self._script = self._scripted(entry)
        return self._tracer if self._script is None else self._script

    def _keep(self, entry: Entry) -> None:
        self._entry = entry
        if self._key is not None:
            trace_cache.store(self._key, codec.encode(entry))


def traced(config: Any, plan: Plan, irregular: bool = False) -> tuple[Any, Entry]:
    """A live tracer of a plan's variant with AdamW, and what to keep of it. Imports torch.

    Args:
        irregular: the step is known to have no script for every shape: none is looked for.
    """
    from fitune.memory import trace
    from fitune.memory.cut import NotRegular

    tracer = trace.Tracer(config, plan.with_(optimizer=BASE), irregular=irregular)
    try:
        text = tracer.script().to_json()
    except NotRegular:
        text = None  # each shape is traced by itself
    return tracer, Entry(text, dims_of(tracer), tracer.granule, {})


def cache_key(config: Any, plan: Plan) -> str:
    """Name of the cache entry of a model and a variant."""
    if isinstance(config, CatalogConfig):
        kind, values = f"catalog {config.shape.catalog_id}", config.values
    else:
        kind, values = f"{type(config).__module__}.{type(config).__qualname__}", config.to_dict()
    shape = {k: v for k, v in values.items() if not k.startswith("_") and k not in _NAMELESS}
    parts = (kind, shape, variant_of(plan), code_hash(), *versions().values())
    return hashlib.sha256(compact(parts).encode()).hexdigest()[:40]


@functools.cache
def code_hash() -> str:
    """Of the source of everything that a trace runs."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in TRACED_CODE:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def versions() -> dict[str, str]:
    """Of the libraries whose code a trace runs (read without importing them)."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def abilities(config: Any) -> tuple[bool, bool]:
    """(whether the model's class calls attention through transformers' interface, whether packed rows are possible as
    far as its layers go: none carries state across a row, or counts its tokens)."""
    if isinstance(config, CatalogConfig):
        return config.uses_interface, config.can_pack
    from transformers import AutoModelForCausalLM

    from fitune.model.attention import packs, uses_interface
    from fitune.model.build import RECURRENT_LAYERS

    recurrent = any(kind in RECURRENT_LAYERS for kind in getattr(config, "layer_types", None) or ())
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return False, False
    return uses_interface(model_class), packs(model_class) and not recurrent
