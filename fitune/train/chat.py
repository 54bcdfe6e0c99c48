"""Talk to a run or to a model as it is, through the very modules that train. See `Chat`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune import plan as plans
from fitune import recipe as recipes
from fitune.catalog import models as catalog
from fitune.errors import UserError, first_line
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train.run_folder import RUNS, RunFolder

if TYPE_CHECKING:
    import torch

    from fitune.model.build import Built
    from fitune.model.source import ModelSource

_PLAN_TOKENS = 512  # a model that nobody trained is planned for rows of this many tokens
_RUN_FILES = ("plan.json", "recipe.yaml")


@dataclass
class _Parts:
    """What a conversation needs. `trained` are tensors by parameter name that replace those of the base model."""

    source: ModelSource
    config: Any
    plan: Plan
    tokenizer: Any
    trained: dict[str, torch.Tensor]
    is_text: bool = False  # trained on raw text: what is typed is continued


class Chat:
    """A conversation with a trained run or a model; answers are greedy, so the same words get the same answer.

    Args:
        run_or_model: a run's folder, its name below `runs/`, or a model as in `fitune train`. A run that is not
            finished answers with its newest checkpoint.
        max_tokens: of the longest answer.

    Raises:
        UserError: no such run or model, a run without anything trained, or a model that does not fit (exit code 3).
    """

    def __init__(self, run_or_model: str, max_tokens: int):
        from fitune.data.template import choose_template

        parts = _of_run(_open_run(run_or_model)) if _names_run(run_or_model) else _of_model(run_or_model)
        self.tokenizer, self.max_tokens = parts.tokenizer, max_tokens
        self.template = None if parts.is_text else choose_template(self.tokenizer)
        self.built = _load(parts)
        self.longest = getattr(parts.config, "max_position_embeddings", None)
        self.messages: list[dict[str, Any]] = []

    def answer(self, text: str) -> str:
        """The model's answer to `text` and all that was said before; when that grows longer than the model can read,
        the earliest questions are forgotten.

        Raises:
            UserError: this text alone is too long, or the chat template refuses it.
        """
        from fitune.train.sampling import answer

        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._prompt_ids(asked)
        while self.longest and len(ids) + self.max_tokens > self.longest and len(asked) > 1:
            asked = asked[2:]
            ids = self._prompt_ids(asked)
        if self.longest and len(ids) >= self.longest:
            raise UserError(
                "this is too long for the model", f"{len(ids)} tokens; it reads {self.longest}", "ask something shorter"
            )
        room = self.max_tokens if not self.longest else min(self.max_tokens, self.longest - len(ids))
        said = answer(self.built, self.tokenizer, ids, max_tokens=room)
        self.messages = [] if self.template is None else [*asked, {"role": "assistant", "content": said}]
        return said

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        from fitune.data.template import CannotRender

        if self.template is None:
            return list(self.tokenizer(messages[-1]["content"])["input_ids"])
        try:
            text = self.template.render(self.tokenizer, messages, prompt=True)
        except CannotRender as error:
            raise UserError("the chat template refuses this conversation", str(error), "start a new one") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _names_run(name: str) -> bool:
    """Whether this is a run (or can only be meant as one), not a model."""
    for path in (Path(name), RUNS / name):
        if all((path / file).is_file() for file in _RUN_FILES):
            return True
    path = Path(name).expanduser()
    if path.is_dir():
        return not any((path / file).is_file() for file in ("config.json", "adapter_config.json"))
    if path.exists() or name.startswith("random:") or catalog.find(name) is not None:
        return False
    # What is left is owner/name of a hub, a path that does not exist, or a misspelt run.
    return name.count("/") != 1 or name.startswith((".", "~", f"{RUNS}/"))


def _open_run(name: str) -> RunFolder:
    try:
        return RunFolder.open_existing(name)
    except UserError as error:
        if "/" in name or Path(name).exists():
            raise
        raise UserError(f"no run and no model is called {name!r}", error.why,
                        f"{error.fix}; {catalog.hint(name, 'models')}") from None  # fmt: skip


def _of_model(name: str) -> _Parts:
    from fitune.model.source import resolve
    from fitune.planner import make_plan
    from fitune.train.session import check_machine, require_fit

    recipe = Recipe(model=name, batch=1, seq_len=_PLAN_TOKENS, nproc=1)
    check_machine(recipe)
    source = resolve(name, weights=True)
    longest = getattr(source.config, "max_position_embeddings", None) or _PLAN_TOKENS
    fitted = require_fit(make_plan(recipe.with_(seq_len=min(_PLAN_TOKENS, longest)), config=source.config))
    return _Parts(source, source.config, fitted.with_(adapter=None), source.tokenizer(), {})


def _of_run(run: RunFolder) -> _Parts:
    from fitune.model.build import with_rope_scaling
    from fitune.model.source import resolve

    recipe = recipes.build(recipes.load(run.recipe_path), str(run.recipe_path))
    plan = _on_this_machine(plans.from_json(run.plan_path.read_text(encoding="utf-8")))
    trained = _trained(run, plan)
    whole = plan.method == "full" and run.model_path.is_dir()
    source = resolve(
        str(run.model_path) if whole else recipe.model,
        hub=recipe.hub,
        seed=recipe.seed,
        trust_remote_code=recipe.trust_remote_code,
        weights=True,
    )
    config = source.config if whole else with_rope_scaling(source.config, recipe.rope_scaling)
    result = next((path for path in (run.adapter_path, run.model_path) if path.is_dir()), None)
    tokenizer = _tokenizer(result, recipe) if result is not None else source.tokenizer()
    is_text = any(e.get("event") == "data" and e.get("template") is None for e in run.events())
    return _Parts(source, config, plan, tokenizer, trained, is_text)


def _on_this_machine(plan: Plan) -> Plan:
    """The plan of a run that was trained on a GPU, for the CPU where there is none."""
    import torch

    if plan.device == "cpu" or torch.cuda.is_available():
        return plan
    dense = plan.base_format in ("fp32", "bf16", "fp16")
    return plan.with_(
        device="cpu",
        precision="fp32",
        loss_scaling=False,
        embedding_place="device",
        base_format="fp32" if dense else plan.base_format,
        attention="native" if plan.attention == "native" else "cpu",
    )


def _trained(run: RunFolder, plan: Plan) -> dict[str, torch.Tensor]:
    """What training changed: the adapter, nothing for a whole model (it is read as one), else the newest checkpoint."""
    from fitune.model.adapter_io import read_adapter
    from fitune.train import checkpoint

    if run.adapter_path.is_dir():
        return read_adapter(run.adapter_path)[1]
    if run.model_path.is_dir():
        return {}
    saved = checkpoint.load_latest(run.checkpoints_path)
    if saved is None:
        raise UserError(
            f"nothing to talk to in {run.path}",
            "this run has neither a result nor a checkpoint yet",
            f"train it: fitune train --resume {run.argument}",
        )
    return saved.trained()


def _tokenizer(folder: Path, recipe: Recipe) -> Any:
    """The tokenizer that the run saved beside its result, with the chat template it was trained with."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        why = first_line(error)
        raise UserError(f"cannot read the tokenizer in {folder}", why, "copy the run again") from None


def _load(parts: _Parts) -> Built:
    import torch

    from fitune.model.build import add_adapter, build, fill, wanted_weights

    built = build(parts.config, parts.plan, torch.device(parts.plan.device))
    names = set(wanted_weights(built))
    fill(built, parts.source.iter_weights(names), parts.plan)
    add_adapter(built, parts.plan)
    parameters = built.trainable()
    with torch.no_grad():
        for name, tensor in parts.trained.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise UserError(
                    "what was trained does not fit the base model",
                    f"{name} is unknown or of another shape",
                    "use the base model that the run was trained on",
                )
            parameters[name].copy_(tensor)
    return built
