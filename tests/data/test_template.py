"""Which template is used, and how conversations are rewritten for templates that cannot render them."""

from __future__ import annotations

import datetime

import pytest

from fitune.data import limits
from fitune.data.conversations import Conversation
from fitune.data.encode import encode
from fitune.data.template import Adaptations, CannotRender, adapt, choose_template
from fitune.errors import UserError
from tests.data.chat_templates import FAMILIES

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "值"}}}
TOOLS = ({"type": "function", "function": {"name": "f", "description": "d"}},)


def with_template(tokenizer, name):
    tokenizer.chat_template = FAMILIES[name].template
    return choose_template(tokenizer)


def adapted(choice, *messages, tools=None):
    changes = Adaptations()
    rendered, tools = adapt(Conversation(tuple(messages), tools, 0), choice, changes)
    return [(m["role"], m["content"]) for m in rendered], tools, changes.notes()


def test_default_is_chatml_where_its_tokens_exist(tokenizer):
    tokenizer.chat_template = None
    choice = choose_template(tokenizer)
    assert choice.name == "chatml" and "<|im_start|>" in choice.line()
    text = choice.render(tokenizer, [SYSTEM, USER, ANSWER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


def test_default_is_instruction_and_response_otherwise(tokenizer, monkeypatch):
    tokenizer.chat_template = None
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"a": 0})
    choice = choose_template(tokenizer)
    assert choice.name == "instruction" and choice.reason.endswith("answers end with <|im_end|>")
    assert (
        choice.render(tokenizer, [SYSTEM, USER], prompt=True) == "Be brief.\n\n### Instruction:\nq\n\n### Response:\n"
    )
    (encoded,) = encode(Conversation((USER, ANSWER, USER, ANSWER), None, 0), tokenizer, choice, seq_len=500)
    assert tokenizer.decode([i for i in encoded.labels if i != -100]) == "a<|im_end|>a<|im_end|>"


def test_a_base_tokenizer_that_adds_bos_gets_it_in_the_default(tokenizer, monkeypatch):
    tokenizer.chat_template = None
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"a": 0})
    monkeypatch.setattr("fitune.data.template._adds_bos", lambda tokenizer: True)
    assert choose_template(tokenizer).render(tokenizer, [USER]).startswith("<|im_start|>### Instruction:")


def test_what_templates_can_render_is_found_by_trying(tokenizer):
    traits = {name: with_template(tokenizer, name) for name in FAMILIES}
    assert [name for name, choice in traits.items() if not choice.system] == ["mistral"]
    assert [name for name, choice in traits.items() if not choice.consecutive] == ["mistral"]
    assert [name for name, choice in traits.items() if choice.tools] == ["qwen3"]
    assert [name for name, choice in traits.items() if choice.reasoning_key] == ["qwen3", "qwen3.5"]


def test_system_and_neighbours_are_merged_where_the_template_wants_it(tokenizer):
    choice = with_template(tokenizer, "mistral")
    messages, _, notes = adapted(choice, SYSTEM, USER, USER, ANSWER, ANSWER)
    assert messages == [("user", "Be brief.\n\nq\n\nq"), ("assistant", "a\n\na")]
    assert notes == [
        "system message put before the first user message (the template knows none) in 1 record",
        "messages of one role in a row merged (the template wants roles to alternate) in 1 record",
    ]
    assert choice.render(tokenizer, [{"role": r, "content": c} for r, c in messages]).startswith("<s>[INST] Be brief.")
    with pytest.raises(CannotRender, match="one marked as not trained on"):
        adapted(choice, USER, ANSWER, {**ANSWER, "loss": False})


def test_nothing_is_merged_where_the_template_needs_no_help(tokenizer):
    choice = with_template(tokenizer, "chatml")
    assert adapted(choice, SYSTEM, USER, USER, ANSWER)[0] == [
        ("system", "Be brief."), ("user", "q"), ("user", "q"), ("assistant", "a")
    ]  # fmt: skip


def test_tools_are_written_as_text_where_the_template_knows_none(tokenizer):
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages, tools, notes = adapted(
        with_template(tokenizer, "chatml"), USER, calling, {"role": "tool", "content": "7"}, ANSWER, tools=TOOLS
    )
    assert tools is None and [role for role, _ in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert '{"name": "f", "description": "d"}' in messages[0][1]
    assert messages[2][1] == '<tool_call>\n{"name": "f", "arguments": {"x": "值"}}\n</tool_call>'
    assert messages[3][1] == "<tool_response>\n7\n</tool_response>"
    assert notes == ["tool schemas, calls and results written as text (the template knows no tools) in 1 record"]


def test_calls_get_ids_where_the_template_may_want_them(tokenizer):
    choice = with_template(tokenizer, "qwen3")
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    result = {"role": "tool", "content": "7"}
    messages, _ = adapt(Conversation((USER, calling, result, result, ANSWER), TOOLS, 0), choice)
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["call00001", "call00002"]
    assert [m["tool_call_id"] for m in messages[2:4]] == ["call00001", "call00002"]


def test_reasoning_is_written_in_the_answer_where_the_template_knows_none(tokenizer):
    thinking = {**ANSWER, "reasoning_content": "\nwhy\n"}
    messages, _, notes = adapted(with_template(tokenizer, "chatml"), USER, thinking)
    assert messages[1] == ("assistant", "<think>\nwhy\n</think>\n\na") and "<think>" in notes[0]


def test_templates_that_write_the_date_write_the_same_one_again(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') + '\n' }}" + FAMILIES["chatml"].template
    day = datetime.date(2024, 2, 29)
    choice = choose_template(tokenizer, date=day)
    assert choice.date == day and choice.render(tokenizer, [USER]).startswith("29 Feb 2024\n")
    assert choose_template(tokenizer).date == datetime.date.today()
    tokenizer.chat_template = FAMILIES["chatml"].template
    assert choose_template(tokenizer).date is None


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "it leaves out the question or the answer"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages + 1 }}", "can only concatenate list"),
    ],
)
def test_a_broken_template_is_refused(tokenizer, template, why):
    tokenizer.chat_template = template
    with pytest.raises(UserError) as error:
        choose_template(tokenizer)
    assert "cannot render a question and its answer" in error.value.what and why in error.value.why


SHOWN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
# name -> (template, what is said about it)
GREEDY = {
    "a constant of 100 GB": (SHOWN + "{{ 'a' * 10**11 }}", "it needs more than 0.5 GiB of memory"),
    "memory bit by bit": (SHOWN + "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
                          "{% set n.x = n.x + n.x %}{% endfor %}", "it needs more than 0.5 GiB of memory"),
    "loops in loops": (SHOWN + "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
                       "it takes longer than 1 s"),
    "a number without an end": (SHOWN + "{{ (9**(9**9)) % 7 }}", "it takes longer than 1 s"),
    "only of the real data": (SHOWN + "{% if messages[0]['content'] == 'q' %}{{ 'a' * 10**7 }}{% endif %}",
                              "it makes 10,000,002 characters of "),
}  # fmt: skip


@pytest.mark.skipif(not limits._STATM.exists(), reason="memory is limited on Linux only")
@pytest.mark.parametrize("name", GREEDY)
def test_templates_without_an_end(name: str, tokenizer, monkeypatch):
    """The sandbox keeps a template from the system, not from using up time and memory."""
    import resource
    import signal

    monkeypatch.setattr(limits, "RENDER_CPU_S", 1.0)
    monkeypatch.setattr(limits, "RENDER_BYTES", 1 << 29)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    tokenizer.chat_template, why = GREEDY[name]
    with pytest.raises(UserError) as caught:
        choose_template(tokenizer).render(tokenizer, [USER, ANSWER])
    assert caught.value.what == "the model's chat template is broken or hostile" and why in caught.value.why
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
