"""transformers' Trainer with peft and bitsandbytes, as TRL, LLaMA-Factory, Axolotl, ms-swift and fms-acceleration drive
it, and the hand-written loop without autocast.

Sources, read in their releases: transformers 4.48.1 ``trainer.py``; peft 0.13.2 ``utils/other.py``
(``prepare_model_for_kbit_training``: everything that is not quantised to fp32); trl 0.13.0 ``trainer/sft_trainer.py``
and ``utils.peft_module_casting_to_bf16`` (embedding and head back to bf16, norms stay fp32); torch.optim.adamw.
"""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.stacks import constants, zero
from fitune.memory.stacks.layers import LayerBytes, Precision, layer_bytes
from fitune.memory.stacks.losses import evaluation_loss, full_loss, liger_chunk_tokens
from fitune.memory.stacks.prediction import Phase, StackPrediction, Term, settle
from fitune.memory.stacks.settings import StackSettings
from fitune.memory.stacks.sharding import gathers, share
from fitune.memory.stacks.storage import fp32_weights, largest_linear, linear_bytes, optimizer
from fitune.units import format_bytes


@dataclass(frozen=True)
class Preset:
    """How one tool drives the Trainer.

    ``kbit``: it calls peft's k-bit preparation. ``bf16_cast``: it casts embedding and head back (TRL). ``autocast``:
    the step runs under 16-bit autocast. ``outputs_alive``: the loop holds the model's output during backward.
    ``dropout``: default of the adapters. ``fp32_adapters``: peft's ``autocast_adapter_dtype``;
    ``bf16_quantised_adapters``: except on a quantised base. ``fused_evaluation``: nor has evaluation whole logits.
    """

    kbit: bool = True
    bf16_cast: bool = False
    autocast: bool = True
    outputs_alive: bool = False
    dropout: float = 0.0
    fp32_adapters: bool = True
    bf16_quantised_adapters: bool = False
    fused_evaluation: bool = False


PRESETS = {
    # peft's own QLoRA recipe: k-bit preparation, Trainer
    "hf-trainer": Preset(),
    # trl 1.16.0 trainer/sft_trainer.py: no preparation, adapters of a quantised base in bf16, head fused with the loss
    "trl": Preset(kbit=False, bf16_quantised_adapters=True, fused_evaluation=True),
    # fms-acceleration's plugins skip the preparation
    "fms": Preset(kbit=False),
    # src/axolotl/loaders/model.py: prepares, then converts norms, embedding and head back for flash attention
    "axolotl": Preset(kbit=False),
    # src/llamafactory/model/model_utils/checkpointing.py: upcasts norms only on request; adapters in fp32
    "llamafactory": Preset(kbit=False),
    "ms-swift": Preset(kbit=False),
    "unsloth": Preset(kbit=False),
    "peft-loop": Preset(autocast=False, outputs_alive=True),
    # AnswerDotAI train.py: its own loop, no preparation
    "fsdp-qlora": Preset(kbit=False),
}
# Read in trl 0.13.0, 0.19.1 and 0.24.0; gone in 1.0.0.
TRL_BEFORE_1 = Preset(bf16_cast=True)


def preset_of(s: StackSettings, stack: str) -> Preset:
    """How the tool of that version drives the Trainer."""
    if stack == "trl" and s.tool_version is not None and s.tool_version < (1, 0):
        return TRL_BEFORE_1
    return PRESETS[stack]


@dataclass(frozen=True)
class Run:
    """The settings with what the preset makes of them."""

    s: StackSettings
    preset: Preset
    kbit: bool
    precision: Precision
    layer: LayerBytes
    head_bytes: int  # an element of embedding and head
    logits_bytes: int


def prepare(s: StackSettings, preset: Preset) -> Run:
    """Dtypes of the run: the k-bit preparation, TRL's cast back, autocast."""
    kbit = s.quantised and (preset.kbit if s.kbit_preparation is None else s.kbit_preparation)
    kbit = kbit and "gptq" not in s.base_dtype and not gathers(s)
    bf16_cast = kbit and preset.bf16_cast
    mixed = fp32_weights(s) and not zero.is_zero(s)  # DeepSpeed computes with bf16 weights of its own
    rest = kbit or (s.quantised and s.rest_in_fp32)
    wide = 4 if rest or mixed else 2
    # a quantised linear's output takes its input's dtype: fp32 norms make the whole stream fp32
    residual = 4 if rest or (mixed and not gathers(s)) else 2
    adapter = 4 if preset.fp32_adapters and s.method != "full" and not zero.is_zero(s) else 2
    if s.quantised and preset.bf16_quantised_adapters:
        adapter = 2
    precision = Precision(
        residual=residual, normed=residual, adapter=adapter, autocast=preset.autocast and not zero.is_zero(s),
        dropout=preset.dropout if s.adapter_dropout is None else s.adapter_dropout,
        trained_norms=s.method == "full",
    )  # fmt: skip
    head = 2 if bf16_cast else wide
    logits = 2 if preset.autocast else head
    return Run(s, preset, kbit, precision, layer_bytes(s, precision), head, logits)


def predict(s: StackSettings, stack: str) -> StackPrediction:
    """Peak of a Trainer run (or of the loop ``peft-loop``); error over published rows: docs/stacks.md."""
    run = prepare(s, preset_of(s, stack))
    static, trained_bytes, temporary = _states(run)
    gradients = Term("gradients", "gradients", trained_bytes)
    accumulated = (gradients,) if s.grad_accum > 1 else ()
    update = Term("temporary", "temporaries of the update", temporary, "passing")
    phases = [
        *_loss_phases(run, (*static, *_kept(run), *accumulated)),
        *_backward_phases(run, tuple(static), gradients),
        Phase("optimizer step", (*static, gradients, update), "step"),
    ]
    if s.evaluation:
        phases.append(_evaluation(run, tuple(static)))
    if run.kbit:
        phases.append(_preparation(run))
    return settle(stack, s, phases, _notes(run))


def _states(run: Run) -> tuple[list[Term], float, float]:
    """Static terms, bytes of all gradients, and bytes of the optimizer's temporaries."""
    s, m, part = run.s, run.s.shape, share(run.s)
    master = fp32_weights(s) and s.method == "full" and not zero.is_zero(s)
    head_params = m.embedding_params * (1 if m.tied else 2)
    linears = linear_bytes(s) * m.linear_params
    wide = float(run.head_bytes * head_params + (4 if run.precision.residual == 4 else 2) * m.norm_params)
    full_bytes = 4.0 if master else 2.0
    if s.method == "full":
        trained, each = m.params, full_bytes
        linears, wide = full_bytes * m.linear_params, full_bytes * (head_params + m.norm_params)
    else:
        trained, each = s.adapter_params, float(run.precision.adapter)
    opt = optimizer(s, each)
    weights = 0.0 if "params" in s.offload else (linears + wide) * part.weights
    static = [
        Term("weights", "weights", weights),
        Term("adapters", "adapters", 0 if s.method == "full" else trained * each * part.weights),
        Term("workspace", "cuBLAS workspace", constants.CUBLAS_WORKSPACE_BYTES),
    ]
    gradient = trained * each * part.gradients
    if opt.in_backward:
        gradient = max(largest_linear(s), m.embedding_params) * each
    if "optimizer" in s.offload:  # gradients go to the host as they appear, the update runs there
        return static, 0.0, 0.0
    if zero.is_zero(s):
        states, temporary = zero.optimizer_terms(s, trained)
        return [*static, *states, zero.buckets(s, trained)], gradient, temporary
    static.append(Term("optimizer", "moments", trained * opt.state_bytes * part.optimizer))
    return static, gradient, trained * opt.temporary_bytes * part.optimizer


def _kept(run: Run) -> list[Term]:
    """Activations kept from forward to backward."""
    s, m, p = run.s, run.s.shape, run.precision
    terms = []
    if s.checkpointing == "no":
        terms.append(Term("activations", f"activations of {m.layers} layers",
                          run.layer.saved * m.layers * s.tokens, "kept"))  # fmt: skip
    else:
        stream = 0 if "activations" in s.offload or s.checkpointing == "unsloth" else p.residual
        first = run.head_bytes if stream else 0
        inputs = (stream * (m.layers - 1) + first) * m.hidden * s.tokens
        terms.append(Term("activations", "layer inputs", inputs, "kept"))
    return terms


def _loss_phases(run: Run, held: tuple[Term, ...]) -> list[Phase]:
    """The final norm's fp32 input and its output stay during the head and the loss."""
    s, m, p = run.s, run.s.shape, run.precision
    norm = (4 if s.kernels not in ("foak", "liger") else p.residual) + p.normed
    final = Term("activations", "final norm", norm * m.hidden * s.tokens, "passing")
    held = (*held, *_autocast_copies(run))
    if s.loss in ("fused", "chunked"):
        return [Phase("forward loss", (*held, final, *_fused_loss(run)))]
    units = full_loss(s, logits_bytes=run.logits_bytes, outputs_alive=run.preset.outputs_alive)
    held = (*held, final)
    cached = 2.0 * s.tokens * m.vocab if s.transformers < (4, 46) and run.logits_bytes == 2 else 0.0
    forward = (*held, _logits(s, "logits, their fp32 copies and the log-softmax", units.forward))
    return [
        Phase("forward loss", forward, cached_bytes=cached),
        Phase("backward loss", (*held, _logits(s, "logits, log-softmax and their gradients", units.backward))),
    ]


def _autocast_copies(run: Run) -> list[Term]:
    """16-bit copies that autocast makes of fp32 weights: one of a frozen head, kept for its backward; of trained
    weights all, in its cache to the end of forward (torch documentation, "Automatic Mixed Precision package",
    ``cache_enabled``)."""
    s, m = run.s, run.s.shape
    if run.head_bytes != 4 or not run.precision.autocast or gathers(s):
        return []
    if s.method == "full":
        return [Term("workspace", "16-bit copies of all weights in autocast's cache", 2.0 * m.params, "passing")]
    return [Term("workspace", "16-bit copy of the fp32 head, made by autocast", 2.0 * m.embedding_params, "passing")]


def _logits(s: StackSettings, name: str, units: float) -> Term:
    label = f"{name} ({s.micro_batch}x{s.seq_len}x{s.shape.vocab})"
    return Term("logits", label, units * s.tokens * s.shape.vocab, "passing")


def _fused_loss(run: Run) -> list[Term]:
    """Liger: logits of one chunk in 16 bits and fp32, the gradient of the hidden states, and of a trained head."""
    s, m = run.s, run.s.shape
    chunk = liger_chunk_tokens(s.tokens, m.vocab, m.hidden)
    terms = [
        Term("logits", f"logits of one chunk of {chunk} tokens", 6.0 * chunk * m.vocab, "passing"),
        Term("activations", "gradient of the head's input", 2.0 * m.hidden * s.tokens, "passing"),
    ]
    if s.method == "full":
        terms.append(Term("gradients", "gradient of the head", 2.0 * m.embedding_params, "passing"))
    return terms


def _backward_phases(run: Run, static: tuple[Term, ...], gradients: Term) -> list[Phase]:
    """Backward through the last layer, where every layer's input is still there but only the head has gradients, and
    through the first, where it is the other way round. Each holds one layer's recomputed activations and its weights
    dequantised or gathered. (Without checkpointing the activations of all layers are there at the last one.)"""
    s, m = run.s, run.s.shape
    passing = [Term("activations", "one recomputed layer", run.layer.peak * s.tokens, "passing")]
    if s.checkpointing == "no":
        extra = (run.layer.peak - run.layer.saved) * s.tokens
        passing = [Term("activations", "gradients inside one layer", extra, "passing")]
    if s.quantised:
        element = 4.0 if run.precision.normed == 4 and not run.precision.autocast else 2.0
        passing.append(Term("workspace", "one linear, dequantised", element * largest_linear(s), "passing"))
    if gathers(s):
        unit = min(linear_bytes(s), 2.0) * m.linear_params / m.layers
        live = zero.live_bytes(s, min(linear_bytes(s), 2.0)) if s.parallel == "zero3" else 2 * unit
        passing.append(Term("workspace", "gathered layers", live, "passing"))
    early = gradients
    if s.method == "full" and s.grad_accum == 1:
        share_of_head = m.embedding_params / m.params
        early = Term("gradients", "gradient of the head", gradients.num_bytes * share_of_head)
    # FSDP1 watches the inputs of modules whose parameters are all frozen (torch.distributed.fsdp._runtime_utils,
    # _register_post_backward_reshard_only_hook), and one more tensor of their size per layer stays to the end of
    # backward: 8 KiB a token and layer at Mistral-7B's width in every published run with adapters, none in full ones
    frozen = s.parallel == "fsdp1" and s.method != "full" and s.checkpointing != "no"
    twice = _kept(run) if frozen else []
    one = Term("activations", "one layer's input", run.precision.residual * m.hidden * s.tokens, "kept")
    return [
        Phase("backward, last layer", (*static, early, *_kept(run), *twice, *passing), "layer"),
        Phase("backward, first layer", (*static, gradients, one, *passing), "layer"),
    ]


def _evaluation(run: Run, static: tuple[Term, ...]) -> Phase:
    """No activations are kept, but the logits are whole whatever the loss of training."""
    s, m = run.s, run.s.shape
    rows = s.eval_batch or s.micro_batch
    tokens = rows * s.seq_len
    if run.preset.fused_evaluation and s.loss in ("fused", "chunked"):
        return Phase("evaluation", (*static, *_fused_loss(run)))
    units = evaluation_loss(s, run.logits_bytes)
    hidden = Term("activations", "final norm", (4 + run.precision.normed) * m.hidden * tokens, "passing")
    name = f"logits of evaluation, their fp32 copies and the log-softmax ({rows}x{s.seq_len}x{m.vocab})"
    return Phase("evaluation", (*static, hidden, Term("logits", name, units * tokens * m.vocab, "passing")))


def _preparation(run: Run) -> Phase:
    """The widest parameter exists in 16 bits and in fp32 at once."""
    m = run.s.shape
    head_params = m.embedding_params * (1 if m.tied else 2)
    linears = linear_bytes(run.s) * m.linear_params
    terms = (
        Term("weights", "quantised linears", linears),
        Term("weights", "embedding and head in fp32", 4.0 * (head_params + m.norm_params)),
        Term("workspace", "embedding in 16 bits, being replaced", 2.0 * m.embedding_params, "passing"),
    )
    return Phase("k-bit preparation", terms)


def _notes(run: Run) -> list[str]:
    s, m = run.s, run.s.shape
    notes = []
    head_params = m.embedding_params * (1 if m.tied else 2)
    if run.kbit and run.head_bytes == 4:
        more = format_bytes(4 * (head_params + m.norm_params))
        notes.append(f"k-bit preparation upcasts embedding, head and norms to fp32: {more}")
    if run.precision.residual == 4 and s.quantised:
        more = format_bytes(2 * m.hidden * m.layers * s.tokens)
        notes.append(f"fp32 norms make the stream between layers fp32: {more} more of layer inputs")
    if s.loss in ("full_logits", "full_logits_fastce"):
        units = full_loss(s, logits_bytes=run.logits_bytes, outputs_alive=run.preset.outputs_alive)
        size = format_bytes(max(units.forward, units.backward) * s.tokens * m.vocab)
        notes.append(f"whole logits, their fp32 copies and gradients, {s.micro_batch}x{s.seq_len}x{m.vocab}: {size}")
    if run.precision.residual == 4 and not run.kbit:
        linears = 0 if s.quantised else m.linear_params
        notes.append(f"weights that are not quantised are fp32: {format_bytes(4 * (linears + head_params))}")
    if (
        s.evaluation
        and not run.preset.fused_evaluation
        and (s.loss in ("fused", "chunked") or (s.eval_batch or 0) > s.micro_batch)
    ):
        rows = s.eval_batch or s.micro_batch
        size = format_bytes(evaluation_loss(s, run.logits_bytes) * rows * s.seq_len * m.vocab)
        notes.append(f"evaluation computes whole logits, {rows}x{s.seq_len}x{m.vocab}: {size}")
    if s.quantised and s.parallel in ("ddp", "zero1", "zero2"):
        size = format_bytes(linear_bytes(s) * m.linear_params)
        notes.append(f"every GPU keeps all quantised weights: {size}")
    temporary = _states(run)[2]
    if s.method == "full" and temporary and not zero.is_zero(s):
        size = format_bytes(temporary)
        notes.append(f"the optimizer's foreach update holds one more copy of all parameters: {size}")
    return notes
